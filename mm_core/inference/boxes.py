"""Boxes and points of answers, drawn on their images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from mm_core.data.media.images import read_image


def draw_boxes(image: Path, boxes: Sequence[tuple[float, ...]], out: Path) -> None:
    """Writes a copy of an image with boxes and points in red.

    Args:
        image: the file.
        boxes: x1, y1, x2, y2 or x, y in its pixels.
        out: a PNG.

    Raises:
        DataError: the image cannot be read.
    """
    drawn = Image.fromarray(read_image(image).permute(1, 2, 0).numpy())
    pen, width = ImageDraw.Draw(drawn), max(1, max(drawn.size) // 200)
    for box in boxes:
        if len(box) == 2:
            pen.ellipse([n + d for d in (-2 * width, 2 * width) for n in box], fill="red")
        else:
            x, y = sorted(box[::2]), sorted(box[1::2])
            pen.rectangle([x[0], y[0], x[1], y[1]], outline="red", width=width)
    drawn.save(out)
