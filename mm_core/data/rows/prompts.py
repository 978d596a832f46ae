"""Prompts from the shell and from files: texts, and the images a clip starts or ends with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from mm_core.data.media.images import read_image
from mm_core.data.rows.json_rows import RowFile
from mm_core.errors import DataError, MMError, plural


@dataclass(frozen=True)
class Prompt:
    """The prompt of one clip: its text, its first and last frame, and further inputs of the model.

    Attributes:
        text: description of the clip.
        image: file of the first frame.
        last_image: file of the last frame.
        inputs: by the name of a field, a file of a picture or clip, several pictures, or a number.
    """

    text: str
    image: Path | None = None
    last_image: Path | None = None
    inputs: Mapping[str, Path | float | tuple[Path, ...]] = field(default_factory=dict)


def read_prompts(path: Path) -> list[Prompt]:
    """Reads prompts from a file: a JSON list or JSONL of texts or objects, or one prompt per line.

    Objects contain `prompt` or `cap` and, for image-to-video, `image` and `last_image`: paths relative to the
    file. `inputs` has further fields of the model's inputs by name: paths, lists of them, or numbers.

    Raises:
        DataError: the file contains no prompt, or cannot be read.
    """
    hint = "fix the file, or give it the ending .txt if each line is a prompt"
    file = RowFile(path, "file of prompts", "one prompt per line, a JSON list, or JSONL", lambda line: hint)
    if path.suffix in (".json", ".jsonl"):
        prompts = [_prompt_of(row, path) for _, row in file.json_values()]
    else:
        with file.opened() as lines:
            prompts = [Prompt(line.strip()) for line in lines if line.strip()]
    if not prompts:
        raise file.empty()
    return prompts


def _prompt_of(row: object, path: Path) -> Prompt:
    if isinstance(row, DataError):
        raise row
    if isinstance(row, str):
        return Prompt(row)
    if isinstance(row, dict):
        for key in ("prompt", "cap"):
            if isinstance(row.get(key), str):
                frames = _file(row, "image", path), _file(row, "last_image", path)
                return Prompt(str(row[key]), *frames, _inputs(row, path))
    raise DataError(
        f"a row is not a prompt: {row!r}"[:200],
        where=str(path),
        accepted="texts, or objects with 'prompt' or 'cap'",
    )


def _inputs(row: Mapping[str, object], path: Path) -> dict[str, Path | float | tuple[Path, ...]]:
    found = row.get("inputs", {})
    if not isinstance(found, dict):
        raise DataError(f"inputs is {found!r}"[:200], where=str(path), accepted='{"control": "depth.mp4"}')
    read: dict[str, Path | float | tuple[Path, ...]] = {}
    for name, value in found.items():
        if isinstance(value, list):
            files = (_file({name: one}, name, path) for one in value)
            read[name] = tuple(file for file in files if file is not None)
        elif type(value) in (int, float):
            read[name] = float(value)
        elif (file := _file(found, name, path)) is not None:
            read[name] = file
    return read


def _file(row: Mapping[str, object], key: str, path: Path) -> Path | None:
    """A path in a row, relative to the file of the rows."""
    name = row.get(key)
    if name is None:
        return None
    if not isinstance(name, str) or not name:
        raise DataError(
            f"{key} is {name!r}",
            where=str(path),
            accepted="the path of an image, relative to this file",
            hint=f"correct the row, or leave {key} out of it",
        )
    return path.parent / name


def with_images(
    prompts: Sequence[Prompt], images: Sequence[str | Path], last_images: Sequence[str | Path]
) -> list[Prompt]:
    """Adds images to prompts: one image for all prompts without an own one, or one image for each prompt.

    Args:
        prompts: the prompts.
        images: files of first frames.
        last_images: files of last frames.

    Raises:
        MMError: the number of images is neither one nor that of the prompts.
    """
    firsts = _one_each([prompt.image for prompt in prompts], images, "image")
    lasts = _one_each([prompt.last_image for prompt in prompts], last_images, "last image")
    rows = zip(prompts, firsts, lasts, strict=True)
    return [replace(prompt, image=first, last_image=last) for prompt, first, last in rows]


def _one_each(own: Sequence[Path | None], files: Sequence[str | Path], what: str) -> list[Path | None]:
    if len(files) not in (0, 1, len(own)):
        raise MMError(
            f"the request contains {plural(len(own), 'prompt')}, but {plural(len(files), what)}",
            accepted=f"one {what} for all prompts{f', or {len(own)}' if len(own) > 1 else ''}",
        )
    if len(files) == len(own):
        return [Path(file) for file in files]
    return [Path(files[0]) if path is None and files else path for path in own]


def read_images(prompts: Sequence[Prompt]) -> tuple[tuple[Tensor, ...], ...]:
    """Reads the images of prompts, in the form of `SampleRequest.images`; () if no prompt has an image.

    Raises:
        DataError: a file is not a readable image, or a prompt has a last frame without a first one.
    """
    read: dict[Path, Tensor] = {}
    rows = []
    for prompt in prompts:
        if prompt.last_image is not None and prompt.image is None:
            raise DataError(
                "a prompt has an image of the last frame, but none of the first",
                where=str(prompt.last_image),
                accepted="an image of the first frame as well",
                hint="add --image, or `image` in the row",
            )
        files = [file for file in (prompt.image, prompt.last_image) if file is not None]
        for file in files:
            if file not in read:
                read[file] = read_image(file)
        rows.append(tuple(read[file] for file in files))
    return tuple(rows) if any(rows) else ()
