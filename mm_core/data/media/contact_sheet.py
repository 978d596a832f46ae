"""Contact sheets: one picture of several clips with their whole prompts, and fonts that have the letters."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    from PIL.ImageFont import FreeTypeFont

SIZE = 14
"""Height of the letters in pixels."""

_FOLDERS = (
    *("/usr/share/fonts", "/usr/local/share/fonts", "~/.fonts", "~/.local/share/fonts"),
    *("/System/Library/Fonts", "/Library/Fonts", "~/Library/Fonts", "C:/Windows/Fonts"),
)
_STYLES = re.compile("bold|italic|oblique|black|light|medium|thin", re.IGNORECASE)
_LEAST, _GAP, _WIDTH = 64, 4, 640  # pixels: least height of a frame, between frames, least width of a row
_NO_FONT = "no font of this machine has {}; fonts-noto-cjk, for example, has Chinese, Japanese and Korean"


def write_contact_sheet(
    clips: Sequence[tuple[numpy.ndarray, str]], path: Path, title: str = "", most_frames: int = 8
) -> Path:
    """Writes a contact sheet of clips: for each its prompt, and below it frames over its length.

    Args:
        clips: frames, uint8 [F,Y,X,3], and prompt of each.
        path: of the sheet, which is returned.
        title: the first line.
        most_frames: maximum number of frames per clip.
    """
    from PIL import Image, ImageDraw

    font, missing = font_for("".join([title, *(prompt for _, prompt in clips)]))
    tiles = [_tiles(frames, most_frames) for frames, _ in clips]
    width = max(_WIDTH, *(sum(tile.width + _GAP for tile in row) for row in tiles))
    head = [line for line in (title, _NO_FONT.format(missing) if missing else "") if line]
    heads = [line for text in head for line in wrapped(text, font, width)]
    texts = [wrapped(f"{n}  {prompt}", font, width) for n, (_, prompt) in enumerate(clips)]
    line = math.ceil(SIZE * 1.4)
    heights = [len(text) * line + row[0].height + 2 * _GAP for text, row in zip(texts, tiles, strict=True)]
    top = len(heads) * line + 2 * _GAP
    sheet = Image.new("RGB", (width + 2 * _GAP, top + sum(heights)), "white")
    draw = ImageDraw.Draw(sheet)
    _write(draw, heads, _GAP, line, font, "#666666")
    for text, row, height in zip(texts, tiles, heights, strict=True):
        _write(draw, text, top, line, font, "black")
        x = _GAP
        for tile in row:
            sheet.paste(tile, (x, top + len(text) * line))
            x += tile.width + _GAP
        top += height
    sheet.save(path)
    return path


def _tiles(frames: numpy.ndarray, most: int) -> list[Any]:
    """Pictures of at most `most` frames, small ones enlarged."""
    from PIL import Image

    count = min(most, len(frames))
    chosen = [round(i * (len(frames) - 1) / max(1, count - 1)) for i in range(count)]
    scale = max(1, math.ceil(_LEAST / frames.shape[1]))
    size = (frames.shape[2] * scale, frames.shape[1] * scale)
    return [Image.fromarray(frames[i]).resize(size, Image.Resampling.NEAREST) for i in chosen]


def _write(draw: Any, lines: Iterable[str], top: int, line: int, font: FreeTypeFont, colour: str) -> None:
    for number, text in enumerate(lines):
        draw.text((_GAP, top + number * line), text, colour, font=font)


def wrapped(text: str, font: FreeTypeFont, width: int) -> list[str]:
    """A text in lines of at most `width` pixels, divided at spaces, and within words that are longer, such as
    those of Chinese and Japanese."""
    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".strip()
        if font.getlength(joined) <= width:
            lines[-1] = joined
            continue
        lines.append(f"{lines.pop()} " if font.getlength(word) > width else "")
        for letter in word:
            if font.getlength(lines[-1] + letter) > width:
                lines.append("")
            lines[-1] += letter
    return [line for line in lines if line] or [""]


def font_for(text: str) -> tuple[FreeTypeFont, str]:
    """The font with most letters of a text, Pillow's own or one of the machine; and those that it lacks."""
    from PIL import ImageFont

    own, letters = ImageFont.load_default(SIZE), {letter for letter in text if not letter.isspace()}
    best: tuple[Any, set[str]] = (own, _lacks(own, letters))
    for file in _fonts() if best[1] else ():
        try:
            font = ImageFont.truetype(file, SIZE)
            missing = _lacks(font, letters)
        except (OSError, ValueError):  # no font that Pillow reads
            continue
        if len(missing) < len(best[1]):
            best = (font, missing)
        if not missing:
            break
    return best[0], ", ".join(f"U+{ord(letter):04X}" for letter in sorted(best[1])[:5])


def _lacks(font: Any, letters: set[str]) -> set[str]:
    """The letters that a font draws as its sign for unknown ones."""
    unknown = bytes(font.getmask("\U0010fffe"))
    return {letter for letter in letters if bytes(font.getmask(letter)) == unknown}


def _fonts() -> Iterator[str]:
    drawn = find_spec("matplotlib")  # its fonts have accents, Greek and Cyrillic
    beside = [] if drawn is None or drawn.origin is None else [f"{Path(drawn.origin).parent}/mpl-data/fonts"]
    for root in (*_FOLDERS, *beside):
        for place, _, names in sorted(os.walk(Path(root).expanduser())):
            for name in sorted(names, key=lambda name: (bool(_STYLES.search(name)), name)):
                own = "lastresort" not in name.lower()  # has a sign for every letter, and no letter
                if own and name.lower().endswith((".ttf", ".ttc", ".otf")):
                    yield os.path.join(place, name)  # noqa: PTH118
