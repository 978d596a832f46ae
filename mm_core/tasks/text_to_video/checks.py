"""Checks that the components of a text-to-video task match each other and the clips, also those of dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mm_core.contracts import (
    Autoencoder,
    DictBatch,
    Predictor,
    Ragged,
    SupportsDoSample,
    SupportsExperts,
    SupportsMaxFrames,
    SupportsWeightsFrom,
    TextEncoder,
    VideoTextBatch,
)
from mm_core.errors import ContractError, plural
from mm_core.files import absent
from mm_core.hub import HubName
from mm_core.plugin.checks.places import place_of_object
from mm_core.plugin.checks.values import returned
from mm_core.tasks.text_to_video.frames import choices, describe, image_dim
from mm_core.tasks.text_to_video.inputs import GivenInputs

SIZES = ("num_frames", "height", "width")


def latents_of(autoencoder: Autoencoder, given: str | None) -> str:
    """How the autoencoder's latents are taken, `sample` or `mode`.

    Args:
        autoencoder: its `do_sample` option decides where the task sets nothing; without it, `mode`.
        given: `latents` of the task, or None.
    """
    if given is not None:
        return given
    return "sample" if isinstance(autoencoder, SupportsDoSample) and autoencoder.do_sample else "mode"


def latents_faults(autoencoder: Autoencoder, latents: str) -> Iterator[ContractError]:
    """Contradicting values of `task.latents` and the autoencoder's `do_sample`."""
    own = autoencoder.do_sample if isinstance(autoencoder, SupportsDoSample) else None
    if own is not None and own != (latents == "sample"):
        yield ContractError(
            f"latents is {latents}, but the autoencoder's do_sample is {str(own).lower()}",
            where="task.latents",
            accepted="sample" if own else "mode",
            hint="remove one of the two",
        )


def component_faults(
    predictor: Predictor, autoencoder: Autoencoder, text_encoder: TextEncoder
) -> Iterator[ContractError]:
    """Mismatches between a predictor, the autoencoder and the text encoder."""
    channels = autoencoder.latent_channels
    for name, value in (("in_channels", predictor.in_channels), ("out_channels", predictor.out_channels)):
        if value != channels:
            yield ContractError(
                f"{name} is {value}, but the autoencoder's latents have {plural(channels, 'channel')}",
                where=f"task.predictor.{name}",
                accepted=str(channels),
                hint=_built(predictor=predictor, autoencoder=autoencoder),
            )
    # An encoder's files contain its width, and a dry run may work without them.
    if not text_encoder.missing_files() and predictor.text_dim != text_encoder.hidden_size:
        yield ContractError(
            f"text_dim is {predictor.text_dim}, but the text encoder's hidden states are "
            f"{text_encoder.hidden_size} wide",
            where="task.predictor.text_dim",
            accepted=str(text_encoder.hidden_size),
            hint=_built(predictor=predictor, text_encoder=text_encoder),
        )
    padding = predictor.text_padding
    if isinstance(padding, tuple) and text_encoder.max_length > padding[1]:
        yield ContractError(
            f"max_length is {text_encoder.max_length}, but the predictor takes {plural(padding[1], 'token')}",
            where="task.text_encoder.max_length",
            accepted=f"at most {padding[1]}",
            hint=_built(predictor=predictor, text_encoder=text_encoder),
        )


def frame_faults(given: GivenInputs) -> Iterator[ContractError]:
    """Frames that the predictor cannot take, and an image encoder that is missing or unused."""
    predictor, image_encoder = given.predictor, given.image_encoder
    possible, dim = choices(predictor), image_dim(predictor)
    if given.frames not in possible:
        yield ContractError(
            f"frames would give the predictor {describe(given.frames)} of each clip, which it cannot take",
            where="task.frames",
            accepted=" or ".join(f"[{', '.join(names)}]" for names in possible),
            hint="remove task.frames: the predictor's own default is then used",
        )
    if dim is not None and image_encoder is None:
        yield ContractError(
            f"the predictor takes image features {dim} wide, but the task has no image encoder",
            where="task.image_encoder",
            accepted="a component, such as `image_encoder: {type: ..., from_pretrained: ...}`",
        )
    elif dim is None and image_encoder is not None and not given.uses_image_encoder:
        yield ContractError(
            "the task has an image encoder, but the predictor takes no image features",
            where="task.image_encoder",
            hint="remove task.image_encoder",
        )
    elif (
        image_encoder is not None
        and dim is not None
        and not image_encoder.missing_files()
        and image_encoder.hidden_size != dim
    ):
        yield ContractError(
            f"the image encoder's hidden states are {image_encoder.hidden_size} wide, but the predictor "
            f"takes {dim}",
            where="task.image_encoder",
            accepted=str(dim),
            hint=_built(image_encoder=image_encoder, predictor=predictor),
        )


def expert_faults(predictor: Predictor | SupportsExperts) -> Iterator[ContractError]:
    """Errors of experts whose timesteps training would draw, although none of their weights is trained."""
    if not isinstance(predictor, SupportsExperts) or not isinstance(predictor, nn.Module):
        return
    drawn = [expert.name for expert in predictor.experts if expert.trained]
    trained = {name.partition(".")[0] for name, p in predictor.named_parameters() if p.requires_grad}
    if not trained or not trained < set(drawn):  # weights outside the experts are trained in every step
        return
    idle = [name for name in drawn if name not in trained]
    yield ContractError(
        f"no weight of {' and '.join(f'predictor.{name}' for name in idle)} is trained, but the run would"
        " draw its timesteps too",
        where="task.predictor",
        accepted="experts that each have weights to train (train.adapters, train.freeze)",
        hint=f"set task.predictor.train: {', '.join(sorted(trained))} (with wan/two_expert)",
    )


def _built(**components: object) -> str:
    """Where components are defined, and which of their weights are missing, as a hint."""
    places = {name.replace("_", " "): place_of_object(one) for name, one in components.items()}
    found = [f"the {name} is {place}" for name, place in places.items()]
    for name, one in components.items():
        given = one.weights_from if isinstance(one, SupportsWeightsFrom) else None
        if given is not None and absent(path := Path(given.path)):
            what = f"{HubName.at(path) or path} is missing"
            found.append(f"{what}: the {name.replace('_', ' ')}'s sizes are those of its preset or fields")
    return "; ".join(found)


def size_faults(
    predictor: Predictor, autoencoder: Autoencoder, where: str, sizes: Mapping[str, int]
) -> Iterator[ContractError]:
    """Errors of a clip size that the autoencoder refuses or that does not divide into patches.

    Args:
        predictor: the task's.
        autoencoder: the task's.
        where: the config path or the request that sets the sizes.
        sizes: frames, height and width of the clip.
    """
    try:
        found = autoencoder.latent_shape(**sizes)
    except ContractError as fault:
        hint = fault.hint or _fitting(predictor, autoencoder, sizes)
        yield ContractError(fault.what, where=where, accepted=fault.accepted, hint=hint)
        return
    shape = returned(Autoencoder.latent_shape, found, autoencoder)
    if isinstance(predictor, SupportsMaxFrames) and shape[1] > predictor.max_frames:
        most = predictor.max_frames
        yield ContractError(
            f"num_frames {sizes['num_frames']} makes {plural(shape[1], 'latent frame')}, but the predictor "
            f"takes {most} at most",
            where=f"{where}.num_frames",
            accepted="1, for a model of images" if most == 1 else None,
        )
    for place, (name, stride) in enumerate(zip(sizes, autoencoder.stride, strict=True)):
        patch = predictor.patch_size[place]
        if shape[1 + place] % patch:
            near = _near(sizes[name], stride * patch, _divides(autoencoder, sizes, place, patch))
            yield ContractError(
                f"{name} {sizes[name]} makes {shape[1 + place]} latents, which do not divide into "
                f"the predictor's patches of {patch}",
                where=f"{where}.{name}",
                accepted=f"{' or '.join(map(str, near))}, for example" if near else None,
            )


def _fitting(predictor: Predictor, autoencoder: Autoencoder, sizes: Mapping[str, int]) -> str | None:
    """A hint with the nearest sizes that the autoencoder takes and that divide into patches, each size judged
    separately; None where there are none, or where each size is valid and only their combination is not."""
    patches = predictor.patch_size
    periods = [s * p for s, p in zip(autoencoder.stride, patches, strict=True)]
    names = list(sizes)
    for frames in (1, periods[0]):  # with valid sizes for the others, each size can be judged by itself
        fitting = dict(zip(names, (frames, *periods[1:]), strict=True))
        tests = [_divides(autoencoder, fitting, place, patch) for place, patch in enumerate(patches)]
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


def _divides(
    autoencoder: Autoencoder, sizes: Mapping[str, int], place: int, patch: int
) -> Callable[[int], bool]:
    def valid(size: int) -> bool:
        try:
            shape = autoencoder.latent_shape(**{**sizes, SIZES[place]: size})
        except ContractError:
            return False
        return shape[1 + place] % patch == 0

    return valid


def _near(size: int, period: int, valid: Callable[[int], bool]) -> list[int]:
    """The nearest valid sizes below and above."""
    size = max(size, 0)
    below = next((s for s in range(size - 1, max(0, size - 2 * period), -1) if valid(s)), None)
    above = next((s for s in range(size + 1, size + 2 * period) if valid(s)), None)
    return [found for found in (below, above) if found is not None]


_NAMES = (("video", "pixels"), ("caption", "captions"))
_CLIP = "`video` [3,F,Y,X] from -1 to 1, and `caption`, or `prompt_ids` and `prompt_mask` [L]"


def clips_of(batch: DictBatch, fields: Sequence[str] = ()) -> VideoTextBatch:
    """A batch of plain dicts as clips: their `video` (or `pixels`) and `caption`, or `prompt_ids` and
    `prompt_mask`, `fps` and further `fields` if they have them.

    Raises:
        ContractError: something is missing, or has another shape.
    """
    values = batch.values
    pixels, captions = (values.get(name, values.get(other)) for name, other in _NAMES)
    ids, mask = (values.get(name) for name in ("prompt_ids", "prompt_mask"))
    if captions is not None:
        if not (isinstance(captions, (list, tuple)) and all(isinstance(text, str) for text in captions)):
            raise ContractError("the `caption` of a sample is not a text", where="data", accepted=_CLIP)
        ids = mask = None
    lacks = [names[0] for names, value in zip(_NAMES, (pixels, captions), strict=True) if value is None]
    if ids is not None and mask is not None and lacks == ["caption"]:
        lacks = []
    if lacks:
        raise ContractError(
            f"the samples have no {' and no '.join(map(repr, lacks))}, only {', '.join(values)}",
            where="data",
            accepted=_CLIP,
            hint=None if ids is None else "return `prompt_mask` too: 1 at tokens, 0 at padding",
        )
    if not isinstance(pixels, Tensor) or pixels.dim() != 5 or pixels.shape[1] != 3:
        shape = [*pixels.shape[1:]] if isinstance(pixels, Tensor) else f"a {type(pixels).__name__}"
        hint = _layout_hint(shape) if isinstance(shape, list) else None
        raise ContractError(f"the video of a sample is {shape}", where="data", accepted=_CLIP, hint=hint)
    fps = values.get("fps")
    return VideoTextBatch(
        batch.keys,
        batch.sample_weights,
        batch.ids,
        pixels=pixels.float() if pixels.is_floating_point() else pixels,
        captions=[""] * len(batch) if captions is None else [*captions],
        text_ids=None if ids is None else ids.flatten(1).long(),
        text_mask=None if mask is None else mask.flatten(1).bool(),
        fps=None if fps is None else fps.float(),
        fields={name: _own_sizes(values[name]) for name in fields if name in values},
    )


def _layout_hint(shape: list[int]) -> str | None:
    """How the clip of a sample becomes [3,F,Y,X]; None where no place has the 3 colours."""
    if len(shape) == 4 and 3 in (shape[1], shape[3]):
        return f"the colours come first: `video.movedim({1 if shape[1] == 3 else 3}, 0)`"
    is_picture = len(shape) == 3 and shape[0] == 3
    return "a picture is a clip of one frame: `picture[:, None]`" if is_picture else None


def _own_sizes(values: Any) -> Any:
    """A field of plain dicts; lists of pictures are of their own size."""
    several = isinstance(values, list) and all(isinstance(own, (list, tuple)) for own in values)
    return Ragged.of_pictures(values) if several else values
