"""Presets are the published models: fields, every tensor's name and shape, and the files' sizes to the byte.

Sources:
- `get_transformer_config` of Diffusers' scripts/convert_wan_to_diffusers.py, which wrote Diffusers' folders.
- `WanModel` (wan/modules/model.py) and wan/configs of github.com/Wan-Video/Wan2.1 (9737cba) and Wan2.2
  (42bf4cf).
- Of Wan-AI's files on the Hugging Face Hub, read from public repositories that quote them: sizes of the
  safetensors files of Wan2.1-T2V-1.3B, -T2V-14B, -I2V-14B-480P, Wan2.2-T2V-A14B and -TI2V-5B; total_size of
  the index of Wan2.2-T2V-A14B-Diffusers; numbers of tensors and elements. A file's size follows from its
  header, which lists the name, dtype, shape and place of each tensor.
No published figure was found for Wan2.1-I2V-14B-720P and -FLF2V-14B-720P: the first two sources are theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod

import pytest
import torch
from mm_wan.formats import ORIGINAL_KEYS
from mm_wan.predictor.transformer import WanTransformer
from mm_wan.presets import I2V_BOUNDARY, PRESETS, T2V_BOUNDARY

Shapes = dict[str, tuple[int, ...]]

# -- fields ----------------------------------------------------------------------------------------

LARGE = {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824}
SMALL = {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}
CLIP = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
CONVERTED = {
    "wan2.1-t2v-1.3b": {**SMALL, "in_channels": 16},
    "wan2.1-t2v-14b": {**LARGE, "in_channels": 16},
    "wan2.1-i2v-14b-480p": {**LARGE, **CLIP},
    "wan2.1-i2v-14b-720p": {**LARGE, **CLIP},
    "wan2.1-flf2v-14b-720p": {**LARGE, **CLIP, "pos_embed_seq_len": 257 * 2},
    "wan2.2-t2v-a14b": {**LARGE, "in_channels": 16},
    "wan2.2-i2v-a14b": {**LARGE, "in_channels": 36},
    "wan2.2-ti2v-5b": {
        "num_attention_heads": 24,
        "num_layers": 30,
        "ffn_dim": 14336,
        "in_channels": 48,
        "out_channels": 48,
    },
}
ALIKE = {
    "added_kv_proj_dim": None,
    "attention_head_dim": 128,
    "cross_attn_norm": True,
    "eps": 1e-6,
    "freq_dim": 256,
    "image_dim": None,
    "out_channels": 16,
    "patch_size": (1, 2, 2),
    "pos_embed_seq_len": None,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
    "text_dim": 4096,
}


@pytest.mark.parametrize("preset", PRESETS)
def test_fields_are_those_of_the_conversion_that_wrote_the_published_folders(preset):
    assert PRESETS[preset].architecture.fields == {**ALIKE, **CONVERTED[preset]}


def test_boundaries_are_those_that_the_conversion_gives_the_pipelines():
    assert (T2V_BOUNDARY, I2V_BOUNDARY) == (0.875, 0.9)
    found = {name: preset.boundary for name, preset in PRESETS.items() if preset.boundary is not None}
    assert found == {"wan2.2-t2v-a14b": 0.875, "wan2.2-i2v-a14b": 0.9}


# -- tensors ---------------------------------------------------------------------------------------


def affine(name: str, *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def wan_model(preset: str) -> Shapes:
    """WanModel's state dict, in its order."""
    fields = {**ALIKE, **CONVERTED[preset]}
    width, inner = fields["num_attention_heads"] * 128, fields["ffn_dim"]
    image, positions = fields["image_dim"], fields["pos_embed_seq_len"]
    named = [
        *affine("patch_embedding", width, fields["in_channels"], 1, 2, 2),
        *affine("text_embedding.0", width, 4096),
        *affine("text_embedding.2", width, width),
        *affine("time_embedding.0", width, 256),
        *affine("time_embedding.2", width, width),
        *affine("time_projection.1", 6 * width, width),
    ]
    for block in (f"blocks.{index}" for index in range(fields["num_layers"])):
        named += [(f"{block}.modulation", (1, 6, width))]
        for kind in ("self", "cross"):
            attention = f"{block}.{kind}_attn"
            for layer in "qkvo":
                named += affine(f"{attention}.{layer}", width, width)
            named += [(f"{attention}.{norm}.weight", (width,)) for norm in ("norm_q", "norm_k")]
            if kind == "self":
                named += affine(f"{block}.norm3", width)
            elif image:
                named += [*affine(f"{attention}.k_img", width, width)]
                named += [*affine(f"{attention}.v_img", width, width)]
                named += [(f"{attention}.norm_k_img.weight", (width,))]
        named += [*affine(f"{block}.ffn.0", inner, width), *affine(f"{block}.ffn.2", width, inner)]
    named += [("head.modulation", (1, 2, width)), *affine("head.head", 4 * fields["out_channels"], width)]
    if positions:
        named += [("img_emb.emb_pos", (1, positions, image))]
    if image:
        named += [*affine("img_emb.proj.0", image), *affine("img_emb.proj.1", image, image)]
        named += [*affine("img_emb.proj.3", width, image), *affine("img_emb.proj.4", width)]
    return dict(named)


def own(preset: str) -> Shapes:
    """The preset's tensors on meta, under Wan-AI's names."""
    with torch.device("meta"):
        model = WanTransformer(preset=preset)
    assert all(tensor.is_meta for tensor in model.parameters())
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return dict(ORIGINAL_KEYS.stored_shapes(shapes))


@pytest.mark.parametrize("preset", PRESETS)
def test_tensors_are_those_of_wan_ais_model(preset):
    assert own(preset) == wan_model(preset)


COUNTS = {
    "wan2.1-t2v-1.3b": (825, 1_418_996_800),
    "wan2.1-t2v-14b": (1095, 14_288_491_584),
    "wan2.2-t2v-a14b": (1095, 57_153_966_336 // 4),  # the index's total_size, in float32
    "wan2.2-i2v-a14b": (1095, 14_288_901_184),
    "wan2.2-ti2v-5b": (825, 19_999_150_848 // 4),
}


@pytest.mark.parametrize("preset", COUNTS)
def test_tensors_and_elements_are_as_many_as_published(preset):
    shapes = own(preset)
    assert (len(shapes), sum(map(prod, shapes.values()))) == COUNTS[preset]


# -- files -----------------------------------------------------------------------------------------

PUBLISHED = {  # bytes of each safetensors file; None where only some of them were found
    "wan2.1-t2v-1.3b": [5_676_070_424],
    "wan2.1-t2v-14b": [9_887_603_256, 9_839_059_648, *[9_839_059_744] * 3, 7_910_235_256],
    "wan2.1-i2v-14b-480p": [
        *(9_847_223_624, 9_797_021_016, 9_797_041_744),
        *[9_692_142_864] * 3,
        7_061_933_536,
    ],
    "wan2.2-t2v-a14b": [9_992_481_544, None, None, None, None, 7_595_559_224],
    "wan2.2-ti2v-5b": [9_825_014_472, 9_995_661_736, 178_558_176],
}
MOST = {"wan2.1": 9.9e9, "wan2.2": 10e9}
"""Bytes of tensors in a file, with which the published files come about."""


def cut(shapes: Shapes, most: float) -> list[Shapes]:
    """Files of at most so many bytes, filled in the order of the state dict, in float32."""
    files: list[Shapes] = [{}]
    for name, shape in shapes.items():
        if files[-1] and 4 * sum(map(prod, [*files[-1].values(), shape])) > most:
            files.append({})
        files[-1][name] = shape
    return files


def file_size(shapes: Shapes) -> int:
    """Of a safetensors file: 8 bytes, a header in JSON filled up to a multiple of 8, and the tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(shapes):
        start, end = end, end + 4 * prod(shapes[name])
        header[name] = {"dtype": "F32", "shape": list(shapes[name]), "data_offsets": [start, end]}
    length = len(json.dumps(header, separators=(",", ":")))
    return 8 + length + -length % 8 + end


@pytest.mark.parametrize("preset", PUBLISHED)
def test_the_published_files_hold_these_tensors_to_the_byte(preset):
    found, order = own(preset), wan_model(preset)
    files = cut({name: found[name] for name in order}, MOST[preset.partition("-")[0]])
    sizes = [file_size(shapes) for shapes in files]
    assert len(sizes) == len(PUBLISHED[preset])
    assert sizes == [known or size for known, size in zip(PUBLISHED[preset], sizes, strict=True)]
