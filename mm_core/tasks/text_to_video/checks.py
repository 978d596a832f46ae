"""Checks that the components of a text-to-video task match each other and the clips."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from mm_core.contracts import Autoencoder, SupportsDoSample, SupportsMaxFrames
from mm_core.errors import ContractError, plural
from mm_core.plugin.checks.places import place_of_object
from mm_core.plugin.checks.values import returned
from mm_core.tasks.text_to_video.frames import choices, describe, image_dim
from mm_core.tasks.text_to_video.returned_shapes import scheduler_faults

if TYPE_CHECKING:
    from mm_core.tasks.text_to_video.task import TextToVideo

SIZES = ("num_frames", "height", "width")
Sizes = Mapping[str, int | None]
"""Clip sizes keyed by `SIZES`: frames, and pixels; None where the dataset does not set one."""


def collect_faults(task: TextToVideo, sizes: Mapping[str, Sizes]) -> list[ContractError]:
    """Every mismatch between the components of a text-to-video task, and between them and the clips.

    Args:
        task: the task with its components built.
        sizes: clip sizes to check, keyed by the config path that sets them.
    """
    faults = [*_channel_faults(task), *_text_faults(task), *_frame_faults(task), *_latents_faults(task)]
    faults += task.conditions.faults(task)
    faults += scheduler_faults(task.scheduler, task.autoencoder.latent_channels)
    for where, clip in sizes.items():
        known = {name: value for name, value in clip.items() if value is not None}
        if len(known) == len(clip):
            faults += size_faults(task, where, known)
    return faults


def latents_of(autoencoder: Autoencoder, given: str | None) -> str:
    """How the autoencoder's latents are taken, `sample` or `mode`.

    Args:
        autoencoder: its `do_sample` option decides where the task sets nothing; without it, `mode`.
        given: `latents` of the task, or None.
    """
    if given is not None:
        return given
    return "sample" if isinstance(autoencoder, SupportsDoSample) and autoencoder.do_sample else "mode"


def _latents_faults(task: TextToVideo) -> Iterator[ContractError]:
    """Contradicting values of `task.latents` and the autoencoder's `do_sample`."""
    own = task.autoencoder.do_sample if isinstance(task.autoencoder, SupportsDoSample) else None
    if own is not None and own != (task.latents == "sample"):
        yield ContractError(
            f"latents is {task.latents}, but the autoencoder's do_sample is {str(own).lower()}",
            where="task.latents",
            accepted="sample" if own else "mode",
            hint="remove one of the two",
        )


def _channel_faults(task: TextToVideo) -> Iterator[ContractError]:
    predictor, channels = task.predictor, task.autoencoder.latent_channels
    for name, value in (("in_channels", predictor.in_channels), ("out_channels", predictor.out_channels)):
        if value != channels:
            yield ContractError(
                f"{name} is {value}, but the autoencoder's latents have {plural(channels, 'channel')}",
                where=f"task.predictor.{name}",
                accepted=str(channels),
                hint=f"the predictor is {place_of_object(predictor)}; the autoencoder is"
                f" {place_of_object(task.autoencoder)}",
            )


def _text_faults(task: TextToVideo) -> Iterator[ContractError]:
    predictor, encoder = task.predictor, task.text_encoder
    # The encoder's files contain its width, and a dry run may work without them.
    if not encoder.missing_files() and predictor.text_dim != encoder.hidden_size:
        yield ContractError(
            f"text_dim is {predictor.text_dim}, but the text encoder's hidden states are "
            f"{encoder.hidden_size} wide",
            where="task.predictor.text_dim",
            accepted=str(encoder.hidden_size),
            hint=f"the predictor is {place_of_object(predictor)}; the text encoder is"
            f" {place_of_object(encoder)}",
        )
    padding = predictor.text_padding
    if isinstance(padding, tuple) and encoder.max_length > padding[1]:
        yield ContractError(
            f"max_length is {encoder.max_length}, but the predictor takes {plural(padding[1], 'token')}",
            where="task.text_encoder.max_length",
            accepted=f"at most {padding[1]}",
            hint=f"the predictor is {place_of_object(predictor)}; the text encoder is"
            f" {place_of_object(encoder)}",
        )


def _frame_faults(task: TextToVideo) -> Iterator[ContractError]:
    """Frames the predictor cannot take, and an image encoder that is missing or unused."""
    possible, dim, encoder = choices(task.predictor), image_dim(task.predictor), task.image_encoder
    if task.frames not in possible:
        yield ContractError(
            f"frames would give the predictor {describe(task.frames)} of each clip, which it cannot take",
            where="task.frames",
            accepted=" or ".join(f"[{', '.join(names)}]" for names in possible),
            hint="remove task.frames: the predictor's own default is then used",
        )
    if dim is not None and encoder is None:
        yield ContractError(
            f"the predictor takes image features {dim} wide, but the task has no image encoder",
            where="task.image_encoder",
            accepted="a component, such as `image_encoder: {type: ..., from_pretrained: ...}`",
        )
    if dim is None and encoder is not None:
        yield ContractError(
            "the task has an image encoder, but the predictor takes no image features",
            where="task.image_encoder",
            hint="remove task.image_encoder",
        )
    # The encoder's files contain its width, and a dry run may work without them.
    if dim is not None and encoder is not None and not encoder.missing_files() and encoder.hidden_size != dim:
        yield ContractError(
            f"the image encoder's hidden states are {encoder.hidden_size} wide, but the predictor "
            f"takes {dim}",
            where="task.image_encoder",
            accepted=str(dim),
            hint=f"the image encoder is {place_of_object(encoder)}; the predictor is"
            f" {place_of_object(task.predictor)}",
        )


def size_faults(task: TextToVideo, where: str, sizes: Mapping[str, int]) -> Iterator[ContractError]:
    """Errors of a clip size that the autoencoder refuses or that does not divide into patches.

    Args:
        task: the text-to-video task.
        where: the config path or the request that sets the sizes.
        sizes: frames, height and width of the clip.
    """
    try:
        found = task.autoencoder.latent_shape(**sizes)
    except ContractError as fault:
        hint = fault.hint or _fitting(task, sizes)
        yield ContractError(fault.what, where=where, accepted=fault.accepted, hint=hint)
        return
    shape = returned(Autoencoder.latent_shape, found, task.autoencoder)
    if isinstance(task.predictor, SupportsMaxFrames) and shape[1] > task.predictor.max_frames:
        most = task.predictor.max_frames
        yield ContractError(
            f"num_frames {sizes['num_frames']} makes {plural(shape[1], 'latent frame')}, but the predictor "
            f"takes {most} at most",
            where=f"{where}.num_frames",
            accepted="1, for a model of images" if most == 1 else None,
        )
    patches = task.predictor.patch_size
    for place, (name, stride) in enumerate(zip(sizes, task.autoencoder.stride, strict=True)):
        patch = patches[place]
        if shape[1 + place] % patch:
            near = _near(sizes[name], stride * patch, _divides(task, sizes, name, place))
            yield ContractError(
                f"{name} {sizes[name]} makes {shape[1 + place]} latents, which do not divide into "
                f"the predictor's patches of {patch}",
                where=f"{where}.{name}",
                accepted=f"{' or '.join(map(str, near))}, for example" if near else None,
            )


def _fitting(task: TextToVideo, sizes: Mapping[str, int]) -> str | None:
    """A hint with the nearest sizes that the autoencoder takes and that divide into patches, each size judged
    separately; None where there are none, or where each size is valid and only their combination is not."""
    periods = [s * p for s, p in zip(task.autoencoder.stride, task.predictor.patch_size, strict=True)]
    names = list(sizes)
    for frames in (1, periods[0]):  # with valid sizes for the others, each size can be judged by itself
        fitting = dict(zip(names, (frames, *periods[1:]), strict=True))
        tests = [_divides(task, fitting, name, place) for place, name in enumerate(names)]
        if all(test(fitting[name]) for name, test in zip(names, tests, strict=True)):
            wrong = [place for place, name in enumerate(names) if not tests[place](sizes[name])]
            near = {names[p]: _near(sizes[names[p]], periods[p], tests[p]) for p in wrong}
            nearest = [f"{name} {' or '.join(map(str, found))}" for name, found in near.items() if found]
            return (
                f"sizes that also divide into the predictor's patches: {', '.join(nearest)}"
                if nearest
                else None
            )
    return None


def _divides(task: TextToVideo, sizes: Mapping[str, int], name: str, place: int) -> Callable[[int], bool]:
    def valid(size: int) -> bool:
        try:
            shape = task.autoencoder.latent_shape(**{**sizes, name: size})
        except ContractError:
            return False
        return shape[1 + place] % task.predictor.patch_size[place] == 0

    return valid


def _near(size: int, period: int, valid: Callable[[int], bool]) -> list[int]:
    """The nearest valid sizes below and above."""
    size = max(size, 0)
    below = next((s for s in range(size - 1, max(0, size - 2 * period), -1) if valid(s)), None)
    above = next((s for s in range(size + 1, size + 2 * period) if valid(s)), None)
    return [found for found in (below, above) if found is not None]
