"""A one-file plugin for tests: a DiT with embedded guidance, frame rate, size and a pooled text vector."""

from mm_core import Component, hookimpl


@hookimpl
def mm_predictors():
    config = "mm_custom_dit.config:CustomDiTConfig"
    return [Component(name="conditioned_dit", target="conditioned_dit:build", config=config)]


@hookimpl
def mm_text_encoders():
    config = "mm_core.builtin.configs.diffusion:ByteTextConfig"
    return [Component(name="pooled_bytes", target="conditioned_dit:build_encoder", config=config)]


def build(**fields):
    import torch
    from mm_custom_dit.model import CustomDiT
    from torch import nn

    class ConditionedDiT(CustomDiT):
        def __init__(self) -> None:
            super().__init__(**fields)
            self.condition_shapes = {"pooled": (self.text_dim,), "fps": (), "size": (2,), "guidance": ()}
            self.numbers = nn.Linear(4, self.text_dim)

        def init_weights(self):
            super().init_weights()
            nn.init.normal_(self.numbers.weight, std=0.02)
            nn.init.zeros_(self.numbers.bias)

        def forward(self, latents, timestep, text, text_mask, pooled, fps, size, guidance):
            numbers = torch.cat([fps[:, None], size, guidance[:, None]], 1).to(text)
            text = text + (pooled + self.numbers(numbers / 10))[:, None]
            return super().forward(latents, timestep, text, text_mask)

        def module_flops(self, latents, timestep, text, pooled):
            return super().module_flops(latents, timestep, text)

    return ConditionedDiT()


def build_encoder(**fields):
    from mm_core.diffusion.encoders.text import ByteTextEncoder

    class PooledBytes(ByteTextEncoder):
        def __init__(self) -> None:
            super().__init__(**fields)
            self.condition_shapes = {"pooled": (self.hidden_size,)}

        def encode(self, ids, mask):
            hidden, mask = super().encode(ids, mask)
            return hidden, mask, {"pooled": (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)}

    return PooledBytes()
