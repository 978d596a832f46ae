"""A pipeline of Diffusers and our task with the same weights, on the same pictures."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from mm_diffusers.families import FAMILIES, Family
from mm_diffusers.schedule import PipelineSchedule
from mm_diffusers.task import PipelineTask
from mm_diffusers.text import DiffusersText
from mm_diffusers.transformer import DiffusersTransformer, packed
from mm_diffusers.vae import DiffusersVAE
from torch import Tensor

from mm_core.contracts import Randomness, SampleKey, VideoTextBatch
from mm_core.loading.frozen import load_frozen
from mm_core.plugin import get_registry
from mm_core.tasks import SampleConfig

CAPTIONS = ["a cat", "a very long caption of a dog and a cat that sit on a mat", "x y"]
HEIGHT, WIDTH = 48, 80
RNG = Randomness(3)


@dataclass
class Pair:
    """Both, and the pipeline's class.

    Attributes:
        kind: class of the pipeline.
        pipe: as Diffusers loads it.
        task: ours.
    """

    kind: str
    pipe: Any
    task: PipelineTask

    @property
    def family(self) -> Family:
        return FAMILIES[self.kind]

    def noise(self, rows: int) -> Tensor:
        """The latents [B,C,1,H,W] that our task starts from with seed 3."""
        shape = self.task.autoencoder.latent_shape(1, HEIGHT, WIDTH)
        return torch.stack([RNG.normal(shape, "sample", row) for row in range(rows)])

    def pictures(self, noise: Tensor, steps: int, scale: float | None = None, **given: Any) -> Tensor:
        """The pipeline's own pictures [B,3,Y,X] from -1 to 1, of prompts; with a scale of guidance."""
        given = {"prompt": list(CAPTIONS), "height": HEIGHT, "width": WIDTH, **self.family.off, **given}
        given["prompt"] = [*given["prompt"]]  # Z-Image's pipeline writes into the list
        if self.task.conditions.embedded_guidance:
            given["guidance_scale"] = 1.0 if scale is None else scale
        elif scale is not None:
            given |= dict.fromkeys(self.family.off, scale)
            if "negative_prompt" in inspect.signature(type(self.pipe).__call__).parameters:
                given["negative_prompt"] = [""] * len(given["prompt"])
        latents = packed(noise, self.family).clone()
        found: Tensor = self.pipe(
            **given, latents=latents, num_inference_steps=steps, output_type="pt"
        ).images
        return found * 2 - 1


def pair_of(kind: str, folder: Path, references: int = 0) -> Pair:
    """The two for a pipeline's folder."""
    pipe = getattr(diffusers, kind).from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    predictor = DiffusersTransformer(str(folder), references)
    predictor.transformer.load_state_dict(pipe.transformer.state_dict())
    vae, text = DiffusersVAE(str(folder)), DiffusersText(str(folder), "fp32")
    for component in (vae, text):
        load_frozen(component, "cpu", get_registry())
    sizes = SampleConfig(num_frames=1, height=HEIGHT, width=WIDTH, fps=1, steps=5)
    parts = {"predictor": predictor.eval(), "autoencoder": vae, "text_encoder": text}
    task = PipelineTask(str(folder), **parts, scheduler=PipelineSchedule(str(folder)), sample=sizes)
    return Pair(kind, pipe, task)


def batch_of(pixels: Tensor, captions: list[str], **fields: Any) -> VideoTextBatch:
    """A batch of pictures [B,3,Y,X] from -1 to 1."""
    rows = range(len(captions))
    return VideoTextBatch(
        keys=[SampleKey(0, row) for row in rows],
        sample_weights=torch.ones(len(captions)),
        ids=[str(row) for row in rows],
        pixels=pixels[:, :, None],
        captions=list(captions),
        fields=fields,
    )
