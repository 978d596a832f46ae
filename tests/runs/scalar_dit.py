"""A one-file plugin for tests: the custom DiT with a trained factor of its output, a scalar."""

from mm_core import Component, hookimpl


@hookimpl
def mm_predictors():
    config = "mm_custom_dit.config:CustomDiTConfig"
    return [Component(name="scalar_dit", target="scalar_dit:build", config=config)]


def build(**fields):
    import torch
    from mm_custom_dit.model import CustomDiT
    from torch import nn

    class ScalarDiT(CustomDiT):
        def __init__(self) -> None:
            super().__init__(**fields)
            self.scale = nn.Parameter(torch.empty(()))

        def init_weights(self):
            super().init_weights()
            nn.init.constant_(self.scale, 0.8)

        def forward(self, latents, timestep, text, text_mask):
            return super().forward(latents, timestep, text, text_mask) * self.scale

    return ScalarDiT()
