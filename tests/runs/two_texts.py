"""A one-file plugin: two text encoders with tokenizers of their own; the second gives a pooled vector."""

from dataclasses import dataclass

from mm_core import Component, hookimpl


@dataclass(frozen=True)
class TwoTextsConfig:
    hidden_size: int = 64
    max_length: int = 32


@hookimpl
def mm_text_encoders():
    return [Component(name="two_texts", target="two_texts:build", config="two_texts:TwoTextsConfig")]


@hookimpl
def mm_predictors():
    config = "mm_custom_dit.config:CustomDiTConfig"
    return [Component(name="pooled_dit", target="two_texts:dit", config=config)]


def tokenize(captions):
    import torch

    words = [c.encode()[:31] or b"\0" for c in captions]
    longest = max(map(len, words))
    ids = torch.tensor([[*w, *[0] * (longest - len(w))] for w in words])
    mask = torch.tensor([[n < len(w) for n in range(longest)] for w in words])
    counts = torch.tensor([[w.count(x) for x in b"abcdefgh"] for w in words])
    return {"ids": ids, "mask": mask, "letters": counts}


def build(hidden_size, max_length):
    import torch
    from torch import nn

    class TwoTexts(nn.Module):
        weights_from = None

        def __init__(self):
            super().__init__()
            self.condition_shapes = {"pooled": (8,)}
            self.hidden_size, self.max_length = hidden_size, max_length

        def missing_files(self):
            return []

        def load(self, device):
            pass

        def tokenizer(self):
            return tokenize

        def encode(self, ids, mask, letters):
            waves = torch.arange(1, self.hidden_size + 1, device=ids.device) * ids[..., None]
            return {"text": (waves.float().sin(), mask), "pooled": letters.float()}

    return TwoTexts()


def dit(**fields):
    from mm_custom_dit.model import CustomDiT
    from torch import nn

    class PooledDiT(CustomDiT):
        def __init__(self):
            super().__init__(**fields)
            self.condition_shapes = {"pooled": (8,)}
            self.pool = nn.Linear(8, self.in_channels)

        def init_weights(self):
            super().init_weights()
            self.pool.reset_parameters()

        def forward(self, latents, timestep, text, text_mask, pooled):
            shift = self.pool(pooled)[:, :, None, None, None]
            return super().forward(latents + shift, timestep, text, text_mask)

    return PooledDiT()
