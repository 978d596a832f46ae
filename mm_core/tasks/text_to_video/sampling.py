"""Sampling of the task `text_to_video`: complete requests, and clips by guided denoising."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mm_core.builtin.configs.text_to_video import SampleConfig
from mm_core.contracts import (
    Clip,
    ClipSize,
    NoiseScheduler,
    PredictorInputs,
    Ragged,
    Randomness,
    SampleRequest,
    SupportsGuided,
)
from mm_core.data.media.images import fit_image
from mm_core.errors import ContractError, did_you_mean, plural
from mm_core.schema.fields import Guidance
from mm_core.tasks.text_to_video.captions import Captions
from mm_core.tasks.text_to_video.checks import SIZES, size_faults
from mm_core.tasks.text_to_video.conditions import Conditions
from mm_core.tasks.text_to_video.experts import Experts
from mm_core.tasks.text_to_video.frames import BY_COUNT, check_images
from mm_core.tasks.text_to_video.inputs import OF_CLIP, GivenInputs
from mm_core.tasks.text_to_video.returned_shapes import expect

_FRAMES = ("first", "last")

Given = Mapping[str, Sequence[Any]]
"""Fields of the predictor's inputs by name, a value for each clip; see `SampleRequest.inputs`."""


@dataclass(frozen=True)
class ClipSampler:
    """Samples clips with the components of a text-to-video task.

    Attributes:
        inputs: the predictor and what encodes its inputs.
        captions: encodes prompts.
        conditions: of the predictor.
        experts: of the predictor.
        schedule_of: see `TextToVideo.schedule_of`.
        predict: see `TextToVideo.predict`.
        defaults: for what a request does not set.
    """

    inputs: GivenInputs
    captions: Captions
    conditions: Conditions
    experts: Experts
    schedule_of: Callable[[Sequence[int]], tuple[Experts, NoiseScheduler]]
    predict: Callable[[PredictorInputs, Tensor, Tensor, str | None], Tensor]
    defaults: SampleConfig

    @property
    def guidance(self) -> SupportsGuided:
        """The formula of classifier-free guidance: the predictor's own, or the usual one."""
        predictor = self.inputs.predictor
        return predictor if isinstance(predictor, SupportsGuided) else _Guidance()

    def _scales(self, guidance: Guidance) -> dict[str | None, float]:
        """The scale of classifier-free guidance of each expert, for a request's `guidance`."""
        given = self.experts.scales(guidance)
        if not self.conditions.embedded_guidance:
            return given
        second = self.defaults.true_guidance
        return dict.fromkeys(given, self.guidance.guidance_off if second is None else second)

    def completed(self, request: SampleRequest) -> SampleRequest:
        """A sampling request completed with the task's defaults, and checked.

        Raises:
            ContractError: a value is set nowhere, or is not possible.
        """
        names = ("steps", "guidance", *SIZES, "fps")
        values = {name: getattr(request, name) for name in names}
        values |= {name: getattr(self.defaults, name) for name in names if values[name] is None}
        if unset := [name for name, value in values.items() if value is None]:
            flags = " ".join(f"--{name.replace('_', '-')} N" for name in unset)
            raise ContractError(
                f"the sampling request is incomplete; not set: {', '.join(unset)}",
                where="task.sample",
                hint=f"set them in the request (mm sample: {flags}) or under task.sample in the config",
            )
        if values["steps"] < 1:
            raise ContractError(
                f"sampling needs at least one step, not {values['steps']}",
                where="steps",
                hint="set steps to 1 or more, in the request or under task.sample in the config",
            )
        sizes = {name: values[name] for name in SIZES}
        for fault in size_faults(self.inputs.predictor, self.inputs.autoencoder, "clip to sample", sizes):
            raise fault
        check_images(self.inputs.predictor, request.images, len(request.prompts))
        self._check_inputs(request.inputs, request.prompts, sizes["num_frames"])
        off = self.guidance.guidance_off
        one_pass = all(scale <= off for scale in self._scales(values["guidance"]).values())
        if request.negative_prompt and self.conditions.embedded_guidance and one_pass:
            raise ContractError(
                "the request has a negative prompt, but embedded guidance makes one pass only",
                where="negative_prompt",
                hint=f"set task.sample.true_guidance above {off:g}, or remove the negative prompt",
            )
        return replace(request, **values)

    def _check_inputs(self, given: Given, prompts: Sequence[str], frames: int) -> None:
        """ContractError for fields that are unknown or missing, or have other values than they need."""
        needed = self.inputs.asked
        for name in sorted(given.keys() - needed.keys()):
            raise ContractError(
                f"the request gives `{name}`, which the predictor does not take",
                where="inputs",
                accepted=", ".join(needed) or "no input",
                hint=did_you_mean(name, needed),
            )
        for name in sorted(name for name, most in needed.items() if most == 0 and name not in given):
            raise ContractError(
                f"the predictor needs the input `{name}`, which the request does not give",
                where="inputs",
                accepted=", ".join(needed),
                hint=f"mm sample --input {name}=FILE",
            )
        for name, values in given.items():
            if len(values) != len(prompts):
                raise ContractError(
                    f"there are {plural(len(prompts), 'prompt')}, but"
                    f" {plural(len(values), 'value')} of `{name}`",
                    where="inputs",
                    accepted="one for each prompt",
                )
            for prompt, value in zip(prompts, values, strict=True):
                if needed[name] == 0 and isinstance(value, tuple) and not value:
                    what = f"the prompt {prompt!r} has no input `{name}`, which others have"[:200]
                    raise ContractError(what, where="inputs", accepted="one for each prompt")
                self._check_value(name, value, needed[name], frames)
            pixels = [isinstance(value, Tensor) for value in values]
            if needed[name] == 0 and any(pixels) and not all(pixels):
                raise ContractError(
                    f"the input `{name}` is a picture or clip for one prompt, and a number for another",
                    where="inputs",
                    accepted="values of one kind",
                )

    def _check_value(self, name: str, value: Any, most: int | None, frames: int) -> None:
        """ContractError for what one prompt gives in a field of `most` pictures."""
        pictures = _several(value)
        if most is not None and (len(pictures) > most if most else value is pictures):
            raise ContractError(
                f"a prompt has {'' if most else 'a list of '}{plural(len(pictures), 'picture')} of `{name}`",
                where="inputs",
                accepted=f"at most {most}" if most else "one",
            )
        if most and not all(isinstance(one, Tensor) and one.dim() == 3 for one in pictures):
            raise ContractError(
                f"the input `{name}` has a value that is not a picture",
                where="inputs",
                accepted=f"up to {plural(most, 'picture')} for each prompt",
            )
        encoded = (row for row in self.inputs.rows if row.encoder is not None and row.make is None)
        takes_pixels = name in OF_CLIP or any(name in row.reads for row in encoded)
        if most == 0 and takes_pixels and not isinstance(value, Tensor):
            raise ContractError(
                f"the input `{name}` is the number {value:g}",
                where="inputs",
                accepted="a picture or a clip, which an encoder encodes",
                hint=f"mm sample --input {name}=FILE",
            )
        shape = value.shape if isinstance(value, Tensor) and value.dim() == 4 else (3, 0)
        if shape[1] > 1 and name in _FRAMES:
            raise ContractError(
                f"the input `{name}`, a frame of the clip, is a clip", where="inputs", accepted="a picture"
            )
        if 0 < shape[1] < frames and name not in _FRAMES:
            raise ContractError(
                f"the clip of `{name}` has {plural(shape[1], 'frame')}, but a clip to sample has {frames:,}",
                where="inputs",
                hint=f"give a longer clip, or set num_frames to {shape[1]} or less",
            )

    def clips(self, request: SampleRequest, device: torch.device) -> Iterator[Clip]:
        """Generates the clips of a complete request on a device, and yields each as soon as it is ready."""
        assert request.fps is not None
        shape = self.inputs.autoencoder.latent_shape(*_size_of(request))
        for first in range(0, len(request.prompts), self.defaults.batch_size):
            prompts = request.prompts[first : first + self.defaults.batch_size]
            numbers = range(request.first + first, request.first + first + len(prompts))
            noise = torch.stack([Randomness(request.seed).normal(shape, "sample", i) for i in numbers])
            own = slice(first, first + len(prompts))
            given: dict[str, Any] = {name: values[own] for name, values in request.inputs.items()}
            for name, most in self.inputs.asked.items():
                if most != 0:
                    given[name] = tuple(_several(one) for one in given.get(name, [()] * len(prompts)))
            frames = BY_COUNT[len(request.images[0])] if request.images else ()
            for place, name in enumerate(frames):
                given[name] = tuple(images[place] for images in request.images[own])
            inputs = replace(self.inputs, frames=frames)
            pixels = self._generate(prompts, inputs, given, noise.to(device), request)
            pixels = pixels.float().clamp(-1, 1).cpu()
            yield from (Clip(p, request.fps, prompt) for p, prompt in zip(pixels, prompts, strict=True))

    def _generate(
        self,
        prompts: Sequence[str],
        inputs: GivenInputs,
        fields: Given,
        noise: Tensor,
        request: SampleRequest,
    ) -> Tensor:
        """Pixels [B,3,F,Y,X] from noise [B,C,T,H,W].

        Args:
            prompts: B prompts.
            inputs: of the predictor, with the frames that are given.
            fields: of each clip.
            noise: [B,C,T,H,W].
            request: the complete request.
        """
        device, size = noise.device, _size_of(request)
        predictor, autoencoder = self.inputs.predictor, self.inputs.autoencoder
        assert request.guidance is not None and request.steps is not None
        guidance, scales = self.guidance, self._scales(request.guidance)
        guided = any(scale > guidance.guidance_off for scale in scales.values())
        captions = [*prompts, *[request.negative_prompt] * (len(prompts) if guided else 0)]
        shown = {name: (*values, *(values if guided else ())) for name, values in fields.items()}
        text, mask, text_conditions = self.captions.encoded_texts(captions, device, shown)
        clip_conditions = {
            expert: self.conditions.of_clips(len(prompts), size[1:], device, request.fps, scale)
            for expert, scale in self.experts.scales(request.guidance).items()
        }
        experts, scheduler = self.schedule_of(noise.shape[1:])
        conditions = _encoded(inputs, fields, size, device)
        bare = inputs.unconditional(conditions)

        def velocity(latents: Tensor, timestep: Tensor) -> Tensor:
            expert = experts.of(timestep)
            scale, own = scales[expert], clip_conditions[expert]
            timestep = scheduler.model_timestep(timestep.to(device))
            given = inputs.inputs(latents, timestep, conditions, own)
            rows = len(latents)
            if scale <= guidance.guidance_off:
                prompted = {name: tensor[:rows] for name, tensor in text_conditions.items()}
                found = self.predict(_with(given, prompted), text[:rows], mask[:rows], expert)
                return expect(found, latents.shape, "predictor", "forward", predictor).float()
            without = given if bare is conditions else inputs.inputs(latents, timestep, bare, own)
            both = self.predict(_with(given.beside(without), text_conditions), text, mask, expert)
            expect(both, (2 * rows, *latents.shape[1:]), "predictor", "forward", predictor)
            conditional, unconditional = both.float().chunk(2)
            found = guidance.guided(conditional, unconditional, scale)
            return expect(found, latents.shape, "predictor", "guided", predictor).float()

        clean = scheduler.integrate(velocity, noise, request.steps)
        expect(clean, noise.shape, "scheduler", "integrate", scheduler)
        # Latents of given frames go into the clip unchanged.
        clean = inputs.inputs(clean, clean.new_zeros(len(clean)), conditions).latents
        return expect(autoencoder.decode(clean), (len(clean), 3, *size), "autoencoder", "decode", autoencoder)


class _Guidance:
    """The usual formula of classifier-free guidance."""

    guidance_off = 1.0

    def guided(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        return unconditional + scale * (conditional - unconditional)


def _encoded(inputs: GivenInputs, fields: Given, size: ClipSize, device: torch.device) -> dict[str, Tensor]:
    """The conditions of the predictor's table of inputs, of what a request gives for each clip."""
    found: dict[str, Tensor] = {}
    for row in inputs.rows:
        own: dict[str, Any] = {name: fields[name] for name in row.reads if name in fields}
        if row.most:
            pictures = Ragged.of_pictures(own[row.reads[0]]).changed(lambda one: one.to(device))
            own = {row.reads[0]: pictures.floats()}
        elif row.encoder != "image_encoder":
            own = {name: _fitted(name, values, size, device) for name, values in own.items()}
        found |= inputs.encode(row, own, size, device)
    return found


def _fitted(name: str, values: Sequence[Tensor | float], size: ClipSize, device: torch.device) -> Tensor:
    """Values of a field for each clip in the clips' size: pixels [B,3,F,Y,X] in [-1, 1], or numbers [B].

    Datasets of clips read a field as a clip, so a picture, such as a mask, stands for all frames, unless the
    field is a frame. Pictures beside clips are fields with `most`.
    """
    made = []
    for value in values:
        if not isinstance(value, Tensor):
            made.append(torch.tensor(float(value)))
            continue
        frames = value[:, None] if value.dim() == 3 else value[:, : size[0]]
        fitted = torch.stack([fit_image(frame, *size[1:]) for frame in frames.unbind(1)], dim=1)
        made.append(fitted if name in _FRAMES else fitted.expand(-1, size[0], -1, -1))
    return torch.stack(made).to(device)


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _size_of(request: SampleRequest) -> tuple[int, int, int]:
    """(F, Y, X) of the clips of a complete sampling request."""
    assert request.num_frames is not None and request.height is not None and request.width is not None
    return request.num_frames, request.height, request.width


def _with(given: PredictorInputs, conditions: Mapping[str, Tensor]) -> PredictorInputs:
    return replace(given, conditions={**conditions, **given.conditions})
