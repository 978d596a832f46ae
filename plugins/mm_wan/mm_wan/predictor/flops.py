"""FLOPs of a forward of Wan's transformer, module by module.

A matrix product [m,k] x [k,n] counts 2mkn: a multiplication and an addition are two operations. Norms,
activations and rotations are not counted, as is usual for MFU (https://arxiv.org/abs/2204.02311, appendix B).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from mm_core.contracts import ModuleFlops, attention_flops, linear_flops
from mm_wan.presets import Architecture

_EMBEDDER = "condition_embedder"
_QKV = (("to_q", "norm_q"), ("to_k", "norm_k"), ("to_v",))
_IMAGE_QKV = (("to_q", "norm_q"), ("add_k_proj", "norm_added_k"), ("add_v_proj",))


def module_flops(
    architecture: Architecture,
    latents: Sequence[int],
    text_length: int = 512,
    image_tokens: int = 0,
    timesteps_per_token: bool = False,
) -> list[ModuleFlops]:
    """FLOPs of a forward of Wan's transformer, by modules of Diffusers' class
    (models/transformers/transformer_wan.py).

    Args:
        architecture: architecture of the transformer.
        latents: shape (B, C, T, H, W), or (C, T, H, W) for one clip.
        text_length: number of text tokens.
        image_tokens: number of CLIP tokens per sample (257 per frame); 0 without image features.
        timesteps_per_token: whether each token has its own timestep.
    """
    patch = architecture.patch_size
    batch = latents[0] if len(latents) == 5 else 1
    tokens = prod(length // p for length, p in zip(latents[-3:], patch, strict=True))
    B, N, L, K = batch, batch * tokens, batch * text_length, batch * image_tokens
    M = architecture.width
    times = N if timesteps_per_token else B
    time, text, image = (f"{_EMBEDDER}.{name}_embedder" for name in ("time", "text", "image"))
    found = _embedders(architecture, (N, L, K), times)
    given: tuple[str, ...] = ("patch_embedding", f"{_EMBEDDER}.time_proj")  # inputs of the first block
    for index in range(architecture.num_layers):
        block = f"blocks.{index}"
        given += (f"{block}.scale_shift_table",)
        itself, across, inner = f"{block}.attn1", f"{block}.attn2", f"{block}.ffn.net"
        found += [linear_flops(f"{itself}.{name}", N, M, M, given) for name in ("to_q", "to_k", "to_v")]
        found += attention_flops(itself, (B, tokens, tokens, M), *_QKV)
        found += [linear_flops(f"{itself}.to_out.0", N, M, M, _below(itself, *_QKV))]
        given += (itself, f"{block}.norm2")
        found += [linear_flops(f"{across}.to_q", N, M, M, given)]
        found += [linear_flops(f"{across}.{name}", L, M, M, (text,)) for name in ("to_k", "to_v")]
        found += attention_flops(across, (B, tokens, text_length, M), *_QKV)
        if K:
            assert architecture.added_kv_proj_dim is not None, (
                "only a model that takes images has image tokens"
            )
            added = [f"{across}.{name}" for name in ("add_k_proj", "add_v_proj")]
            found += [linear_flops(name, K, architecture.added_kv_proj_dim, M, (image,)) for name in added]
            found += attention_flops(across, (B, tokens, image_tokens, M), *_IMAGE_QKV)
        found += [
            linear_flops(f"{across}.to_out.0", N, M, M, _below(across, *_QKV, *(_IMAGE_QKV if K else ())))
        ]
        given += (across,)
        found += [linear_flops(f"{inner}.0.proj", N, M, architecture.ffn_dim, given)]
        found += [linear_flops(f"{inner}.2", N, architecture.ffn_dim, M, (*given, f"{inner}.0"))]
        given = (block,)
    given += (time, "scale_shift_table")
    return [*found, linear_flops("proj_out", N, M, architecture.out_channels * prod(patch), given)]


def _embedders(architecture: Architecture, tokens: tuple[int, int, int], times: int) -> list[ModuleFlops]:
    """FLOPs before the blocks.

    Args:
        architecture: architecture of the transformer.
        tokens: total tokens of clips, of texts and of images.
        times: number of embedded timesteps.
    """
    N, L, K = tokens
    M = architecture.width
    time, text, image = (f"{_EMBEDDER}.{name}_embedder" for name in ("time", "text", "image"))
    found = [
        linear_flops(
            "patch_embedding", N, architecture.in_channels * prod(architecture.patch_size), M, after=()
        ),
        linear_flops(f"{time}.linear_1", times, architecture.freq_dim, M, after=()),
        linear_flops(f"{time}.linear_2", times, M, M, after=(f"{time}.linear_1",)),
        linear_flops(f"{_EMBEDDER}.time_proj", times, M, 6 * M, after=(time,)),
        linear_flops(f"{text}.linear_1", L, architecture.text_dim, M, after=()),
        linear_flops(f"{text}.linear_2", L, M, M, after=(f"{text}.linear_1",)),
    ]
    if K:
        assert architecture.image_dim is not None, "only a model that takes images has image tokens"
        wide, inner = architecture.image_dim, f"{image}.ff.net"
        found += [
            linear_flops(f"{inner}.0.proj", K, wide, wide, after=(f"{image}.norm1",)),
            linear_flops(f"{inner}.2", K, wide, M, after=(f"{image}.norm1", f"{inner}.0")),
        ]
    return found


def _below(module: str, *names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for group in names for name in group)
