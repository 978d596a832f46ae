"""Sampling of the task `text_to_video`: complete requests, and clips by guided denoising."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mm_core.builtin.configs.text_to_video import SampleConfig
from mm_core.contracts import Clip, NoiseScheduler, PredictorInputs, Randomness, SampleRequest
from mm_core.errors import ContractError
from mm_core.tasks.text_to_video.captions import Captions
from mm_core.tasks.text_to_video.checks import SIZES, size_faults
from mm_core.tasks.text_to_video.conditions import Conditions
from mm_core.tasks.text_to_video.experts import Experts
from mm_core.tasks.text_to_video.frames import ShownFrames, check_images, inputs_of
from mm_core.tasks.text_to_video.returned_shapes import expect

Images = Sequence[Sequence[Tensor]]
"""For each clip its given images, uint8 [3,Y,X]."""


@dataclass(frozen=True)
class ClipSampler:
    """Samples clips with the components of a text-to-video task.

    Attributes:
        shown: the predictor, the autoencoder and the frames given.
        captions: encodes prompts.
        conditions: of the predictor.
        experts: of the predictor.
        schedule_of: see `TextToVideo.schedule_of`.
        predict: see `TextToVideo.predict`.
        defaults: for what a request does not set.
    """

    shown: ShownFrames
    captions: Captions
    conditions: Conditions
    experts: Experts
    schedule_of: Callable[[Sequence[int]], tuple[Experts, NoiseScheduler]]
    predict: Callable[[PredictorInputs, Tensor, Tensor, str | None], Tensor]
    defaults: SampleConfig

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
        for fault in size_faults(self.shown.predictor, self.shown.autoencoder, "clip to sample", sizes):
            raise fault
        check_images(self.shown.predictor, request.images, len(request.prompts))
        self.experts.scales(values["guidance"])
        second = self.defaults.true_guidance
        if request.negative_prompt and self.conditions.embedded_guidance and (second is None or second <= 1):
            raise ContractError(
                "the request has a negative prompt, but embedded guidance makes one pass only",
                where="negative_prompt",
                hint="set task.sample.true_guidance above 1, or remove the negative prompt",
            )
        return replace(request, **values)

    def clips(self, request: SampleRequest, device: torch.device) -> Iterator[Clip]:
        """Generates the clips of a complete request on a device, and yields each as soon as it is ready."""
        assert request.fps is not None
        shape = self.shown.autoencoder.latent_shape(*_size_of(request))
        for first in range(0, len(request.prompts), self.defaults.batch_size):
            prompts = request.prompts[first : first + self.defaults.batch_size]
            numbers = range(request.first + first, request.first + first + len(prompts))
            noise = torch.stack([Randomness(request.seed).normal(shape, "sample", i) for i in numbers])
            images = request.images[first : first + len(prompts)]
            pixels = self._generate(prompts, images, noise.to(device), request).float().clamp(-1, 1).cpu()
            yield from (Clip(p, request.fps, prompt) for p, prompt in zip(pixels, prompts, strict=True))

    def _generate(
        self, prompts: Sequence[str], images: Images, noise: Tensor, request: SampleRequest
    ) -> Tensor:
        """Pixels [B,3,F,Y,X] from noise [B,C,T,H,W].

        Args:
            prompts: B prompts.
            images: given images of each clip, or () for none.
            noise: [B,C,T,H,W].
            request: the complete request.
        """
        device, size = noise.device, _size_of(request)
        predictor, autoencoder = self.shown.predictor, self.shown.autoencoder
        assert request.guidance is not None and request.steps is not None
        given_scales = scales = self.experts.scales(request.guidance)
        if self.conditions.embedded_guidance:
            scales = dict.fromkeys(given_scales, self.defaults.true_guidance or 0.0)
        guided = any(scale > 1 for scale in scales.values())
        captions = [*prompts, *[request.negative_prompt] * (len(prompts) if guided else 0)]
        text, mask, text_conditions = self.captions.encoded_texts(captions, device)
        clip_conditions = {
            expert: self.conditions.of_clips(len(prompts), size[1:], device, request.fps, scale)
            for expert, scale in given_scales.items()
        }
        experts, scheduler = self.schedule_of(noise.shape[1:])
        frames = self.shown.of_images(images, size, device)

        def velocity(latents: Tensor, timestep: Tensor) -> Tensor:
            expert = experts.of(timestep)
            scale = scales[expert]
            timestep = scheduler.model_timestep(timestep.to(device))
            given = inputs_of(predictor, latents, timestep, frames, clip_conditions[expert])
            rows = len(latents)
            if scale <= 1:
                prompted = {name: tensor[:rows] for name, tensor in text_conditions.items()}
                found = self.predict(_with(given, prompted), text[:rows], mask[:rows], expert)
                return expect(found, latents.shape, "predictor", "forward", predictor).float()
            both = self.predict(_with(given.repeat(2), text_conditions), text, mask, expert)
            expect(both, (2 * rows, *latents.shape[1:]), "predictor", "forward", predictor)
            conditional, unconditional = both.float().chunk(2)
            return unconditional + scale * (conditional - unconditional)

        clean = scheduler.integrate(velocity, noise, request.steps)
        expect(clean, noise.shape, "scheduler", "integrate", scheduler)
        # Latents of given frames go into the clip unchanged.
        clean = inputs_of(predictor, clean, clean.new_zeros(len(clean)), frames).latents
        return expect(autoencoder.decode(clean), (len(clean), 3, *size), "autoencoder", "decode", autoencoder)


def _size_of(request: SampleRequest) -> tuple[int, int, int]:
    """(F, Y, X) of the clips of a complete sampling request."""
    assert request.num_frames is not None and request.height is not None and request.width is not None
    return request.num_frames, request.height, request.width


def _with(given: PredictorInputs, conditions: Mapping[str, Tensor]) -> PredictorInputs:
    return replace(given, conditions={**conditions, **given.conditions})
