"""The task text_to_video with a predictor simple enough to compute by hand, and batches for it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from mm_core.builtin.configs.text_to_video import SampleConfig
from mm_core.contracts import Randomness, SampleKey, VideoTextBatch
from mm_core.diffusion.encoders.pixel import PixelAutoencoder
from mm_core.diffusion.encoders.text import ByteTextEncoder
from mm_core.diffusion.flow_match import FlowMatch
from mm_core.tasks.text_to_video.task import TextToVideo

CPU = torch.device("cpu")
CAPTIONS = ["a red circle", "a blue square moves", "up"]
RNG = Randomness(7)


class SmallPredictor(nn.Module):
    """Latents scaled, plus a projection of the mean of the real text, plus the timestep; counts its calls."""

    patch_size = (1, 2, 2)

    def __init__(self, channels=12, text_dim=8, text_padding="masked"):
        super().__init__()
        self.in_channels = self.out_channels = channels
        self.text_dim, self.text_padding = text_dim, text_padding
        self.scale = nn.Parameter(torch.full((1,), 0.3))
        self.project = nn.Linear(text_dim, channels)
        self.project.weight.data = RNG.normal((channels, text_dim), "project") * 0.1
        self.project.bias.data.zero_()
        self.calls = []

    def init_weights(self):
        nn.init.ones_(self.scale)

    def forward(self, latents, timestep, text, text_mask):
        self.calls.append({"timestep": timestep, "text": text, "text_mask": text_mask, "latents": latents})
        mean = (text * text_mask[..., None]).sum(1) / text_mask.sum(1, keepdim=True).clamp(min=1)
        pushed = self.project(mean)[:, :, None, None, None] + timestep.view(-1, 1, 1, 1, 1).to(text) / 1000
        return self.scale * latents + pushed


def make_task(predictor=None, **fields) -> TextToVideo:
    encoder = ByteTextEncoder(8, 32)
    encoder.load(CPU)
    sizes = {"num_frames": 2, "height": 8, "width": 8, "fps": 4.0, "steps": 3, "guidance": 2.0}
    fields = {"sample": SampleConfig(**sizes), "scheduler": FlowMatch(shift=3.0), **fields}
    return TextToVideo(predictor or SmallPredictor(), PixelAutoencoder(2), encoder, **fields)


def make_batch(task=None, captions=CAPTIONS, weights=(1.0, 1.0, 1.0), epoch=0, first=0) -> VideoTextBatch:
    indices = range(first, first + len(captions))
    batch = VideoTextBatch(
        keys=[SampleKey(epoch, index) for index in indices],
        sample_weights=torch.tensor(weights[: len(captions)]),
        ids=[str(index) for index in indices],
        pixels=torch.stack([RNG.normal((3, 2, 8, 8), "pixels", index).clamp(-1, 1) for index in indices]),
        captions=list(captions),
    )
    return task.batch_transform()(batch) if task else batch


def row(batch: VideoTextBatch, i: int) -> VideoTextBatch:
    return replace(
        batch,
        keys=batch.keys[i : i + 1],
        sample_weights=batch.sample_weights[i : i + 1],
        ids=batch.ids[i : i + 1],
        pixels=batch.pixels[i : i + 1],
        captions=batch.captions[i : i + 1],
        text_ids=None,
        text_mask=None,
    )
