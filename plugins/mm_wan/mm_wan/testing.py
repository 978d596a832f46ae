"""Tiny Wan checkpoints for tests: the published classes and file layout at small sizes."""

from __future__ import annotations

import json
import math
import string
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from mm_core.errors import ContractError

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import CLIPImageProcessor, CLIPVisionModel, T5TokenizerFast, UMT5EncoderModel

Variant = Literal["t2v", "t2v_high_low", "i2v", "i2v_high_low", "flf2v", "ti2v"]

TEXT_WIDTH = 32
"""Width of the hidden states of tiny text encoders, and `text_dim` of tiny transformers."""

_IMAGE, _IMAGE_PATCH = 32, 16
"""Side in pixels of the tiny image encoder's input, and of its patches."""

SENTENCES = (
    *(
        f"a {colour} {shape} moves {direction}"
        for colour in ("red", "green", "blue", "yellow")
        for shape in ("circle", "square")
        for direction in ("left", "right", "up", "down")
    ),
    "a cat and a dog bake a cake together in a kitchen, and the sun shines through the window.",
    "bright tones, overexposed, static, blurred details, subtitles, worst quality, low quality",
    "the camera follows a white horse that runs slowly along the beach at night",
)
"""Source of the tiny tokenizers: each word is a token, and any other text is spelt letter by letter."""


@dataclass(frozen=True)
class _Facts:
    """How one variant differs from the others."""

    pipeline: str = "WanPipeline"
    channels: int = 16  # of the latents
    conditions: int = 0  # input channels of the transformer beside the latents: 4 for a mask, and an image
    boundary_ratio: float | None = None  # set for a pair of transformers
    expand_timesteps: bool = False  # one timestep per token
    clip: bool = True  # whether CLIP may encode the given frames
    last_frame: bool = False  # positions for CLIP's tokens of two images


_VARIANTS: dict[str, _Facts] = {
    "t2v": _Facts(),
    "t2v_high_low": _Facts(boundary_ratio=0.875),
    "i2v": _Facts(pipeline="WanImageToVideoPipeline", conditions=4 + 16),
    "i2v_high_low": _Facts(
        pipeline="WanImageToVideoPipeline", conditions=4 + 16, clip=False, boundary_ratio=0.9
    ),
    "flf2v": _Facts(pipeline="WanImageToVideoPipeline", conditions=4 + 16, last_frame=True),
    "ti2v": _Facts(channels=48, expand_timesteps=True),
}


def make_tiny_checkpoint(
    folder: str | Path,
    variant: Variant = "t2v",
    *,
    seed: int = 0,
    image_encoder: bool = True,
    max_shard_size: str | None = None,
) -> Path:
    """Writes a tiny Wan pipeline (about 1 MB) in Diffusers' layout, which its `from_pretrained` loads.

    The autoencoder has the published strides and channels. Its latents_mean and latents_std are measured, so
    normalised latents have unit scale. Its posterior is narrow, like a trained one.

    Args:
        folder: output folder; created if it does not exist.
        variant: `t2v` (Wan 2.1, 16 channels), `t2v_high_low` (Wan 2.2 A14B: two transformers, boundary
            0.875), `i2v` (Wan 2.1: mask and image latents beside the noisy ones), `i2v_high_low` (Wan 2.2
            A14B: the same with two transformers, boundary 0.9, always without CLIP), `flf2v` (Wan 2.1: the
            first and the last frame), `ti2v` (Wan 2.2 5B: 48 channels, one timestep per token).
        seed: seed for all weights. Equal seeds and library versions give equal files, byte for byte.
        image_encoder: for `i2v` and `flf2v`: adds a CLIP image encoder, and a transformer that takes its
            embeddings.
        max_shard_size: splits the weights into files of this size, with an index ("100KB").

    Returns:
        The folder.

    Raises:
        ContractError: the variant does not exist.
    """
    import diffusers

    if variant not in _VARIANTS:
        raise ContractError(
            f"unknown variant {variant!r} of a tiny checkpoint", accepted=", ".join(_VARIANTS)
        )
    facts = _VARIANTS[variant]
    image_encoder = image_encoder and facts.clip
    folder = Path(folder)
    parts: dict[str, Any] = {"tokenizer": _tokenizer()}
    with _seeded(seed):
        parts["text_encoder"] = _text_encoder(len(parts["tokenizer"]))
        parts["vae"] = _autoencoder(facts.channels)
        parts["transformer"] = _transformer(facts, image_encoder)
        if facts.boundary_ratio is not None:
            parts["transformer_2"] = _transformer(facts, image_encoder)
        if facts.conditions and image_encoder:
            parts["image_encoder"], parts["image_processor"] = _image_encoder()
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    pipeline = getattr(diffusers, facts.pipeline)(
        scheduler=scheduler,
        boundary_ratio=facts.boundary_ratio,
        expand_timesteps=facts.expand_timesteps,
        **parts,
    )
    pipeline.save_pretrained(folder, **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
    return folder


def tiny_vae(folder: Path) -> Mapping[str, object]:
    """Writes the autoencoder of a tiny checkpoint; returns the fields of `wan/vae` for it."""
    with _seeded(0):
        _autoencoder(16).save_pretrained(folder)
    tile, step = 64, 48  # pixels
    tiles = {f"tile_sample_min_{side}": tile for side in ("height", "width")}
    tiles |= {f"tile_sample_stride_{side}": step for side in ("height", "width")}
    return {"from_pretrained": str(folder), "tiling_param": tiles}


def tiny_umt5(folder: Path) -> Mapping[str, object]:
    """Writes the text encoder of a tiny checkpoint; returns the fields of `wan/umt5` for it."""
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    with _seeded(0):
        _text_encoder(len(tokenizer)).save_pretrained(folder)
    return {"from_pretrained": str(folder), "max_length": 64, "dtype": "fp32"}


def tiny_clip_vision(folder: Path) -> Mapping[str, object]:
    """Writes the image encoder of a tiny checkpoint; returns the fields of `wan/clip_vision` for it."""
    with _seeded(0):
        for part in _image_encoder():
            part.save_pretrained(folder)
    return {"from_pretrained": str(folder)}


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Within the block, torch's default generator is seeded, then restored."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _tokenizer() -> T5TokenizerFast:
    """A T5 tokenizer: a unigram model over the words of `SENTENCES`, scored by frequency, and over single
    printable letters.

    The trainer of the tokenizers library is not used: its pieces come in a different order each time.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import T5TokenizerFast

    words = Counter("▁" + word for sentence in SENTENCES for word in sentence.split())
    total = sum(words.values())
    scored = [(word, math.log(count / total)) for word, count in sorted(words.items())]
    least = math.log(1 / total)
    letters = [(letter, least - 2) for letter in ["▁", *string.printable[:94]]]
    known = set(words)
    letters = [(letter, score) for letter, score in letters if letter not in known]
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    tokenizer = Tokenizer(models.Unigram([*specials, *scored, *letters], unk_id=2, byte_fallback=False))
    space: dict[str, Any] = {"replacement": "▁", "prepend_scheme": "always"}
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**space)]
    )
    tokenizer.decoder = decoders.Metaspace(**space)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    settings = {
        "tokenizer_class": "T5Tokenizer",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "extra_ids": 0,
        "model_max_length": 512,
    }
    with tempfile.TemporaryDirectory() as place:
        tokenizer.save(str(Path(place, "tokenizer.json")))
        Path(place, "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return T5TokenizerFast.from_pretrained(place, local_files_only=True)


def _text_encoder(vocabulary: int) -> UMT5EncoderModel:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=vocabulary, d_model=TEXT_WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
            relative_attention_num_buckets=8, relative_attention_max_distance=32,
        )
    ).eval()  # fmt: skip


def _autoencoder(channels: int) -> AutoencoderKLWan:
    """An autoencoder with four levels, which gives the published strides."""
    from diffusers import AutoencoderKLWan

    sizes: dict[str, object] = {
        "base_dim": 4, "z_dim": channels, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.0] * channels, "latents_std": [1.0] * channels,
    }  # fmt: skip
    if channels == 48:
        sizes |= {
            "base_dim": 6, "decoder_base_dim": 8, "in_channels": 12, "out_channels": 12,
            "is_residual": True, "patch_size": 2, "scale_factor_spatial": 16,
        }  # fmt: skip
    model = AutoencoderKLWan(**sizes).eval()
    with torch.no_grad():
        model.quant_conv.weight[channels:].mul_(0.1)
        model.quant_conv.bias[channels:].fill_(-8.0)  # the log variance
    means = model.encode(_smooth_clips()).latent_dist.mean.detach().transpose(0, 1).flatten(1)
    model.register_to_config(
        latents_mean=[round(value, 6) for value in means.mean(1).tolist()],
        latents_std=[round(value, 6) for value in means.std(1).clamp_min(1e-4).tolist()],
    )
    return model


def _smooth_clips() -> torch.Tensor:
    """pixels[B,3,F,Y,X] in [-1,1]: four clips of soft spots."""
    coarse = torch.randn(4, 3, 4, 5, 5)
    clips = torch.nn.functional.interpolate(coarse, (9, 64, 64), mode="trilinear", align_corners=True)
    return clips.tanh()


def _transformer(facts: _Facts, image_encoder: bool) -> WanTransformer3DModel:
    from diffusers import WanTransformer3DModel

    heads, head_width = 2, 12
    embeds = facts.conditions > 0 and image_encoder
    tokens = 2 * (1 + (_IMAGE // _IMAGE_PATCH) ** 2)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=heads, attention_head_dim=head_width,
        in_channels=facts.channels + facts.conditions, out_channels=facts.channels,
        text_dim=TEXT_WIDTH, freq_dim=32, ffn_dim=48, num_layers=2,
        image_dim=TEXT_WIDTH if embeds else None, added_kv_proj_dim=heads * head_width if embeds else None,
        pos_embed_seq_len=tokens if embeds and facts.last_frame else None,
    )  # fmt: skip
    if embeds and facts.last_frame:
        torch.nn.init.normal_(model.condition_embedder.image_embedder.pos_embed)  # Diffusers leaves zeros
    return model.eval()


def _image_encoder() -> tuple[CLIPVisionModel, CLIPImageProcessor]:
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=TEXT_WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        image_size=_IMAGE, patch_size=_IMAGE_PATCH,
    )  # fmt: skip
    crop = {"height": _IMAGE, "width": _IMAGE}
    processor = CLIPImageProcessor(size={"shortest_edge": _IMAGE}, crop_size=crop)
    return CLIPVisionModel(config).eval(), processor
