"""A text encoder for trying models with a pooled text vector: it needs no weights."""

import torch
from torch import Tensor, nn

import mm_core
from mm_core import Component, hookimpl
from mm_core.contracts import Tokenizer


class PooledText(nn.Module):
    """The built-in encoder `bytes` with the condition `pooled` [B,D]: the mean of the hidden states."""

    def __init__(self, hidden_size: int = 64, max_length: int = 128) -> None:
        super().__init__()
        fields = {"hidden_size": hidden_size, "max_length": max_length}
        self.hidden = mm_core.build("text_encoder", {"type": "bytes", **fields}).eval()
        self.hidden_size, self.max_length = hidden_size, max_length
        self.condition_shapes = {"pooled": (hidden_size,)}

    def load(self, device: torch.device) -> None:
        """Draws the tables of `bytes`."""
        self.hidden.load(device)

    def missing_files(self) -> list[str]:
        """Missing files: none."""
        return []

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of `bytes`: one token per byte."""
        tokenizer: Tokenizer = self.hidden.tokenizer()
        return tokenizer

    def encode(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Encodes captions [B,L] to hidden states [B,L,D], their mask and their mean."""
        hidden, mask = self.hidden.encode(ids, mask)
        counts = mask.sum(1, keepdim=True).clamp(min=1)
        return hidden, mask, {"pooled": torch.where(mask[..., None], hidden, 0).sum(1) / counts}


@hookimpl
def mm_text_encoders() -> list[Component]:
    return [Component(name="pooled_text", target="pooled_text:PooledText", tiny={"hidden_size": 16})]
