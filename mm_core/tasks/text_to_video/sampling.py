"""Sampling of the task `text_to_video`: complete requests, and clips by guided denoising."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from mm_core.contracts import PredictorInputs, SampleRequest
from mm_core.errors import ContractError
from mm_core.tasks.text_to_video.checks import SIZES, size_faults
from mm_core.tasks.text_to_video.frames import image_frames, inputs_of
from mm_core.tasks.text_to_video.returned_shapes import expect

if TYPE_CHECKING:
    from mm_core.tasks.text_to_video.task import TextToVideo

Images = Sequence[Sequence[Tensor]]
"""For each clip its given images, uint8 [3,Y,X]."""


def completed(task: TextToVideo, request: SampleRequest) -> SampleRequest:
    """A sampling request completed with the task's defaults.

    Raises:
        ContractError: a value is set nowhere, or is not possible.
    """
    names = ("steps", "guidance", *SIZES, "fps")
    values = {name: getattr(request, name) for name in names}
    values |= {name: getattr(task.sample_defaults, name) for name in names if values[name] is None}
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
    return replace(request, **values)


def sample_shape(task: TextToVideo, request: SampleRequest) -> tuple[int, int, int, int]:
    """The latent shape (C,T,H,W) of a complete sampling request.

    Raises:
        ContractError: the task cannot make clips of this size.
    """
    sizes = dict(zip(SIZES, size_of(request), strict=True))
    for fault in size_faults(task, "clip to sample", sizes):
        raise fault
    return task.autoencoder.latent_shape(**sizes)


def size_of(request: SampleRequest) -> tuple[int, int, int]:
    """(F, Y, X) of the clips of a complete sampling request."""
    assert request.num_frames is not None and request.height is not None and request.width is not None
    return request.num_frames, request.height, request.width


def check_guidance(task: TextToVideo, request: SampleRequest) -> None:
    """Checks the guidance and the negative prompt of a complete sampling request.

    Raises:
        ContractError: the scales do not match the experts, or nothing would use the negative prompt.
    """
    assert request.guidance is not None
    task.experts.scales(request.guidance)
    second = task.sample_defaults.true_guidance
    if request.negative_prompt and task.conditions.embedded_guidance and (second is None or second <= 1):
        raise ContractError(
            "the request has a negative prompt, but embedded guidance makes one pass only",
            where="negative_prompt",
            hint="set task.sample.true_guidance above 1, or remove the negative prompt",
        )


def generate(
    task: TextToVideo, prompts: Sequence[str], images: Images, noise: Tensor, request: SampleRequest
) -> Tensor:
    """Samples clips: pixels[B,3,F,Y,X] from noise[B,C,T,H,W].

    Args:
        task: the text-to-video task.
        prompts: B prompts.
        images: given images of each clip, or () for none.
        noise: [B,C,T,H,W], on any device.
        request: the complete request.
    """
    device, size = task.compute_device(), size_of(request)
    assert request.guidance is not None and request.steps is not None
    embedded = task.conditions.embedded_guidance
    given_scales = task.experts.scales(request.guidance)
    scales = (
        dict.fromkeys(given_scales, task.sample_defaults.true_guidance or 0.0) if embedded else given_scales
    )
    guided = any(scale > 1 for scale in scales.values())
    captions = [*prompts, *[request.negative_prompt] * (len(prompts) if guided else 0)]
    text, mask, text_conditions = task.captions.encoded_texts(captions, device)
    clip_conditions = {
        expert: task.conditions.of_clips(len(prompts), size[1:], device, request.fps, scale)
        for expert, scale in given_scales.items()
    }
    experts, scheduler = task.schedule_of(noise.shape[1:])
    frames = image_frames(task, images, size, device)

    def velocity(latents: Tensor, timestep: Tensor) -> Tensor:
        expert = experts.of(timestep)
        scale = scales[expert]
        timestep = scheduler.model_timestep(timestep.to(device))
        given = inputs_of(task.predictor, latents, timestep, frames, clip_conditions[expert])
        rows = len(latents)
        if scale <= 1:
            prompted = {name: tensor[:rows] for name, tensor in text_conditions.items()}
            found = task.predict(_with(given, prompted), text[:rows], mask[:rows], expert)
            return expect(found, latents.shape, "predictor", "forward", task.predictor).float()
        both = task.predict(_with(given.repeat(2), text_conditions), text, mask, expert)
        expect(both, (2 * rows, *latents.shape[1:]), "predictor", "forward", task.predictor)
        conditional, unconditional = both.float().chunk(2)
        return unconditional + scale * (conditional - unconditional)

    clean = scheduler.integrate(velocity, noise.to(device), request.steps)
    expect(clean, noise.shape, "scheduler", "integrate", scheduler)
    # Latents of given frames go into the clip unchanged.
    clean = inputs_of(task.predictor, clean, clean.new_zeros(len(clean)), frames).latents
    decoded = task.autoencoder.decode(clean)
    return expect(decoded, (len(clean), 3, *size), "autoencoder", "decode", task.autoencoder)


def _with(given: PredictorInputs, conditions: Mapping[str, Tensor]) -> PredictorInputs:
    return replace(given, conditions={**conditions, **given.conditions})
