"""Rows of `internvl/conversations` of many kinds, and the hashes of what the dataset makes of them.

usage: golden_rows.py FOLDER: writes golden_rows.json beside this file, from files made in FOLDER.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from mm_internvl.data.conversations import Conversations
from mm_internvl.testing import CHAT_TEMPLATE, make_tiny_checkpoint

from mm_core.builtin.configs.conversations import ConversationSource
from mm_core.contracts import Randomness, SampleKey
from mm_core.data.media.readers import PyAVReader
from mm_core.errors import DataError
from support import conversation_rows as data

FILE = Path(__file__).with_suffix(".json")

THINKING = CHAT_TEMPLATE.replace(
    "{% if message['content'] is string %}{{ message['content'] }}",
    "{% if message['content'] is string %}"
    "{{ message['content'].split('</think>')[-1].lstrip('\n') if not loop.last else message['content'] }}",
)
"""A template that omits all thoughts but the last."""

_SAID = [
    *("what", " is", " the", " colour", " number", "red", "\n", "\n\n", " ", "7", "?", "{{ x }}", "<"),
    *("你好", "e\u0301", "😀", "\u2028", "\r\n", "assistant\n", "a\u0307\u0323", "<box>", "</box>"),
]
_SHOWN = ["<image>\n", "<image> ", "<image><image>\n", "<video>\n", "a <image> b ", " at the end <image>"]


def rows(count: int = 200) -> list[dict[str, Any]]:
    """The same rows on every machine: in both styles, with images, videos, thoughts, systems and answers;
    every eleventh is bad."""
    drawn = random.Random(61)
    made = []
    for number in range(count):
        words = lambda most: "".join(drawn.choice(_SAID) for _ in range(drawn.randrange(1, most)))  # noqa: E731
        turns, row = [], {}
        for _ in range(drawn.choice([1, 1, 2, 3])):
            shown = drawn.choice(["", "", *_SHOWN])
            thought = drawn.choice(["", "", "", f"<think>\n{words(4)}\n</think>\n\n", f"{words(3)}</think>"])
            asked = words(8) + shown if shown.startswith(" at") else shown + words(8)
            turns += [("user", asked), ("assistant", thought + words(drawn.choice([3, 6, 40])))]
        for kind, files in (("image", ["a.png", "b.png", "c.jpg"]), ("video", ["clip.mp4"])):
            if found := sum(text.count(f"<{kind}>") for _, text in turns):
                row[drawn.choice([kind, f"{kind}s"])] = [drawn.choice(files) for _ in range(found)]
        if number % 7 == 3:
            row["system"] = words(4)
        elif number % 7 == 5:
            turns.insert(0, ("system", words(4)))
        if number % 9 == 4:
            row["answers"] = [words(3), "red"]
        if number % 13 == 6:
            turns.pop()
        if number % 11 == 7:
            row["image"] = "none.png"
        made.append(_styled(row, turns, number))
    return made


def _styled(row: dict[str, Any], turns: list[tuple[str, str]], number: int) -> dict[str, Any]:
    if number % 2:
        names = {"user": "human", "assistant": "gpt", "system": "system"}
        return {**row, "conversations": [{"from": names[role], "value": text} for role, text in turns]}
    whole = lambda text: [{"type": "text", "text": text}] if number % 6 == 2 else text  # noqa: E731
    return {**row, "messages": [{"role": role, "content": whole(text)} for role, text in turns]}


DATASETS: dict[str, dict[str, Any]] = {
    "plain": {"max_length": 400},
    "short": {"max_length": 60},
    "shared": {"max_length": 400, "share_tiles": True, "max_tiles": 3, "system": "be brief"},
    "thinking": {"max_length": 400},
    "original": {"max_length": 400},
    "packed": {"max_length": 250, "packing": True},
}


def make(top: Path) -> Path:
    """Writes the rows, their pictures, and folders of models."""
    data.draw(top / "files")
    data.write(top / "files" / "rows.jsonl", rows())
    for name in ("model", "thinking", "original"):
        make_tiny_checkpoint(top / name, original=name == "original")
    (top / "thinking" / "chat_template.jinja").write_text(THINKING)
    return top


def hashes(top: Path, name: str) -> dict[str, Any]:
    """Of one of `DATASETS`: lengths, and hashes of each row as a batch, of batches of three rows, and of the
    rows as questions."""
    folder = top / name if (top / name).is_dir() else top / "model"
    source = (ConversationSource(str(top / "files" / "rows.jsonl")),)
    fields = {"max_tiles": 4, "frames": 3, **DATASETS[name]}
    dataset = Conversations(source, str(folder), **fields)
    asked = {"min_tiles": None, "max_pixels": 10**6, **fields, "processor": str(folder), "sources": source}
    rows, good = [], []
    for seed, epoch in [(0, 0), (3, 1)] if fields.get("packing") else [(0, 0)]:
        for index in range(len(dataset)):
            try:
                sample = dataset.sample_at(index, Randomness(seed).at("data", epoch, index))
            except DataError as fault:
                rows.append(("cut" if "would cut" in fault.what else "bad", None))
                continue
            good.append({**sample, "key": SampleKey(0, index), "weight": 1.0})
            rows.append(_batch(dataset, good[-1:]))
    found: dict[str, Any] = {"rows": " ".join(text for text, _ in rows)}
    found["questions"] = " ".join(_questions(asked, top / "files" / "rows.jsonl"))
    if name in ("plain", "shared"):  # others have the same pictures
        found["pixels"] = [sums for _, sums in rows]
    if name != "short":  # what was a bad row, since its cut is inside an image, is now cut before it
        found["lengths"] = dataset.lengths().tolist()
        size = 1 if fields.get("packing") else 3
        found["batches"] = " ".join(_batch(dataset, good[n : n + size])[0] for n in range(0, len(good), size))
    return found


def _batch(dataset: Conversations, samples: list[dict[str, Any]]) -> tuple[str, list[float] | None]:
    batch = dataset.collate(samples)
    names = [Path(part).name for name in batch.ids for part in name.split(", ")]
    rest = [names, batch.references, batch.sample_weights.tolist()]
    return _hash(batch.inputs, rest), _sums(batch.inputs["pixel_values"])


def _questions(fields: dict[str, Any], file: Path) -> list[str]:
    found = []
    for question in Conversations.conversing(PyAVReader(), **fields).questions(file):
        try:
            made = question()
        except DataError:
            found.append("bad")
            continue
        found.append(_hash(made.inputs, [made.text, list(made.references or ())]))
    return found


def _hash(inputs: Any, rest: object) -> str:
    digest = hashlib.sha256(json.dumps(rest).encode())
    for name in sorted(inputs):
        digest.update(f"{name} {inputs[name].dtype} {tuple(inputs[name].shape)}".encode())
        if name != "pixel_values":  # other processors round otherwise
            digest.update(inputs[name].contiguous().numpy().tobytes())
    return digest.hexdigest()[:4]


def _sums(pixels: torch.Tensor) -> list[float]:
    ramp = torch.linspace(0, 1, pixels.numel(), dtype=torch.float64).view(pixels.shape)
    return [round(float(found), 2) for found in (pixels.double().sum(), (pixels.double() * ramp).sum())]


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: hashes(make(Path(sys.argv[1])), name) for name in DATASETS}) + "\n")
