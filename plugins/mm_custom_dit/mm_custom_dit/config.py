"""Config of CustomDiT: torch-free. The defaults are those of the tutorial's class (14B)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mm_core.plugin import Range

_Size = Annotated[int, Range(ge=1)]


@dataclass(frozen=True)
class CustomDiTConfig:
    """A Wan-style diffusion transformer for text-to-video."""

    num_layers: _Size = 40  # transformer blocks
    num_heads: _Size = 40  # attention heads
    head_dim: _Size = 128  # channels a head; the width is num_heads * head_dim
    patch_size: tuple[_Size, _Size, _Size] = (1, 2, 2)  # latents a token along (t, h, w)
    in_channels: _Size = 16  # of the latents
    out_channels: _Size = 16  # of the prediction
    text_dim: _Size = 4096  # width of the text encoder's hidden states
    freq_dim: _Size = 256  # width of the timestep's sinusoids
    ffn_dim: _Size = 13824  # inner width of the feed-forward
    cross_attn_norm: bool = True  # layer norm before the cross-attention
    eps: Annotated[float, Range(gt=0)] = 1e-6  # of all norms
    rope_max_seq_len: _Size = 1024  # tokens along any axis that the rotary tables reach
    absolute_positions: bool = False  # adds sinusoids of (t, h, w) to the tokens; Wan has rotary ones alone

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.num_heads * self.head_dim
