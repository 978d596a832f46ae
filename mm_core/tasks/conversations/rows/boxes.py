"""Boxes and points on images: from a row's pixels to the numbers that a model writes, and back.

Rows hold them beside their turns, in pixels of the image file, and `<bbox>` marks their places in the texts,
as for ms-swift (https://swift.readthedocs.io: custom data sets, grounding):
{"objects": {"ref": ["a cat"], "bbox": [[10, 20, 60, 80]]}}. A point has two numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mm_core.tasks.conversations.rows.turns import NOTHING, RowFault, RowTurn

Numbers = Literal["pixels", "relative_1000"]
Size = tuple[int, int]

MARK, REFERENCE = "<bbox>", "<ref-object>"
_ACCEPTED = '{"bbox": [[x1, y1, x2, y2], [x, y], ..], "ref": ["name", ..], "image_id": [0, ..]}'
_WRITTEN = re.compile(r"[\[(]\s*(\d+)\s*,\s*(\d+)(?:\s*\)?\s*,\s*\(?\s*(\d+)\s*,\s*(\d+))?\s*[\])]")


@dataclass(frozen=True)
class Box:
    """A box or point of a row.

    Attributes:
        image: number of its image in the row.
        numbers: x1, y1, x2, y2 or x, y in pixels of the image file.
    """

    image: int
    numbers: tuple[float, ...]


def read_boxes(
    given: object, turns: Sequence[RowTurn], images: int
) -> tuple[tuple[RowTurn, ...], tuple[Box, ...]]:
    """The turns of a row with the names of its objects, and their boxes. RowFault if they do not match."""
    marks = sum(text.count(MARK) for turn in turns for text in turn.texts)
    if given in NOTHING:
        if marks:
            raise RowFault(f"the texts have {marks} {MARK}, but the row has no `objects`", _ACCEPTED)
        return tuple(turns), ()
    if not isinstance(given, Mapping):
        raise RowFault("`objects` of the row is no object", _ACCEPTED)
    numbers, names, of_images = (given.get(name) or [] for name in ("bbox", "ref", "image_id"))
    if not all(isinstance(each, list) for each in (numbers, names, of_images)):
        raise RowFault("`objects` of the row has fields that are no lists", _ACCEPTED)
    of_images = of_images or [0] * len(numbers)
    if len(numbers) != marks or len(of_images) != len(numbers):
        raise RowFault(f"the texts have {marks} {MARK}, but `objects` has {len(numbers)} boxes", _ACCEPTED)
    for each, image in zip(numbers, of_images, strict=True):
        if not isinstance(each, list) or len(each) not in (2, 4) or not all(map(_is_pixel, each)):
            raise RowFault(f"the box {each!r} has neither four numbers nor two", _ACCEPTED)
        if not isinstance(image, int) or not 0 <= image < images:
            raise RowFault(f"a box is on image {image}, but the row has {images}", _ACCEPTED)
    if not all(isinstance(name, str) for name in names):
        raise RowFault("`ref` of `objects` has names that are no texts", _ACCEPTED)
    found = iter(names)
    if sum(text.count(REFERENCE) for turn in turns for text in turn.texts) != len(names):
        raise RowFault(f"the texts and `objects` have different numbers of names ({REFERENCE})", _ACCEPTED)
    named = tuple(_changed(turn, REFERENCE, found) for turn in turns)
    return named, tuple(Box(i, tuple(n)) for n, i in zip(numbers, of_images, strict=True))


def _is_pixel(number: object) -> bool:
    return isinstance(number, int | float) and abs(number) < 1e9  # neither NaN nor infinite


def with_boxes(
    turns: Sequence[RowTurn],
    boxes: Sequence[Box],
    files: Sequence[Size],
    seen: Sequence[Size],
    written: Numbers,
) -> tuple[RowTurn, ...]:
    """The turns with the numbers that the model writes for boxes.

    Args:
        turns: with marks.
        boxes: in order.
        files: height and width of each image file.
        seen: height and width at which the model sees it.
        written: as the model writes numbers.
    """
    texts = iter(
        str(
            [
                _scaled(n, axis, files[box.image], seen[box.image], written)
                for axis, n in enumerate(box.numbers)
            ]
        )
        for box in boxes
    )
    return tuple(_changed(turn, MARK, texts) for turn in turns)


def _scaled(number: float, axis: int, file: Size, seen: Size, written: Numbers) -> int:
    side = 1 - axis % 2  # x is of the width
    most = seen[side] if written == "pixels" else 1000
    return min(max(round(number / file[side] * most), 0), most)


def boxes_in(text: str, file: Size, seen: Size, written: Numbers) -> list[tuple[float, ...]]:
    """The boxes and points in an answer, in pixels of the image file.

    Args:
        text: the answer.
        file: height and width of the image file.
        seen: height and width at which the model saw it.
        written: as the model writes numbers.
    """
    most = seen if written == "pixels" else (1000, 1000)
    return [
        tuple(int(n) / most[1 - axis % 2] * file[1 - axis % 2] for axis, n in enumerate(found))
        for match in _WRITTEN.finditer(text)
        for found in [[n for n in match.groups() if n is not None]]
    ]


def _changed(turn: RowTurn, mark: str, put: Iterator[Any]) -> RowTurn:
    def filled(text: str) -> str:
        return re.sub(re.escape(mark), lambda _: str(next(put)), text)

    if isinstance(turn.content, str):
        return replace(turn, content=filled(turn.content))
    parts = tuple({**p, "text": filled(p["text"])} if p["type"] == "text" else p for p in turn.content)
    return replace(turn, content=parts)
