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
    head_dim: _Size = 128  # channels per head; the width is num_heads * head_dim
    patch_size: tuple[_Size, _Size, _Size] = (1, 2, 2)  # latents per token along (t, h, w)
    in_channels: _Size = 16  # channels of the latents
    out_channels: _Size = 16  # channels of the prediction
    text_dim: _Size = 4096  # width of the text encoder's hidden states
    freq_dim: _Size = 256  # width of the timestep's sinusoids
    ffn_dim: _Size = 13824  # inner width of the feed-forward
    cross_attn_norm: bool = True  # layer norm before the cross-attention
    eps: Annotated[float, Range(gt=0)] = 1e-6  # epsilon of all norms
    rope_max_seq_len: _Size = 1024  # largest number of tokens along one axis that the rotary tables cover
    absolute_positions: bool = False  # adds sinusoids of (t, h, w) to the tokens; Wan has only rotary ones

    @property
    def width(self) -> int:
        """Channels of one token in CustomDiT."""
        return self.num_heads * self.head_dim
