"""A pipeline of Diffusers and our task with the same weights, on the same pictures."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import ClassifierFreeGuidance
from mm_diffusers.families import FAMILIES, Family
from mm_diffusers.folder import PipelineFolder
from mm_diffusers.image import DiffusersImage
from mm_diffusers.schedule import PipelineSchedule
from mm_diffusers.task import PipelineTask
from mm_diffusers.text import DiffusersText
from mm_diffusers.transformer import DiffusersTransformer, packed
from mm_diffusers.vae import DiffusersVAE
from PIL import Image
from torch import Tensor

from mm_core.contracts import Randomness, SampleKey, VideoTextBatch
from mm_core.loading.frozen import load_frozen
from mm_core.plugin import get_registry
from mm_core.tasks import SampleConfig

CAPTIONS = ["a cat", "a very long caption of a dog and a cat that sit on a mat", 'x "y"']
HEIGHT, WIDTH, FRAMES = 64, 96, 9
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

    @property
    def frames(self) -> int:
        """Frames of a clip, 1 of pictures."""
        return FRAMES if self.family.strides[0] else 1

    @property
    def first_frame(self) -> Tensor:
        """The picture uint8 [3,Y,X] that clips of image-to-video begin with."""
        draws = torch.Generator().manual_seed(5)
        return torch.randint(0, 255, (3, HEIGHT, WIDTH), generator=draws, dtype=torch.uint8)

    @property
    def frame_conditions(self) -> dict[str, Tensor]:
        """What the first frame becomes, of three clips."""
        if not self.family.first_frame:
            return {}
        pixels = self.first_frame[None, :, None] / 127.5 - 1
        latents = self.task.autoencoder.encode(pixels).mode().expand(3, -1, -1, -1, -1)
        features = self.task.image_encoder.encode([self.first_frame] * 3)
        return {"first_frame": latents, "image_embeds": features}

    def noise(self, rows: int) -> Tensor:
        """The latents [B,C,T,H,W] that our task starts from with seed 3."""
        shape = self.task.autoencoder.latent_shape(self.frames, HEIGHT, WIDTH)
        return torch.stack([RNG.normal(shape, "sample", row) for row in range(rows)])

    def pictures(self, noise: Tensor, steps: int, scale: float | None = None, **given: Any) -> Tensor:
        """The pipeline's own pictures [B,3,F,Y,X] from -1 to 1, of prompts; with a scale of guidance."""
        given = {"prompt": list(CAPTIONS), "height": HEIGHT, "width": WIDTH, **self.family.off, **given}
        takes = inspect.signature(type(self.pipe).__call__).parameters
        fixed = {"num_frames": self.frames, "frame_rate": 25, "max_area": HEIGHT * WIDTH, "_auto_resize": False}
        given = {name: value for name, value in fixed.items() if name in takes} | given
        if "height" not in takes:  # that of the first frame
            del given["height"], given["width"]
        if "image" in takes and self.family.first_frame:
            given["image"] = Image.fromarray(self.first_frame.permute(1, 2, 0).numpy())
        if "guider" in self.pipe.components:
            self.pipe.guider = ClassifierFreeGuidance(scale or 1.0, enabled=scale is not None)
        given["prompt"] = [*given["prompt"]]  # Z-Image's pipeline writes into the list
        if self.task.conditions.embedded_guidance:
            given["guidance_scale"] = 1.0 if scale is None else scale
        elif scale is not None:
            given |= dict.fromkeys(self.family.off, scale)
            if "negative_prompt" in takes:
                given["negative_prompt"] = [""] * len(given["prompt"])
        latents = packed(noise, self.family).clone()
        made = self.pipe(**given, latents=latents, num_inference_steps=steps, output_type="pt")
        found: Tensor = made.frames.transpose(1, 2) if "frames" in made else made.images[:, :, None]
        return found * 2 - 1


def pair_of(kind: str, folder: Path, references: int = 0) -> Pair:
    """The two for a pipeline's folder."""
    absent = [name for name, value in PipelineFolder(folder).index.items() if value == [None, None]]
    pipe = getattr(diffusers, kind).from_pretrained(folder, **dict.fromkeys(absent))
    pipe.set_progress_bar_config(disable=True)
    pipe.vae.use_slicing = True  # HunyuanVideo's takes one clip alone
    predictor = DiffusersTransformer(str(folder), references)
    predictor.transformer.load_state_dict(pipe.transformer.state_dict())
    vae, text = DiffusersVAE(str(folder)), DiffusersText(str(folder), "fp32")
    for component in (vae, text):
        load_frozen(component, "cpu", get_registry())
    frames = FRAMES if predictor.family.strides[0] else 1
    sizes = SampleConfig(num_frames=frames, height=HEIGHT, width=WIDTH, fps=25, steps=5)
    parts = {"predictor": predictor.eval(), "autoencoder": vae, "text_encoder": text}
    if predictor.family.first_frame:
        parts["image_encoder"] = image = DiffusersImage(str(folder), "fp32")
        load_frozen(image, "cpu", get_registry())
    task = PipelineTask(str(folder), **parts, scheduler=PipelineSchedule(str(folder)), sample=sizes)
    return Pair(kind, pipe, task)


def batch_of(pixels: Tensor, captions: list[str], **fields: Any) -> VideoTextBatch:
    """A batch of pictures or clips [B,3,F,Y,X] from -1 to 1."""
    rows = range(len(captions))
    return VideoTextBatch(
        keys=[SampleKey(0, row) for row in rows],
        sample_weights=torch.ones(len(captions)),
        ids=[str(row) for row in rows],
        pixels=pixels,
        fps=torch.full((len(captions),), 25.0),
        captions=list(captions),
        fields=fields,
    )
