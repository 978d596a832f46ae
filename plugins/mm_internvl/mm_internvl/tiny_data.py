"""Conversations about drawn digits: training data for a tiny InternVL, generated without a download."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from mm_core.contracts import Randomness

SIDE = 56


def make_tiny_conversations(folder: str | Path, *, rows: int = 40, seed: int = 0) -> Path:
    """Writes conversations about drawn digits: each shows a picture of a digit and asks which one it is.
    Every tenth row has no picture.

    Args:
        folder: output folder for `conversations.jsonl` and its pictures.
        rows: number of rows.
        seed: seed for digits, places and shades.

    Returns:
        Path of `conversations.jsonl`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, object]] = []
    for row in range(rows):
        drawn = [Randomness(seed).uniform("digits", row, number) for number in range(5)]
        digit = str(int(drawn[0] * 10))
        if row % 10 == 9:
            lines.append(_asked(f"what number is {digit}?", digit))
        else:
            _draw(digit, drawn[1:]).save(folder / f"{row:04}.png")
            lines.append({"image": f"{row:04}.png", **_asked("<image>\nwhich digit?", digit)})
    file = folder / "conversations.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def _asked(question: str, answer: str) -> dict[str, object]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


def _draw(digit: str, drawn: list[float]) -> Image.Image:
    """Draws a digit, light on dark.

    Args:
        digit: the digit.
        drawn: two coordinates, a shade and a size, each in [0, 1).
    """
    ink = Image.new("L", (8, 12), 20)
    ImageDraw.Draw(ink).text((1, 0), digit, fill=160 + int(95 * drawn[2]), font=ImageFont.load_default())
    scale = 2 + drawn[3]
    ink = ink.resize((int(8 * scale), int(12 * scale)), Image.Resampling.BILINEAR)
    found = Image.new("L", (SIDE, SIDE), 20)
    found.paste(ink, (int(drawn[0] * (SIDE - ink.width)), int(drawn[1] * (SIDE - ink.height))))
    return found.convert("RGB")
