"""A one-file plugin for tests: the custom DiT with dropout on its captions."""

from dataclasses import dataclass

from mm_custom_dit.config import CustomDiTConfig

from mm_core import Component, hookimpl


@dataclass(frozen=True)
class DropoutDiTConfig(CustomDiTConfig):
    dropout: float = 0.3  # of the captions' hidden states


@hookimpl
def mm_predictors():
    return [Component(name="dropout_dit", target="dropout_dit:build", config="dropout_dit:DropoutDiTConfig")]


def build(dropout: float, **fields):
    from mm_custom_dit.model import CustomDiT
    from torch import nn

    class DropoutDiT(CustomDiT):
        def __init__(self) -> None:
            super().__init__(**fields)
            self.dropout = nn.Dropout(dropout)

        def forward(self, latents, timestep, text, text_mask):
            return super().forward(latents, timestep, self.dropout(text), text_mask)

    return DropoutDiT()
