"""Sound predictors of the kinds that the conformance kit once refused now and then: a one-file plugin."""

from functools import wraps

import torch
from diffusers import Lumina2Transformer2DModel
from torch import nn

from mm_core import Component, hookimpl
from mm_core.contracts import PredictorModule, empty_parameters, reset_parameters


class Small(PredictorModule):
    """Tokens of one latent; the mean of the text and the timestep are added to each."""

    text_padding, patch_size = "masked", (1, 1, 1)
    in_channels = out_channels = 4
    text_dim = 8

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(4, 16), nn.Linear(16, 4)
        self.text, self.time = nn.Linear(8, 16), nn.Linear(1, 16)

    def given(self, timestep, text, text_mask):
        kept = text_mask[..., None].to(text)
        mean = (text * kept).sum(1) / kept.sum(1).clamp(min=1)
        return self.text(mean) + self.time((timestep / 1000)[:, None].to(text))

    def mixed(self, tokens):
        return tokens

    def forward(self, latents, timestep, text, text_mask):
        tokens = (
            self.into(latents.movedim(1, -1)) + self.given(timestep, text, text_mask)[:, None, None, None]
        )
        return self.out(self.mixed(tokens)).movedim(-1, 1).contiguous()

    def init_weights(self):
        reset_parameters(self)


class Rotary(Small):
    """A table of angles, made by `arange` and `outer` in the constructor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", self.table())

    @staticmethod
    def table():
        return torch.outer(torch.arange(64.0), 100.0 ** -torch.linspace(0, 1, 8))

    def mixed(self, tokens):
        places = torch.arange(tokens.shape[-2], device=tokens.device) % 64
        angles = self.angles[places].to(tokens)
        one, two = tokens.chunk(2, -1)
        return torch.cat(
            [one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()], -1
        )

    def init_weights(self):
        super().init_weights()
        self.angles.copy_(self.table())


class Embedded(Small):
    """An embedding of the row, and a parameter filled by `normal_`."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(64, 16)
        self.shift = nn.Parameter(torch.empty(16).normal_())

    def mixed(self, tokens):
        places = torch.arange(tokens.shape[-2], device=tokens.device) % 64
        return tokens + self.rows(places) + self.shift

    def init_weights(self):
        super().init_weights()
        nn.init.normal_(self.shift)


class Convolved(Small):
    """A stack of Conv3d."""

    def __init__(self):
        super().__init__()
        self.stack = nn.Sequential(
            nn.Conv3d(16, 16, 3, padding=1), nn.SiLU(), nn.Conv3d(16, 16, 3, padding=1)
        )

    def mixed(self, tokens):
        return self.stack(tokens.movedim(-1, 1)).movedim(1, -1)


class Lumina(Lumina2Transformer2DModel):
    """Diffusers' Lumina 2, a model of images."""

    text_padding, max_frames = "masked", 1

    @wraps(Lumina2Transformer2DModel.__init__)
    def __init__(self, **fields):
        super().__init__(**fields)
        self.patch_size = (1, self.config.patch_size, self.config.patch_size)
        self.in_channels = self.out_channels = self.config.in_channels
        self.text_dim = self.config.cap_feat_dim

    def forward(self, latents, timestep, text, text_mask):
        (predicted,) = super().forward(
            latents[:, :, 0], 1 - timestep / 1000, text, text_mask, return_dict=False
        )
        return -predicted[:, :, None]

    def init_weights(self):
        reset_parameters(self)
        for name, parameter in self.named_parameters():
            if "norm" in name and name.endswith(".weight") and parameter.dim() == 1:
                nn.init.ones_(parameter)
        nn.init.ones_(self.time_caption_embed.caption_embedder[0].weight)
        with empty_parameters():
            tables = Lumina2Transformer2DModel.from_config(self.config)
        for name, table in tables.named_buffers():
            self.get_buffer(name).copy_(table)
        self.rope_embedder.freqs_cis = tables.rope_embedder.freqs_cis


LUMINA = {
    "patch_size": 2,
    "in_channels": 4,
    "hidden_size": 32,
    "num_layers": 1,
    "num_refiner_layers": 1,
    "num_attention_heads": 2,
    "num_kv_heads": 2,
    "multiple_of": 16,
    "axes_dim_rope": (4, 6, 6),
    "axes_lens": (64, 64, 64),
    "cap_feat_dim": 8,
}


@hookimpl
def mm_predictors():
    own = [
        Component(cls.__name__.lower(), f"sound_predictors:{cls.__name__}")
        for cls in (Rotary, Embedded, Convolved)
    ]
    return [*own, Component("lumina", "sound_predictors:Lumina", tiny=LUMINA)]
