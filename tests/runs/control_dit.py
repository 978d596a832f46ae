"""A one-file plugin: the custom DiT with a control clip beside its noisy latents."""

from mm_core import Component, hookimpl


@hookimpl
def mm_predictors():
    config = "mm_custom_dit.config:CustomDiTConfig"
    tiny = {"num_layers": 1, "num_heads": 2, "head_dim": 12, "in_channels": 4, "text_dim": 8}
    tiny |= {"out_channels": 4, "freq_dim": 8, "ffn_dim": 16, "rope_max_seq_len": 16}
    return [Component(name="control_dit", target="control_dit:build", config=config, tiny=tiny)]


def build(**fields):
    import torch
    from mm_custom_dit.model import CustomDiT
    from torch import nn

    from mm_core.contracts import Input, PredictorInputs

    class ControlDiT(CustomDiT):
        inputs = (Input("control", encoder="autoencoder", dropout=0.1),)

        def __init__(self):
            super().__init__(**fields)
            self.beside = nn.Conv3d(2 * self.in_channels, self.in_channels, 1)

        def init_weights(self):
            super().init_weights()
            self.beside.reset_parameters()

        def with_inputs(self, latents, timestep, given):
            return PredictorInputs(latents, timestep, given)

        def forward(self, latents, timestep, text, text_mask, control):
            joined = self.beside(torch.cat([latents, control.to(latents)], 1))
            return super().forward(joined, timestep, text, text_mask)

    return ControlDiT()
