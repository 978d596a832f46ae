"""A text encoder for trying models with a pooled text vector: it needs no weights."""

from __future__ import annotations

import torch
from torch import Tensor

from mm_core import Component, hookimpl
from mm_core.diffusion.encoders.text import ByteTextEncoder


class PooledText(ByteTextEncoder):
    """The built-in encoder `bytes` with the condition `pooled` [B,D]: the mean of a caption's hidden states."""

    def __init__(self, hidden_size: int = 64, max_length: int = 128) -> None:
        super().__init__(hidden_size, max_length)
        self.condition_shapes = {"pooled": (hidden_size,)}

    def encode(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Encodes captions [B,L] to hidden states [B,L,D], their mask and their mean."""
        hidden, mask = super().encode(ids, mask)
        counts = mask.sum(1, keepdim=True).clamp(min=1)
        return hidden, mask, {"pooled": torch.where(mask[..., None], hidden, 0).sum(1) / counts}


@hookimpl
def mm_text_encoders() -> list[Component]:
    return [Component(name="pooled_text", target="pooled_text:PooledText", tiny={"hidden_size": 16})]
