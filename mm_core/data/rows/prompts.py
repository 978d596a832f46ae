"""What is to be generated, from the shell and from files: texts, and the images that clips are given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from mm_core.data.media.images import read_image
from mm_core.errors import DataError, MMError


@dataclass(frozen=True)
class Prompt:
    """One clip. text: what it shows. image, last_image: files of its first and its last frame."""

    text: str
    image: Path | None = None
    last_image: Path | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from a JSON list (texts, or objects with `prompt` or `cap` and, for image-to-video, `image`
    and `last_image`, files beside this one), JSONL, or one a line. DataError for a file that holds none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the prompts cannot be read: {error}", where=str(path)) from None
    if path.suffix in (".json", ".jsonl"):
        try:
            lines = [line for line in text.splitlines() if line.strip()]
            rows = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in lines]
        except ValueError as error:
            raise DataError(f"this is not JSON: {error}", where=str(path)) from None
        prompts = [_prompt_of(row, path) for row in (rows if isinstance(rows, list) else [rows])]
    else:
        prompts = [Prompt(line.strip()) for line in text.splitlines() if line.strip()]
    if not prompts:
        raise DataError("the file holds no prompt", where=str(path), accepted="one prompt a line, or JSON")
    return prompts


def _prompt_of(row: object, path: Path) -> Prompt:
    if isinstance(row, str):
        return Prompt(row)
    if isinstance(row, dict):
        for key in ("prompt", "cap"):
            if isinstance(row.get(key), str):
                return Prompt(str(row[key]), _file(row, "image", path), _file(row, "last_image", path))
    raise DataError(
        f"a row is no prompt: {row!r}"[:200],
        where=str(path),
        accepted="texts, or objects with 'prompt' or 'cap'",
    )


def _file(row: Mapping[str, object], key: str, path: Path) -> Path | None:
    """A file that a row names, as seen from the file of the rows."""
    name = row.get(key)
    if name is None:
        return None
    if not isinstance(name, str) or not name:
        raise DataError(f"{key} is {name!r}", where=str(path), accepted="the path of an image")
    return path.parent / name


def with_images(
    prompts: Sequence[Prompt], images: Sequence[str | Path], last_images: Sequence[str | Path]
) -> list[Prompt]:
    """The prompts with these images: one for all that have none of their own, or one for each prompt.
    MMError for any other number."""
    firsts = _one_each([prompt.image for prompt in prompts], images, "image")
    lasts = _one_each([prompt.last_image for prompt in prompts], last_images, "last image")
    rows = zip(prompts, firsts, lasts, strict=True)
    return [replace(prompt, image=first, last_image=last) for prompt, first, last in rows]


def _one_each(own: Sequence[Path | None], files: Sequence[str | Path], what: str) -> list[Path | None]:
    if len(files) not in (0, 1, len(own)):
        raise MMError(
            f"there are {len(own)} prompt{'s' * (len(own) != 1)} and {len(files)} {what}s",
            accepted=f"one {what} for all{f', or {len(own)}' if len(own) > 1 else ''}",
        )
    if len(files) == len(own):
        return [Path(file) for file in files]
    return [Path(files[0]) if path is None and files else path for path in own]


def read_images(prompts: Sequence[Prompt]) -> tuple[tuple[Tensor, ...], ...]:
    """The images of each prompt, as `SampleRequest.images` takes them; () where no prompt has any.
    DataError for a file that is no readable image, or a last frame without a first."""
    read: dict[Path, Tensor] = {}
    rows = []
    for prompt in prompts:
        if prompt.last_image is not None and prompt.image is None:
            raise DataError(
                "a last frame is given without a first one",
                where=str(prompt.last_image),
                accepted="an image of the first frame as well",
            )
        files = [file for file in (prompt.image, prompt.last_image) if file is not None]
        for file in files:
            if file not in read:
                read[file] = read_image(file)
        rows.append(tuple(read[file] for file in files))
    return tuple(rows) if any(rows) else ()
