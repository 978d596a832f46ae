"""A plugin with a small predictor that passes every conformance check: tests break one line of it each."""

import torch
from torch import nn

from mm_core import Component, hookimpl
from mm_core.contracts import PredictorModule, ShardPlan, linear_flops


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, given):
        return x + self.last(torch.tanh(self.first(x + given[:, None])))


class Good(PredictorModule):
    """Each patch by itself, with embeddings of the time, the mean of the text, and a pooled vector."""

    patch_size = (1, 2, 2)
    condition_shapes = {"pooled": (5,)}  # noqa: RUF012

    def __init__(self, channels=4, text_dim=6, width=8, depth=2):
        super().__init__()
        self.in_channels, self.text_dim = channels, text_dim
        self.stem, self.head = nn.Linear(4 * channels, width), nn.Linear(width, 4 * channels)
        self.words, self.pool = nn.Linear(text_dim, width), nn.Linear(5, width)
        self.time = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.scale = nn.Parameter(torch.empty(()))
        self.register_buffer("waves", torch.empty(8))

    def init_weights(self):
        super().init_weights()
        nn.init.constant_(self.scale, 1.5)
        self.waves.copy_(10 ** -torch.linspace(0, 3, 8))

    def forward(self, latents, timestep, text, text_mask, pooled, fps=None):
        dtype = self.stem.weight.dtype
        b, c, t, h, w = latents.shape
        patches = latents.reshape(b, c, t, h // 2, 2, w // 2, 2).permute(0, 2, 3, 5, 1, 4, 6)
        x = self.stem(patches.reshape(b, -1, 4 * c).to(dtype))
        angles = timestep[:, None] * self.waves.float()
        real = text_mask[..., None].to(dtype)
        words = self.words(text.masked_fill(~text_mask[..., None], 0).to(dtype)) * real
        given = words.sum(1) / real.sum(1).clamp(min=1) + self.pool(pooled.to(dtype))
        given = given + self.time(torch.cat([angles.sin(), angles.cos()], 1).to(dtype))
        if fps is not None:
            given = given + (fps[:, None] / 100).to(dtype)
        for block in self.blocks:
            x = block(x, given)
        x = self.head(x * self.scale.to(dtype))
        x = x.reshape(b, t, h // 2, w // 2, c, 2, 2).permute(0, 4, 1, 2, 5, 3, 6)
        return x.reshape(b, c, t, h, w).to(latents.dtype).clone()

    def shard_plan(self):
        return ShardPlan(wrap=("blocks.{*}",), recompute=("blocks.{*}",), prefetch=1)

    def module_flops(self, latents, timestep, text, pooled):
        b, c, t, h, w = latents
        rows, width = b * t * h * w // 4, self.head.in_features
        blocks = [f"blocks.{i}.{layer}" for i in range(len(self.blocks)) for layer in ("first", "last")]
        return [
            linear_flops("stem", rows, 4 * c, width, ()),
            linear_flops("words", b * text[1], text[2], width, ()),
            linear_flops("pool", b, pooled[1], width, ()),
            linear_flops("time", b, 16, width, ()),
            *(linear_flops(name, rows, width, width) for name in blocks),
            linear_flops("head", rows, width, 4 * c),
        ]


@hookimpl
def mm_predictors():
    return [Component("good", "good_predictor:Good", capabilities={"compiles": True})]
