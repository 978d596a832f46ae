"""CustomDiT: the tutorial's text-to-video diffusion transformer, built from Diffusers' Wan parts.

Architecture: Wan (https://arxiv.org/abs/2503.20314), a DiT (https://arxiv.org/abs/2212.09748) with 3D
rotary positions and cross-attention to the text. With equal weights and a full text mask, its output equals
that of `diffusers.WanTransformer3DModel`.

Letters: B batch; C,T,H,W latents; L,D text; N tokens, M width.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from diffusers.models.attention import FeedForward
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import (
    WanAttention,
    WanAttnProcessor,
    WanRotaryPosEmbed,
    WanTimeTextImageEmbedding,
)
from einops import rearrange
from torch import Tensor, nn

from mm_core.contracts import ContextPlan, ModuleFlops, attention_flops, linear_flops
from mm_core.errors import ContractError, plural
from mm_custom_dit.config import CustomDiTConfig

Rotary = tuple[Tensor, Tensor]


class CustomDiTBlock(nn.Module):
    """A transformer block of CustomDiT: self-attention, cross-attention and feed-forward, modulated by the
    timestep (AdaLN)."""

    def __init__(self, sizes: CustomDiTConfig) -> None:
        super().__init__()
        dim, eps = sizes.width, sizes.eps
        heads = {"dim": dim, "heads": sizes.num_heads, "dim_head": sizes.head_dim, "eps": eps}
        self.norm1 = FP32LayerNorm(dim, eps, elementwise_affine=False)
        self.attn1 = WanAttention(**heads, processor=WanAttnProcessor())
        self.norm2 = (
            FP32LayerNorm(dim, eps, elementwise_affine=True) if sizes.cross_attn_norm else nn.Identity()
        )
        self.attn2 = WanAttention(
            **heads, cross_attention_dim_head=sizes.head_dim, processor=WanAttnProcessor()
        )
        self.norm3 = FP32LayerNorm(dim, eps, elementwise_affine=False)
        self.ffn = FeedForward(dim, inner_dim=sizes.ffn_dim, activation_fn="gelu-approximate")
        self.scale_shift_table = nn.Parameter(torch.empty(1, 6, dim))

    def forward(
        self, x: Tensor, text: Tensor, text_mask: Tensor, modulation: Tensor, rotary: Rotary
    ) -> Tensor:
        """Computes the tokens [B,N,M] after one block of CustomDiT.

        Args:
            x: tokens [B,N,M].
            text: [B,L,M].
            text_mask: [B,1,1,L].
            modulation: [B,6,M], or [B,N,6,M] with one per token.
            rotary: tables of rotary positions.
        """
        shift1, scale1, gate1, shift2, scale2, gate2 = modulate(self.scale_shift_table, modulation)
        normed = (self.norm1(x.float()) * (1 + scale1) + shift1).type_as(x)
        x = (x.float() + self.attn1(normed, rotary_emb=rotary) * gate1).type_as(x)
        normed = self.norm2(x.float()).type_as(x)
        x = x + self.attn2(normed, encoder_hidden_states=text, attention_mask=text_mask)
        normed = (self.norm3(x.float()) * (1 + scale2) + shift2).type_as(x)
        x = (x.float() + self.ffn(normed).float() * gate2).type_as(x)
        return x


class CustomDiT(nn.Module):
    """The tutorial's diffusion transformer: predicts the velocity of noisy latents. Satisfies
    `mm_core.contracts.Predictor`.

    `CustomDiTConfig` describes the fields. Masked text has no effect; a row without any text attends to
    zeros.
    """

    _no_split_modules = ("CustomDiTBlock",)
    text_padding = "masked"

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.sizes = sizes = CustomDiTConfig(**fields)
        if sizes.head_dim % 2 or sizes.head_dim < 6:
            raise ContractError(
                f"head_dim {sizes.head_dim} cannot hold rotary positions of three axes",
                where="custom_dit",
                accepted="an even number, 6 or more",
            )
        dim, patch = sizes.width, prod(sizes.patch_size)
        self.patch_size, self.text_dim = sizes.patch_size, sizes.text_dim
        self.in_channels, self.out_channels = sizes.in_channels, sizes.out_channels
        self.rope = self._rotary_tables()
        self.patch_embedding = nn.Linear(sizes.in_channels * patch, dim)
        self.condition_embedder = WanTimeTextImageEmbedding(
            dim=dim, time_freq_dim=sizes.freq_dim, time_proj_dim=6 * dim, text_embed_dim=sizes.text_dim
        )
        self.token_timesteps = nn.Identity()  # where context parallelism splits timesteps of tokens
        self.blocks = nn.ModuleList(CustomDiTBlock(sizes) for _ in range(sizes.num_layers))
        self.norm_out = FP32LayerNorm(dim, sizes.eps, elementwise_affine=False)
        self.scale_shift_table = nn.Parameter(torch.empty(1, 2, dim))
        self.proj_out = nn.Linear(dim, sizes.out_channels * patch)
        if self.patch_embedding.weight.device.type != "meta":
            with torch.no_grad():
                self.init_weights()

    def forward(self, latents: Tensor, timestep: Tensor, text: Tensor, text_mask: Tensor) -> Tensor:
        """Predicts the velocity [B,C,T,H,W] of noisy latents with CustomDiT, in the latents' dtype.

        Args:
            latents: [B,C,T,H,W]; T, H and W are multiples of patch_size.
            timestep: [B], or [B,N] with one per token; float32 in 0 .. 1000.
            text: hidden states [B,L,D].
            text_mask: bool [B,L]; True for real tokens.

        Raises:
            ContractError: latents do not divide into patches, or exceed the rotary tables.
        """
        grid, given = self._grid(latents), latents.dtype
        # Under mixed precision the weights have this dtype only during the call: the caller cannot cast.
        latents, text = (tensor.to(self.patch_embedding.weight.dtype) for tensor in (latents, text))
        x = self.patch_embedding(self._patchify(latents))
        if self.sizes.absolute_positions:
            # With rotary positions alone, attention cannot distinguish places in pure noise.
            x = x + sinusoids_3d(grid, x.shape[2], x.device).to(x.dtype)
        text = text.masked_fill(~text_mask[..., None], 0)  # also removes NaN in the padding
        # Attention over no tokens would be NaN: a row without text attends to its zeros.
        visible = (text_mask | ~text_mask.any(1, keepdim=True))[:, None, None, :]
        timestep = self.token_timesteps(timestep)
        tokens = timestep.shape[1] if timestep.dim() == 2 else None
        time, modulation, text, _ = self.condition_embedder(timestep.flatten(), text, timestep_seq_len=tokens)
        modulation = rearrange(modulation, "... (six m) -> ... six m", six=6)
        rotary = self.rope(latents)
        for block in self.blocks:
            x = block(x, text, visible, modulation, rotary)
        shift, scale = modulate(self.scale_shift_table, time[..., None, :])
        x = (self.norm_out(x.float()) * (1 + scale) + shift).type_as(x)
        return self._unpatchify(self.proj_out(x), grid).to(given)

    def init_weights(self) -> None:
        """Initialises all parameters and buffers of CustomDiT as in Wan: Xavier for matrices, zeros for
        the head.

        Wan's embedders have a standard deviation of 0.02, which is Xavier at its width. At a small width,
        0.02 would make the signals of text and time too weak.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, (nn.RMSNorm, nn.LayerNorm)) and module.elementwise_affine:
                nn.init.ones_(module.weight)
                if isinstance(module, nn.LayerNorm):
                    nn.init.zeros_(module.bias)
            elif isinstance(module, (CustomDiT, CustomDiTBlock)):
                nn.init.normal_(module.scale_shift_table, std=module.scale_shift_table.shape[-1] ** -0.5)
        nn.init.zeros_(self.proj_out.weight)
        with torch.device("cpu"):
            tables = self._rotary_tables()
        for name, table in tables.named_buffers():
            self.rope.get_buffer(name).copy_(table)

    def context_plan(self) -> ContextPlan:
        """Where CustomDiT has its tokens, for context parallelism. Satisfies `SupportsContextPlan`."""
        return ContextPlan(
            heads=self.sizes.num_heads,
            attention=("blocks.{*}.attn1",),
            split={"token_timesteps": {0: 1}, "rope": {0: 1, 1: 1}, "blocks.0": {"x": 1}},
            gather={"proj_out": 1},
        )

    def module_flops(
        self, latents: Sequence[int], timestep: Sequence[int], text: Sequence[int]
    ) -> Sequence[ModuleFlops]:
        """FLOPs of each module of CustomDiT for inputs of these shapes. Satisfies `SupportsModuleFlops`."""
        batch, width, patch = latents[0], self.sizes.width, prod(self.patch_size)
        tokens = prod(latents[2:]) // patch
        rows, length, times = batch * tokens, prod(text[:2]), prod(timestep)
        qkv = (("to_q", "norm_q"), ("to_k", "norm_k"), ("to_v",))

        def below(module: str) -> tuple[str, ...]:
            return tuple(f"{module}.{name}" for names in qkv for name in names)

        time, words = "condition_embedder.time_embedder", "condition_embedder.text_embedder"
        found = [
            linear_flops("patch_embedding", rows, self.patch_embedding.in_features, width, after=()),
            linear_flops(f"{time}.linear_1", times, self.sizes.freq_dim, width, after=()),
            linear_flops(f"{time}.linear_2", times, width, width, after=(f"{time}.linear_1",)),
            linear_flops("condition_embedder.time_proj", times, width, 6 * width, after=(time,)),
            linear_flops(f"{words}.linear_1", length, self.text_dim, width, after=()),
            linear_flops(f"{words}.linear_2", length, width, width, after=(f"{words}.linear_1",)),
        ]
        given: tuple[str, ...] = (
            "patch_embedding",
            "condition_embedder.time_proj",
        )  # inputs of the first block
        for index in range(len(self.blocks)):
            block = f"blocks.{index}"
            itself, across, inner = f"{block}.attn1", f"{block}.attn2", f"{block}.ffn.net"
            given += (f"{block}.scale_shift_table",)
            found += [
                linear_flops(f"{itself}.{name}", rows, width, width, given)
                for name in ("to_q", "to_k", "to_v")
            ]
            found += attention_flops(itself, (batch, tokens, tokens, width), *qkv)
            found += [linear_flops(f"{itself}.to_out.0", rows, width, width, below(itself))]
            given += (itself, f"{block}.norm2")
            found += [linear_flops(f"{across}.to_q", rows, width, width, given)]
            found += [
                linear_flops(f"{across}.{name}", length, width, width, (words,)) for name in ("to_k", "to_v")
            ]
            found += attention_flops(across, (batch, tokens, text[1], width), *qkv)
            found += [linear_flops(f"{across}.to_out.0", rows, width, width, below(across))]
            given += (across,)
            found += [linear_flops(f"{inner}.0.proj", rows, width, self.sizes.ffn_dim, given)]
            found += [linear_flops(f"{inner}.2", rows, self.sizes.ffn_dim, width, (*given, f"{inner}.0"))]
            given = (block,)
        given += (time, "scale_shift_table")
        return [*found, linear_flops("proj_out", rows, width, self.out_channels * patch, given)]

    def _rotary_tables(self) -> WanRotaryPosEmbed:
        return WanRotaryPosEmbed(self.sizes.head_dim, self.patch_size, self.sizes.rope_max_seq_len)

    def _grid(self, latents: Tensor) -> tuple[int, int, int]:
        """Tokens along (t, h, w)."""
        sizes = tuple(latents.shape[2:])
        if any(size % patch for size, patch in zip(sizes, self.patch_size, strict=True)):
            raise ContractError(
                f"latents of (T, H, W) = {sizes} do not divide into patches of {self.patch_size}",
                where="custom_dit",
                accepted=f"multiples of {self.patch_size}",
            )
        t, h, w = (size // patch for size, patch in zip(sizes, self.patch_size, strict=True))
        reach = self.sizes.rope_max_seq_len
        if max(t, h, w) > reach:
            raise ContractError(
                f"a clip of {t} x {h} x {w} tokens exceeds the rotary tables, which have"
                f" {plural(reach, 'position')}",
                where="custom_dit",
                accepted=f"at most {plural(reach, 'token')} along an axis",
                hint=f"set rope_max_seq_len to {max(t, h, w)} or more, or make the clip smaller",
            )
        return t, h, w

    def _patchify(self, latents: Tensor) -> Tensor:
        t, h, w = self.patch_size
        return rearrange(latents, "b c (t pt) (h ph) (w pw) -> b (t h w) (c pt ph pw)", pt=t, ph=h, pw=w)

    def _unpatchify(self, x: Tensor, grid: tuple[int, int, int]) -> Tensor:
        (t, h, w), (pt, ph, pw) = grid, self.patch_size
        latents = rearrange(
            x, "b (t h w) (pt ph pw c) -> b c (t pt) (h ph) (w pw)", t=t, h=h, w=w, pt=pt, ph=ph, pw=pw
        )
        # A fresh tensor: FSDP2 may drop its backward hook when its root returns a view.
        return latents.clone(memory_format=torch.contiguous_format)


def modulate(table: Tensor, modulation: Tensor) -> list[Tensor]:
    """Adds a learnt table to the timestep's modulation in float32, and splits the sum: shifts, scales, gates.

    Args:
        table: [1,K,M].
        modulation: [B,K,M], or [B,N,K,M] with one per token.

    Returns:
        K tensors [B,1,M] or [B,N,M].
    """
    together = table.float() + modulation.float()
    if together.dim() == 4:
        return [part.squeeze(2) for part in together.chunk(together.shape[2], dim=2)]
    return list(together.chunk(together.shape[1], dim=1))


def sinusoids_3d(grid: tuple[int, int, int], width: int, device: torch.device) -> Tensor:
    """Absolute positions [N,M] float32 of a clip's tokens: sin and cos of position / 10000^(i/n), with a
    third of the channels for each of t, h and w.

    Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762), section 3.5, along each axis. The remaining
    channels, if the width is not a multiple of six, are zero.
    """
    count = width // 6
    rates = 10000.0 ** (-torch.arange(count, device=device) / max(count, 1))
    axes = torch.meshgrid(*(torch.arange(n, device=device) for n in grid), indexing="ij")
    angles = torch.stack([axis.flatten()[:, None] * rates for axis in axes], dim=1)  # [N,3,n]
    table = torch.cat([angles.sin(), angles.cos()], dim=2).flatten(1)
    return nn.functional.pad(table, (0, width - table.shape[1]))
