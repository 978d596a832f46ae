"""Conversations about drawn pictures, in both styles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image


def draw(folder: Path) -> None:
    """a.png 100x60, b.png 60x60, c.jpg 40x120, clip.mp4 of 12 frames that grow lighter."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for name, (width, height) in {"a.png": (100, 60), "b.png": (60, 60), "c.jpg": (40, 120)}.items():
        Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / name)
    with av.open(str(folder / "clip.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=12)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for index in range(12):
            image = np.full((48, 64, 3), 20 * index, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def asked(*said: str, **more: Any) -> dict[str, Any]:
    """A row of `conversations`: the user and the assistant by turns."""
    names = ("human", "gpt")
    return {"conversations": [{"from": names[n % 2], "value": text} for n, text in enumerate(said)], **more}


ROWS = [
    asked("what is red?", "a colour"),
    asked("<image>\nwhat is this?", "a picture", image="a.png"),
    asked(
        "<image><image> which is blue?",
        "the image",
        "and this <image>?",
        "red",
        image=["b.png", "c.jpg", "a.png"],
    ),
    asked("<video>\nwhat is in it?", "a circle and a square", video="clip.mp4"),
    {
        "messages": [
            {"role": "system", "content": "the system"},
            {
                "role": "user",
                "content": [{"type": "image", "path": "b.png"}, {"type": "text", "text": "what?"}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "green"}]},
        ]
    },
    asked("what number?", "7", "and this?", "the number 12"),
]


def write(file: Path, rows: list[Any]) -> Path:
    """JSONL. Text stays as it is: a row that is no JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file
