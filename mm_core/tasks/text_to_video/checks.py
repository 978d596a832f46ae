"""Whether the components of a text-to-video task fit each other and the clips: one sentence a misfit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from mm_core.contracts import (
    Autoencoder,
    ChoosesLatents,
    FrameNames,
    ImageEncoder,
    NoiseScheduler,
    Predictor,
    TextEncoder,
)
from mm_core.errors import ContractError
from mm_core.tasks.text_to_video.frames import choices, describe, image_dim
from mm_core.tasks.text_to_video.returned_shapes import scheduler_faults


class Parts(Protocol):
    """The components that are checked."""

    predictor: Predictor
    autoencoder: Autoencoder
    text_encoder: TextEncoder
    image_encoder: ImageEncoder | None
    scheduler: NoiseScheduler
    frames: FrameNames
    latents: str


Sizes = Mapping[str, int | None]
"""num_frames, height, width in pixels; None where the data do not say."""


def collect_faults(
    parts: Parts, sizes: Mapping[str, Sizes], *, sizes_only: bool = False
) -> list[ContractError]:
    """Every misfit. `sizes` maps the place that clip sizes are written in to the sizes."""
    faults = [] if sizes_only else [*_channel_faults(parts), *_text_faults(parts), *_frame_faults(parts)]
    if not sizes_only:
        faults += [
            *_latents_faults(parts),
            *scheduler_faults(parts.scheduler, parts.autoencoder.latent_channels),
        ]
    for where, clip in sizes.items():
        if all(value is not None for value in clip.values()):
            known = {name: value for name, value in clip.items() if value is not None}
            faults += _size_faults(parts, where, known)
    return faults


def latents_of(autoencoder: Autoencoder, given: str | None) -> str:
    """`sample` or `mode`: as the task says, else as the autoencoder's options do, else the mode."""
    if given is not None:
        return given
    return "sample" if isinstance(autoencoder, ChoosesLatents) and autoencoder.do_sample else "mode"


def _latents_faults(parts: Parts) -> list[ContractError]:
    """Two options that say opposite things of the latents."""
    own = parts.autoencoder.do_sample if isinstance(parts.autoencoder, ChoosesLatents) else None
    if own is None or own == (parts.latents == "sample"):
        return []
    return [
        ContractError(
            f"latents is {parts.latents}, and the autoencoder's do_sample is {str(own).lower()}",
            where="task.latents",
            accepted="sample" if own else "mode",
            hint="leave one of the two out",
        )
    ]


def _channel_faults(parts: Parts) -> list[ContractError]:
    predictor, channels = parts.predictor, parts.autoencoder.latent_channels
    return [
        ContractError(
            f"{name} is {value}, but the autoencoder's latents have {channels} channels",
            where=f"task.predictor.{name}",
            accepted=str(channels),
        )
        for name, value in (("in_channels", predictor.in_channels), ("out_channels", predictor.out_channels))
        if value != channels
    ]


def _text_faults(parts: Parts) -> list[ContractError]:
    predictor, encoder = parts.predictor, parts.text_encoder
    faults = []
    # The width stands in the encoder's files, which a dry run may do without.
    if not encoder.missing_files() and predictor.text_dim != encoder.hidden_size:
        faults.append(
            ContractError(
                f"text_dim is {predictor.text_dim}, but the text encoder's hidden states are "
                f"{encoder.hidden_size} wide",
                where="task.predictor.text_dim",
                accepted=str(encoder.hidden_size),
            )
        )
    padding = predictor.text_padding
    if isinstance(padding, tuple) and encoder.max_length > padding[1]:
        faults.append(
            ContractError(
                f"max_length is {encoder.max_length}, but the predictor takes {padding[1]} tokens",
                where="task.text_encoder.max_length",
                accepted=f"at most {padding[1]}",
            )
        )
    return faults


def _frame_faults(parts: Parts) -> list[ContractError]:
    """Frames that the predictor can not be given, or an image encoder that it needs, or does not."""
    possible, dim, encoder = choices(parts.predictor), image_dim(parts.predictor), parts.image_encoder
    faults = []
    if parts.frames not in possible:
        faults.append(
            ContractError(
                f"frames asks to show the predictor {describe(parts.frames)} of each clip",
                where="task.frames",
                accepted=" or ".join(f"[{', '.join(names)}]" for names in possible),
                hint="leave it out: the predictor says what it is made for",
            )
        )
    if dim is not None and encoder is None:
        faults.append(
            ContractError(
                f"the predictor takes image features {dim} wide, and there is no image encoder",
                where="task.image_encoder",
                accepted="a component, such as `image_encoder: {type: ..., from_pretrained: ...}`",
            )
        )
    if dim is None and encoder is not None:
        faults.append(
            ContractError(
                "there is an image encoder, and the predictor takes no image features",
                where="task.image_encoder",
                hint="leave it out",
            )
        )
    # The width stands in the encoder's files, which a dry run may do without.
    if dim is not None and encoder is not None and not encoder.missing_files() and encoder.hidden_size != dim:
        faults.append(
            ContractError(
                f"the image encoder's hidden states are {encoder.hidden_size} wide, but the predictor "
                f"takes {dim}",
                where="task.image_encoder",
                accepted=str(dim),
            )
        )
    return faults


def _size_faults(parts: Parts, where: str, sizes: Mapping[str, int]) -> list[ContractError]:
    """What the autoencoder says of the clip, or what does not divide into the predictor's patches."""
    try:
        shape = parts.autoencoder.latent_shape(**sizes)
    except ContractError as fault:
        hint = fault.hint or _fitting(parts, sizes)
        return [ContractError(fault.what, where=where, accepted=fault.accepted, hint=hint)]
    faults = []
    patches = parts.predictor.patch_size
    for place, (name, stride) in enumerate(zip(sizes, parts.autoencoder.stride, strict=True)):
        patch = patches[place]
        if shape[1 + place] % patch:
            near = _near(sizes[name], stride * patch, _divides(parts, sizes, name, place))
            faults.append(
                ContractError(
                    f"{name} {sizes[name]} makes {shape[1 + place]} latents, which do not divide into "
                    f"patches of {patch}",
                    where=f"{where}.{name}",
                    accepted=f"{' or '.join(map(str, near))}, for example" if near else None,
                )
            )
    return faults


def _fitting(parts: Parts, sizes: Mapping[str, int]) -> str | None:
    """The nearest sizes that the autoencoder takes and that divide into patches, each for itself; None where
    there are none, or where it refuses the sizes together and each of them alone would do."""
    periods = [s * p for s, p in zip(parts.autoencoder.stride, parts.predictor.patch_size, strict=True)]
    names = list(sizes)
    for frames in (1, periods[0]):  # beside sizes that fit, one that does not is found out
        fitting = dict(zip(names, (frames, *periods[1:]), strict=True))
        tests = [_divides(parts, fitting, name, place) for place, name in enumerate(names)]
        if all(test(fitting[name]) for name, test in zip(names, tests, strict=True)):
            wrong = [place for place, name in enumerate(names) if not tests[place](sizes[name])]
            near = {names[p]: _near(sizes[names[p]], periods[p], tests[p]) for p in wrong}
            said = [f"{name} {' or '.join(map(str, found))}" for name, found in near.items() if found]
            return f"what also divides into the predictor's patches: {', '.join(said)}" if said else None
    return None


def _divides(parts: Parts, sizes: Mapping[str, int], name: str, place: int) -> Callable[[int], bool]:
    def valid(size: int) -> bool:
        try:
            shape = parts.autoencoder.latent_shape(**{**sizes, name: size})
        except ContractError:
            return False
        return shape[1 + place] % parts.predictor.patch_size[place] == 0

    return valid


def _near(size: int, period: int, valid: Callable[[int], bool]) -> list[int]:
    """The nearest valid sizes below and above."""
    size = max(size, 0)
    below = next((s for s in range(size - 1, max(0, size - 2 * period), -1) if valid(s)), None)
    above = next((s for s in range(size + 1, size + 2 * period) if valid(s)), None)
    return [found for found in (below, above) if found is not None]
