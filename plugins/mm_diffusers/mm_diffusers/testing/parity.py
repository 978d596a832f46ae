"""A pipeline of Diffusers and our task with the same weights: whether a recipe holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import diffusers
import torch
from PIL import Image
from torch import Tensor

from mm_core.contracts import Ragged, Randomness, SampleKey, SampleRequest, VideoTextBatch
from mm_core.errors import ContractError, first_line
from mm_core.tasks import SampleConfig
from mm_diffusers.families import PAGE, Family
from mm_diffusers.folder import PipelineFolder
from mm_diffusers.image import DiffusersImage
from mm_diffusers.pictures import open_processor
from mm_diffusers.schedule import PipelineSchedule
from mm_diffusers.task import PipelineTask
from mm_diffusers.text import DiffusersText
from mm_diffusers.transformer import DiffusersTransformer, packed, unpacked
from mm_diffusers.vae import DiffusersVAE

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
    task: Any

    @property
    def family(self) -> Family:
        """The recipe."""
        found: Family = self.task.predictor.family
        return found

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
    def references(self) -> tuple[tuple[Tensor, ...], ...]:
        """The pictures uint8 [3,Y,X] that each of three captions edits, of the same sizes."""
        if not self.family.areas:
            return ((),) * 3
        draws, sizes = torch.Generator().manual_seed(6), ((80, 64), (64, 128))
        several = sizes if self.task.predictor.inputs[0].most > 1 else sizes[:1]
        rows = [[torch.randint(0, 255, (3, *size), generator=draws) for size in several] for _ in range(3)]
        return tuple(tuple(one.byte() for one in row) for row in rows)

    def encoded(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Text states and mask of the captions, and all conditions of the predictor's forward."""
        cpu, size = torch.device("cpu"), (1, HEIGHT, WIDTH)
        fields = {"references": self.references} if self.family.areas else {}
        text, mask, found = self.task.captions.encoded_texts(CAPTIONS, cpu, fields)
        given = {**found, **self.frame_conditions}
        if self.task.conditions.embedded_guidance:
            given["guidance"] = torch.ones(3)
        given |= {name: torch.full((3,), 25.0) for name in self.family.clip_conditions}
        if fields:
            shown = {"references": Ragged.of_pictures(self.references).floats()}
            made = self.task._inputs.encoded(shown, size, cpu)
            given |= self.task.predictor.with_inputs(text, text, made).conditions
        return text, mask, given

    @property
    def frame_conditions(self) -> dict[str, Tensor]:
        """What the first frame becomes, of three clips."""
        if not self.family.first_frame:
            return {}
        pixels = self.first_frame[None, :, None] / 127.5 - 1
        latents = self.task.autoencoder.encode(pixels).mode().expand(3, -1, -1, -1, -1)
        features = self.task.image_encoder.encode([self.first_frame] * 3)
        return {"first_frame": latents, "image_embeds": features}

    @property
    def calls(self) -> list[tuple[slice, dict[str, Any]]]:
        """The rows that the pipeline takes in one call, with arguments of theirs: all captions, or one with
        pictures to edit."""
        if not self.family.areas:
            return [(slice(None), {})]
        shown = [[Image.fromarray(one.permute(1, 2, 0).numpy()) for one in own] for own in self.references]
        return [
            (slice(row, row + 1), {"prompt": [caption], "image": own if len(own) > 1 else own[0]})
            for row, (caption, own) in enumerate(zip(CAPTIONS, shown, strict=True))
        ]

    def noise(self, rows: int) -> Tensor:
        """The latents [B,C,T,H,W] that our task starts from with seed 3."""
        shape = self.task.autoencoder.latent_shape(self.frames, HEIGHT, WIDTH)
        return torch.stack([RNG.normal(shape, "sample", row) for row in range(rows)])

    def pictures(self, noise: Tensor, steps: int, scale: float | None = None, **given: Any) -> Tensor:
        """The pipeline's own pictures [B,3,F,Y,X] from -1 to 1, of prompts; with a scale of guidance."""
        if self.family.areas and "image" not in given:
            made = [self.pictures(noise[own], steps, scale, **{**given, **more}) for own, more in self.calls]
            return torch.cat(made)
        given = {"prompt": list(CAPTIONS), "height": HEIGHT, "width": WIDTH, **self.family.off, **given}
        takes = inspect.signature(type(self.pipe).__call__).parameters
        fixed = {
            "num_frames": self.frames,
            "frame_rate": 25,
            "max_area": HEIGHT * WIDTH,
            "_auto_resize": False,
        }
        given = {name: value for name, value in fixed.items() if name in takes} | given
        if "height" not in takes:  # that of the first frame
            del given["height"], given["width"]
        if "image" in takes and self.family.first_frame:
            given["image"] = Image.fromarray(self.first_frame.permute(1, 2, 0).numpy())
        if "guider" in self.pipe.components:
            self.pipe.guider = diffusers.ClassifierFreeGuidance(scale or 1.0, enabled=scale is not None)
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

    def called(self, noisy: Tensor, sigma: float) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments of the pipeline's calls of its transformer at a noise level, with prompts: one call,
        or one for each row."""
        found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        hook = self.pipe.transformer.register_forward_pre_hook(
            lambda module, args, named: found.append((args, named)), with_kwargs=True
        )
        scheduler, self.pipe.scheduler = self.pipe.scheduler, OneLevel()
        self.pipe.scheduler.level = sigma
        try:
            self.pictures(noisy, 1)
        finally:
            hook.remove()
            self.pipe.scheduler = scheduler
        return found

    def velocities(self, noisy: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
        """Velocities of latents [3,C,T,H,W] at a noise level: the predictor's, and the pipeline's."""
        calls = self.called(noisy, sigma)
        found = [self.pipe.transformer(*args, **named)[0] for args, named in calls]
        predicted = torch.stack(found[0]) if isinstance(found[0], list) else torch.cat(found)
        wanted = unpacked(predicted, self.family, noisy.shape) * (-1 if self.family.negated else 1)
        text, mask, given = self.encoded()
        return self.task.predictor(noisy, torch.full((3,), 1000 * sigma), text, mask, **given), wanted

    def sampled(
        self, steps: int, guidance: float | None = None, captions: Sequence[str] = CAPTIONS, **inputs: Any
    ) -> Tensor:
        """Our pictures [B,3,F,Y,X] from -1 to 1, of prompts; with a scale of guidance."""
        if self.family.first_frame:
            inputs["first"] = (self.first_frame,) * len(captions)
        if self.family.areas:
            inputs = {"references": self.references, **inputs}
        scale = self.task.predictor.guidance_off if guidance is None else guidance
        request = SampleRequest(prompts=tuple(captions), seed=3, guidance=scale, steps=steps, inputs=inputs)
        return torch.stack([clip.pixels for clip in self.task.sample(request)]).float()


class OneLevel(diffusers.FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """One step, at a level of noise."""

    level: float

    def set_timesteps(
        self,
        num_inference_steps: Any = None,
        device: Any = None,
        sigmas: Any = None,
        mu: Any = None,
        timesteps: Any = None,
    ) -> None:
        """As a scheduler."""
        super().set_timesteps(sigmas=[self.level], device=device)


def pair_of(kind: str, folder: Path, references: int = 0, family: Family | None = None) -> Pair:
    """The two for the folder of a pipeline of a class."""
    absent = [name for name, value in PipelineFolder(folder, family).index.items() if value == [None, None]]
    given: dict[str, Any] = dict.fromkeys(absent)
    if PipelineFolder(folder, family).has("processor"):
        given["processor"] = open_processor(folder / "processor")
    pipe = getattr(diffusers, kind).from_pretrained(folder, **given)
    pipe.set_progress_bar_config(disable=True)
    pipe.vae.use_slicing = True  # HunyuanVideo's takes one clip alone
    predictor = DiffusersTransformer(str(folder), references, family)
    predictor.transformer.load_state_dict(pipe.transformer.state_dict())
    vae, text = DiffusersVAE(str(folder), family=family), DiffusersText(str(folder), "fp32", family=family)
    _take(vae, {"model": pipe.vae})
    _take(text, {name: getattr(pipe, name) for name in text.encoders})
    frames = FRAMES if predictor.family.strides[0] else 1
    sizes = SampleConfig(num_frames=frames, height=HEIGHT, width=WIDTH, fps=25, steps=5)
    parts: dict[str, Any] = {"predictor": predictor.eval(), "autoencoder": vae, "text_encoder": text}
    if predictor.family.first_frame:
        parts["image_encoder"] = image = DiffusersImage(str(folder), "fp32", family)
        _take(image, {"model": pipe.image_encoder})
    task = PipelineTask(
        str(folder), **parts, scheduler=PipelineSchedule(str(folder), family=family), sample=sizes
    )
    return Pair(kind, pipe, task)


def _take(component: Any, parts: Mapping[str, torch.nn.Module]) -> None:
    """Builds a frozen component with the pipeline's weights."""
    component.build_empty()
    for name, module in parts.items():
        getattr(component, name).load_state_dict(module.state_dict(), assign=True)


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


def forward_inputs(
    predictor: DiffusersTransformer, lengths: Sequence[int], patches: tuple[int, int] = (4, 6)
) -> dict[str, Tensor]:
    """Arguments of a predictor's forward, drawn at random.

    Args:
        predictor: of any family.
        lengths: tokens of the caption of each row.
        patches: rows and columns of patches of latents; clips have two along time.
    """
    rows, longest = len(lengths), max(lengths)
    t, y, x = predictor.patch_size
    size = (2 * t if predictor.family.strides[0] else t, patches[0] * y, patches[1] * x)
    given = {
        "latents": torch.randn(rows, predictor.in_channels, *size),
        "timestep": torch.linspace(998.7, 12.5, rows),
        "text": torch.randn(rows, longest, predictor.text_dim),
        "text_mask": torch.arange(longest) < torch.tensor(lengths)[:, None],
    }
    for name, shape in predictor.condition_shapes.items():
        draw = torch.randn if len(shape) == 2 and shape[0] is None and shape[1] else torch.ones
        given[name] = draw(rows, *(longest if width is None else width for width in shape))
    given |= {name: given["text_mask"] for name in given if name.endswith("_mask")}
    if predictor.family.first_frame:
        given["first_frame"] = torch.randn(rows, predictor.in_channels, 1, *size[1:])
    return given


def _masked(encode: Callable[..., Any], *args: Any, **named: Any) -> tuple[Any, ...]:
    """What `encode_prompt` returns, with its masks [B,L] as booleans."""
    found = encode(*args, **named)
    size = found[0].shape[:2]
    return tuple(each.bool() if getattr(each, "shape", None) == size else each for each in found)


BARS: Mapping[str, tuple[float, str]] = MappingProxyType(
    {
        "velocity": (1e-6, "encoded, latents, patch, channels, ragged and off"),
        "pictures": (1e-5, "negated, folded and patch"),
        "guided": (1e-5, "guidance and off"),
    }
)
"""What is compared -> the largest difference, and the fields of a recipe on which it depends."""


def check_family(folder: str | Path, family: Family | None = None, masked: bool = False) -> dict[str, float]:
    """Compares a pipeline, called with prompts, with our task of the same weights, on the CPU.

    Args:
        folder: a tiny pipeline, for it is loaded twice.
        family: its recipe; None: that of `FAMILIES`.
        masked: compare with the pipeline as if the masks of its `encode_prompt` were booleans.

    Returns:
        Differences: of the velocity, relative; of pictures of three steps from -1 to 1, without and with
        guidance.

    Raises:
        ContractError: one of them is too large.
    """
    kind = PipelineFolder(Path(folder), family).kind
    pair = pair_of(kind, Path(folder), family=family)
    if masked:
        pair.pipe.encode_prompt = partial(_masked, pair.pipe.encode_prompt)
    channels, latents = pair.task.predictor.in_channels, pair.task.autoencoder.latent_channels
    if channels != latents:
        raise ContractError(
            f"by the recipe, the transformer takes {channels} channels, but latents have {latents}",
            where=str(folder),
            hint=f"it depends on channels and folded of the recipe ({PAGE})",
        )
    found: dict[str, float] = {}
    for name, (most, named) in BARS.items():
        hint = f"it depends on {named} of the recipe ({PAGE})"
        try:
            found[name] = _difference(pair, name)
        except CALLED as fault:
            raise ContractError(f"{name}: {first_line(fault)}", where=str(folder), hint=hint) from fault
        if not found[name] <= most:
            raise ContractError(
                f"{name}: {found[name]:.1e} from what {pair.kind} makes",
                where=str(folder),
                accepted=f"at most {most:.0e}",
                hint=hint,
            )
    return found


CALLED = (ArithmeticError, AttributeError, KeyError, RuntimeError, TypeError, ValueError)
"""What a pipeline raises where a recipe calls it in another way."""


def _difference(pair: Pair, name: str) -> float:
    """Of one of `BARS`."""
    noise = pair.noise(3)
    if name == "velocity":
        with torch.no_grad():
            own, wanted = pair.velocities(noise, 0.4)
        return float((own - wanted).norm() / wanted.norm())
    scale = 3.5 if name == "guided" else None
    return float((pair.sampled(3, scale) - pair.pictures(noise, 3, scale)).abs().max())
