"""Wan's models in one file, as Wan-AI and ComfyUI publish them: names of their tensors, and their configs.

Names are those of https://github.com/Wan-Video/Wan2.1 and Wan2.2 (wan/modules: vae.py, vae2_2.py, t5.py,
model.py). Such files have no config.json: sizes come from the shapes of the tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_core.errors import CheckpointError
from mm_core.weights import (
    KeyMap,
    Rename,
    StoredTensors,
    check_unscaled,
    open_stored,
)

FORMAT = "wan/file"
PICKLES = ("Wan2.1_VAE.pth", "Wan2.2_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth")
"""The files that Wan-AI publishes as torch files; they are read without running code in them."""

COMFY = "model.diffusion_model."
"""What ComfyUI puts before a transformer's names when it saves a model."""
_HEAD = 128
"""Width of a head in every published transformer: it cannot be seen in shapes."""
_ODD = (LookupError, ValueError, ZeroDivisionError)
"""What sizes from absent tensors, and from tensors with other dimensions or without numbers, raise."""

# Of https://huggingface.co/Wan-AI/Wan2.2-TI2V-5B-Diffusers (vae/config.json).
_MEAN_48 = [
    *(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891),
    *(0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502),
    *(-0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723),
    *(-0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
]
_STD_48 = [
    *(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901),
    *(0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659),
    *(0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944),
    *(0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
]


def is_single(path: Path) -> bool:
    """Whether a path names one file of weights, which need not be there yet."""
    return path.suffix in (".safetensors", ".pth", ".pt", ".bin", ".ckpt")


def names_expert(file: str, expert: str) -> bool:
    """Whether a file's name has the word `high` or `low`: `wan2.2_t2v_high_noise`, `Wan2_2-T2V-A14B_HIGH`."""
    return re.search(rf"(?<![a-z]){expert}(?![a-z])", file.lower()) is not None


def pair_in(folder: Path) -> list[str]:
    """Names of files in a folder with Wan 2.2's experts, each in one file with `high` or `low` in its name;
    [] unless there are both."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    found = {name: [each for each in names if names_expert(each, name)] for name in ("high", "low")}
    return [*dict.fromkeys([*found["high"], *found["low"]])] if all(found.values()) else []


def open_single(path: Path) -> StoredTensors:
    """Opens one file of a Wan model.

    Raises:
        CheckpointError: it is a pickle that Wan-AI does not publish, damaged, or quantised with scales.
    """
    if path.suffix != ".safetensors" and path.name not in PICKLES:
        raise CheckpointError(
            "this is a pickle file, which can run code",
            where=str(path),
            accepted=f"a .safetensors file, or {', '.join(PICKLES)}",
        )
    stored = open_stored(path)
    check_unscaled(stored.shapes, path)
    return stored


# -- the autoencoder -------------------------------------------------------------------------------


def vae_config(path: Path) -> dict[str, Any]:
    """The config of AutoencoderKLWan for a file of its weights, without those that have the class's defaults.

    Raises:
        CheckpointError: `open_single` refuses the file, or it holds another model.
    """
    shapes = open_single(path).shapes
    try:
        nested = any(name.startswith("encoder.downsamples.0.downsamples.") for name in shapes)
        levels = _nested_levels(shapes) if nested else _flat_levels(shapes)
        base, pixels, channels = (
            shapes["encoder.conv1.weight"][0],
            shapes["encoder.conv1.weight"][1],
            shapes["conv2.weight"][0],
        )
        multiples = [width // base for width, _, _ in levels]
        decoded = shapes["decoder.conv1.weight"][0] // multiples[-1]
        _check_positive(base, pixels, channels, decoded, *multiples)
        found = {
            "base_dim": base,
            "decoder_base_dim": decoded,
            "z_dim": channels,
            "dim_mult": multiples,
            "num_res_blocks": levels[0][1],
            "temperal_downsample": [halves for _, _, halves in levels[:-1]],
            "in_channels": pixels,
            "out_channels": pixels,
            "is_residual": nested,
        }
    except _ODD:
        raise _other(path, "autoencoder") from None
    if pixels > 3:  # pixels of a patch
        patch = math.isqrt(pixels // 3)
        found |= {"patch_size": patch, "scale_factor_spatial": 2 ** (len(levels) - 1) * patch}
    if channels == len(_MEAN_48):
        found |= {"latents_mean": _MEAN_48, "latents_std": _STD_48}
    return found


def _flat_levels(shapes: Mapping[str, Sequence[int]]) -> list[tuple[int, int, bool]]:
    """Width, residual blocks, and whether frames are halved at its end, of each level in Wan 2.1."""
    levels: list[tuple[int, int, bool]] = []
    blocks = index = width = 0
    while True:
        at = f"encoder.downsamples.{index}"
        if f"{at}.residual.2.weight" in shapes:
            width, blocks = shapes[f"{at}.residual.2.weight"][0], blocks + 1
        else:
            levels.append((width, blocks, f"{at}.time_conv.weight" in shapes))
            blocks = 0
            if f"{at}.resample.1.weight" not in shapes:
                return levels
        index += 1


def _nested_levels(shapes: Mapping[str, Sequence[int]]) -> list[tuple[int, int, bool]]:
    """The same in Wan 2.2."""
    levels: list[tuple[int, int, bool]] = []
    while (at := f"encoder.downsamples.{len(levels)}.downsamples") + ".0.residual.2.weight" in shapes:
        blocks = sum(f"{at}.{index}.residual.2.weight" in shapes for index in range(99))
        width = shapes[f"{at}.0.residual.2.weight"][0]
        levels.append((width, blocks, f"{at}.{blocks}.time_conv.weight" in shapes))
    return levels


def _residual(ours: str, theirs: str) -> list[Rename]:
    layers = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}
    layers["conv_shortcut"] = "shortcut"
    return [Rename(f"{ours}.{one}.{{p}}", f"{theirs}.{other}.{{p}}") for one, other in layers.items()]


def vae_keys(config: Mapping[str, Any]) -> KeyMap:
    """Names of AutoencoderKLWan's tensors -> names in Wan-AI's file, for an autoencoder of this config."""
    rules = [Rename("quant_conv.{p}", "conv1.{p}"), Rename("post_quant_conv.{p}", "conv2.{p}")]
    for side in ("encoder", "decoder"):
        rules += [
            Rename(f"{side}.conv_in.{{p}}", f"{side}.conv1.{{p}}"),
            *_residual(f"{side}.mid_block.resnets.0", f"{side}.middle.0"),
            *_residual(f"{side}.mid_block.resnets.1", f"{side}.middle.2"),
            Rename(f"{side}.mid_block.attentions.0.{{p...}}", f"{side}.middle.1.{{p...}}"),
            Rename(f"{side}.norm_out.{{p}}", f"{side}.head.0.{{p}}"),
            Rename(f"{side}.conv_out.{{p}}", f"{side}.head.2.{{p}}"),
        ]
    blocks = config["num_res_blocks"]
    if config["is_residual"]:
        for side, down, count in (("encoder", "down", blocks), ("decoder", "up", blocks + 1)):
            ours, theirs = f"{side}.{down}_blocks.{{i}}", f"{side}.{down}samples.{{i}}.{down}samples"
            rules += _residual(f"{ours}.resnets.{{j}}", f"{theirs}.{{j}}")
            rules.append(Rename(f"{ours}.{down}sampler.{{p...}}", f"{theirs}.{count}.{{p...}}"))
        return KeyMap(tuple(rules))
    rules += _residual("encoder.down_blocks.{i}", "encoder.downsamples.{i}")
    rules.append(Rename("encoder.down_blocks.{i}.{p...}", "encoder.downsamples.{i}.{p...}"))
    for level in range(len(config["dim_mult"])):
        first = level * (blocks + 2)
        for index in range(blocks + 1):
            rules += _residual(
                f"decoder.up_blocks.{level}.resnets.{index}", f"decoder.upsamples.{first + index}"
            )
        ours, theirs = f"decoder.up_blocks.{level}.upsamplers.0", f"decoder.upsamples.{first + blocks + 1}"
        rules.append(Rename(f"{ours}.{{p...}}", f"{theirs}.{{p...}}"))
    return KeyMap(tuple(rules))


# -- the text encoder ------------------------------------------------------------------------------

_BLOCK = {
    "layer.0.layer_norm": "norm1",
    **{f"layer.0.SelfAttention.{name}": f"attn.{name}" for name in "qkvo"},
    "layer.0.SelfAttention.relative_attention_bias": "pos_embedding.embedding",
    "layer.1.layer_norm": "norm2",
    "layer.1.DenseReluDense.wi_0": "ffn.gate.0",
    "layer.1.DenseReluDense.wi_1": "ffn.fc1",
    "layer.1.DenseReluDense.wo": "ffn.fc2",
}
UMT5_KEYS = KeyMap(
    (
        Rename("shared.weight", "token_embedding.weight"),
        Rename("encoder.final_layer_norm.weight", "norm.weight"),
        *(
            Rename(f"encoder.block.{{i}}.{one}.weight", f"blocks.{{i}}.{other}.weight")
            for one, other in _BLOCK.items()
        ),
    )
)
"""Names of Transformers' UMT5EncoderModel in files -> names in Wan-AI's file."""


def umt5_config(path: Path) -> dict[str, Any]:
    """The arguments of Transformers' UMT5Config for a file of the encoder's weights.

    ComfyUI's file has the names of Transformers.

    Raises:
        CheckpointError: `open_single` refuses the file, or it holds another model.
    """
    stored = open_single(path)
    back = {theirs: ours for ours, theirs in _BLOCK.items()}
    wan = "token_embedding.weight" in stored.shapes
    block = "blocks.0." if wan else "encoder.block.0."

    def shape(name: str) -> Sequence[int]:
        return stored.shapes[f"{block}{name if wan else back[name]}.weight"]

    try:
        buckets, heads = shape("pos_embedding.embedding")
        vocabulary, width = stored.shapes["token_embedding.weight" if wan else "shared.weight"]
        (inner, _), (wide, _) = shape("attn.q"), shape("ffn.fc1")
        head = inner // heads
        _check_positive(buckets, vocabulary, width, head, wide)
    except _ODD:
        raise _other(path, "UMT5 encoder") from None
    start = block.removesuffix("0.")
    blocks = {name[len(start) :].partition(".")[0] for name in stored.shapes if name.startswith(start)}
    return {
        "vocab_size": vocabulary,
        "d_model": width,
        "d_kv": head,
        "d_ff": wide,
        "num_layers": len(blocks),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
    }


# -- the transformer -------------------------------------------------------------------------------


def transformer_sizes(path: Path, heads: int | None) -> tuple[dict[str, int], Mapping[str, Sequence[int]]]:
    """The keys of WanModel's config.json for a file of its weights, and the shapes by WanModel's names.

    Args:
        path: the file; names may begin as ComfyUI writes them.
        heads: number of heads, where it is not that of a published model.

    Raises:
        CheckpointError: `open_single` refuses the file, or it holds another model.
    """
    shapes = {name.removeprefix(COMFY): shape for name, shape in open_single(path).shapes.items()}
    try:
        width, channels = shapes["patch_embedding.weight"][:2]
        blocks = {name.split(".")[1] for name in shapes if name.startswith("blocks.")}
        sizes = {
            "dim": width,
            "ffn_dim": shapes["blocks.0.ffn.0.weight"][0],
            "freq_dim": shapes["time_embedding.0.weight"][1],
            "in_dim": channels,
            "num_heads": heads or width // _HEAD,
            "num_layers": len(blocks),
            "out_dim": shapes["head.head.weight"][0] // math.prod(shapes["patch_embedding.weight"][2:]),
        }
    except _ODD:
        raise _other(
            path, "transformer", "a file with Wan-AI's names; one of Diffusers: by its folder"
        ) from None
    return sizes, shapes


def _check_positive(*sizes: int) -> None:
    if min(sizes) < 1:
        raise ValueError


def _other(path: Path, kind: str, accepted: str = "") -> CheckpointError:
    return CheckpointError(
        f"this file holds no Wan {kind}, by the names and shapes in it",
        where=str(path),
        accepted=accepted or "a file as Wan-AI or ComfyUI publish it",
    )
