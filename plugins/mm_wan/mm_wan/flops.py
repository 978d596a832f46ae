"""Operations of one forward of Wan's transformer, in plain formulas; torch-free.

A multiplication and an addition are two operations: a matrix product [m,k] x [k,n] counts 2mkn. Norms,
activations and rotations count for nothing, as is usual for MFU (https://arxiv.org/abs/2204.02311,
appendix B).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from mm_wan.presets import Fields


def forward_flops(
    fields: Fields,
    latents: Sequence[int],
    text_length: int = 512,
    image_tokens: int = 0,
    timesteps_per_token: bool = False,
) -> int:
    """Operations of a forward; a trained step (forward and backward) is three times as many.

    Args:
        fields: the architecture, by the names of `WanTransformer3DModel`.
        latents: (B, C, T, H, W), or (C, T, H, W) for one clip.
        text_length: tokens of the text.
        image_tokens: of CLIP's image features (257 a frame); 0 without.
        timesteps_per_token: whether each token has its own timestep.

    Each term names the module of Diffusers' class (models/transformers/transformer_wan.py) that it is of.
    """
    size: dict[str, int] = {k: v for k, v in fields.items() if isinstance(v, int)}
    patch: Sequence[int] = fields["patch_size"]  # type: ignore[assignment]
    batch = latents[0] if len(latents) == 5 else 1
    N = prod(length // p for length, p in zip(latents[-3:], patch, strict=True))  # tokens
    L, K = text_length, image_tokens
    M = size["num_attention_heads"] * size["attention_head_dim"]  # width
    times = N if timesteps_per_token else 1

    patch_embedding = 2 * N * M * size["in_channels"] * prod(patch)  # a convolution with stride = kernel
    time = 2 * times * (size["freq_dim"] * M + M * M + M * 6 * M)  # time_embedder's two layers, time_proj
    text = 2 * L * (size["text_dim"] * M + M * M)  # text_embedder's two layers
    image = 2 * K * (size["image_dim"] ** 2 + size["image_dim"] * M) if K else 0  # image_embedder.ff
    self_attention = 4 * 2 * N * M * M + 2 * 2 * N * N * M  # attn1: q, k, v, out; scores and values
    cross_attention = 2 * 2 * N * M * M + 2 * 2 * L * M * M + 2 * 2 * N * L * M  # attn2: q, out; k, v; both
    if K:
        # attn2: add_k_proj, add_v_proj; scores and values
        cross_attention += 2 * 2 * K * size["added_kv_proj_dim"] * M + 2 * 2 * N * K * M
    feed_forward = 2 * 2 * N * M * size["ffn_dim"]  # ffn's two layers
    proj_out = 2 * N * M * size["out_channels"] * prod(patch)
    blocks = size["num_layers"] * (self_attention + cross_attention + feed_forward)
    return batch * (patch_embedding + time + text + image + blocks + proj_out)
