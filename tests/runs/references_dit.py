"""A one-file plugin: up to two reference pictures of their own size; the text depends on them too."""

from dataclasses import dataclass

from mm_core import Component, hookimpl


@dataclass(frozen=True)
class SeeingTextConfig:
    from_pretrained: str
    hidden_size: int = 32
    max_length: int = 32


@hookimpl
def mm_text_encoders():
    config = "references_dit:SeeingTextConfig"
    return [Component(name="seeing_text", target="references_dit:encoder", config=config)]


@hookimpl
def mm_predictors():
    config = "mm_custom_dit.config:CustomDiTConfig"
    tiny = {"num_layers": 1, "num_heads": 2, "head_dim": 12, "in_channels": 4, "text_dim": 8}
    tiny |= {"out_channels": 4, "freq_dim": 8, "ffn_dim": 16, "rope_max_seq_len": 16}
    return [Component(name="references_dit", target="references_dit:dit", config=config, tiny=tiny)]


def tokenize(captions, fields):
    import torch
    from torch.nn.functional import adaptive_avg_pool2d

    words = [c.encode()[:31] or b"\0" for c in captions]
    longest = max(map(len, words))
    ids = torch.tensor([[*w, *[0] * (longest - len(w))] for w in words])
    mask = torch.tensor([[n < len(w) for n in range(longest)] for w in words])
    looks, seen = torch.zeros(len(words), 2, 48), torch.zeros(len(words), 2, dtype=torch.bool)
    for row, pictures in enumerate(fields["references"]):
        for place, picture in enumerate(pictures):
            looks[row, place] = adaptive_avg_pool2d(picture.float() / 255, 4).flatten()
            seen[row, place] = True
    return {"ids": ids, "mask": mask, "looks": looks, "seen": seen}


def encoder(from_pretrained, hidden_size, max_length):
    import torch
    from torch import nn

    from mm_core.contracts import WeightsFrom, empty_parameters

    class SeeingText(nn.Module):
        reads = ("references",)
        entry_points, block_patterns = ("encode",), ()

        def __init__(self):
            super().__init__()
            self.weights_from = WeightsFrom(from_pretrained)
            self.hidden_size, self.max_length = hidden_size, max_length + 2

        def missing_files(self):
            return []

        def build_empty(self):
            with empty_parameters():
                self.words, self.look = nn.Embedding(256, hidden_size), nn.Linear(48, hidden_size)

        def tokenizer(self):
            return tokenize

        def encode(self, ids, mask, looks, seen):
            looks = self.look(looks).masked_fill(~seen[..., None], 0)
            words = self.words(ids) * (1 + looks.sum(1, keepdim=True))
            return torch.cat([looks, words], 1), torch.cat([seen, mask], 1)

    return SeeingText()


def whole_patches(fields, size):
    picture = fields["references"]
    height, width = (side // 16 * 16 for side in picture.shape[-2:])
    return picture[..., :height, :width]


def dit(**fields):
    from mm_custom_dit.model import CustomDiT
    from torch import nn

    from mm_core.contracts import Input, PredictorInputs

    class ReferencesDiT(CustomDiT):
        inputs = (
            Input(
                "references",
                make=whole_patches,
                encoder="autoencoder",
                dropout=0.1,
                unconditional="zeros",
                most=2,
            ),
        )

        def __init__(self):
            super().__init__(**fields)
            self.beside = nn.Linear(self.in_channels, self.in_channels)

        def init_weights(self):
            super().init_weights()
            self.beside.reset_parameters()

        def with_inputs(self, latents, timestep, given):
            return PredictorInputs(latents, timestep, given)

        def forward(self, latents, timestep, text, text_mask, references, references_sizes):
            sizes = references_sizes.prod(-1, keepdim=True).clamp(min=1)  # what is missing is zero
            shift = self.beside((references.to(latents).sum((3, 4, 5)) / sizes).to(latents).sum(1))
            return super().forward(latents + shift[:, :, None, None, None], timestep, text, text_mask)

    return ReferencesDiT()
