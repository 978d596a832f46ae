"""Further inputs of the clips to sample (see `mm_core.contracts.Input`): files and numbers by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from mm_core.data.media.frames import clip_times, read_frames
from mm_core.data.media.image_headers import holds_clip
from mm_core.data.media.images import read_image
from mm_core.data.media.limits import decoding
from mm_core.data.media.readers import PyAVReader
from mm_core.data.rows.media_rows import medium_of
from mm_core.data.rows.prompts import Prompt
from mm_core.errors import MMError, plural

_SETTING = "--num-frames (validation.samples: task.sample.num_frames)"

Value = str | Path | float | Sequence[str | Path]


def with_inputs(prompts: Sequence[Prompt], given: Mapping[str, Sequence[Value]]) -> list[Prompt]:
    """Adds fields of the model's inputs to prompts: one value for all of them, or one for each.

    Args:
        prompts: the prompts; those with an own value keep it.
        given: by field, files of pictures and clips, lists of pictures, or numbers, also as texts.

    Raises:
        MMError: the number of values is neither one nor that of the prompts.
    """
    found = list(prompts)
    for name, values in given.items():
        if len(values) not in (1, len(found)):
            raise MMError(
                f"the request contains {plural(len(found), 'prompt')}, but {plural(len(values), 'value')} of"
                f" the input `{name}`",
                accepted=f"one value for all prompts{f', or {len(found)}' if len(found) > 1 else ''}",
            )
        column = [*values] * (len(found) if len(values) == 1 else 1)
        found = [
            replace(prompt, inputs={name: _number_or_path(value), **prompt.inputs})
            for prompt, value in zip(found, column, strict=True)
        ]
    return found


def _number_or_path(value: Value) -> Path | float | tuple[Path, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(Path(one) for one in value)
    try:
        return float(value) if not isinstance(value, Path) else value
    except ValueError:
        return Path(str(value))


def read_inputs(
    prompts: Sequence[Prompt], num_frames: int, fps: float | None
) -> dict[str, tuple[Tensor | float | tuple[Tensor, ...], ...]]:
    """Reads the inputs of prompts, in the form of `SampleRequest.inputs`.

    Args:
        prompts: one without a field that others have gets none, ().
        num_frames: frames that are read of a clip, from its beginning.
        fps: of these frames; None: the clip's own.

    Raises:
        DataError: a file is no picture or clip, or too short.
    """
    names = {name for prompt in prompts for name in prompt.inputs}
    read: dict[Path, Tensor] = {}
    for prompt in prompts:
        for value in prompt.inputs.values():
            for path in value if isinstance(value, tuple) else (value,):
                if isinstance(path, Path) and path not in read:
                    read[path] = _picture_or_clip(path, num_frames, fps)

    def found(value: Path | float | tuple[Path, ...]) -> Tensor | float | tuple[Tensor, ...]:
        if isinstance(value, tuple):
            return tuple(read[path] for path in value)
        return read[value] if isinstance(value, Path) else value

    return {name: tuple(found(prompt.inputs.get(name, ())) for prompt in prompts) for name in sorted(names)}


def _picture_or_clip(path: Path, num_frames: int, fps: float | None) -> Tensor:
    """uint8 [3,Y,X] of a picture, or [3,F,Y,X] of a clip."""
    if medium_of(path.name) == "image" and not (path.exists() and holds_clip(path)):
        return read_image(path)
    reader = PyAVReader()
    with decoding(str(path)):
        times = clip_times(reader.probe(path), path, num_frames, fps, 0.0, _SETTING)
        return read_frames(reader, path, times).permute(3, 0, 1, 2)
