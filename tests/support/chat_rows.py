"""Conversations about drawn pictures, and how Transformers itself reads them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

COLOURS = ("red", "green", "blue", "yellow", "white", "black")
FORMS = ("circle", "square", "line")
SIZES = ((24, 24), (31, 17), (17, 31), (40, 24), (20, 45), (9, 30), (33, 33), (64, 21))  # width, height
ROLES = {"system": "system", "human": "user", "gpt": "assistant"}
SYSTEM = "You look at pictures and answer with one word."


def make_chat_rows(folder: Path, rows: int = 60, seed: int = 0, scale: int = 1) -> Path:
    """Writes chat.jsonl and its pictures: one to three turns, up to two pictures, none in every fourth row.
    Even rows are in the style `conversations`, odd ones in the style `messages`. Sides of pictures are times
    `scale`."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [_row(folder, number, random.Random(1000 * seed + number), scale) for number in range(rows)]
    file = folder / "chat.jsonl"
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return file


def messages_of(row: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """A row as the library takes it: contents are lists of parts, and pictures are named by their file."""
    if "messages" in row:
        return [
            {**turn, "content": [_located(part, folder) for part in turn["content"]]}
            for turn in row["messages"]
        ]
    images = iter(row.get("image", ()))
    found = []
    for turn in row["conversations"]:
        parts: list[dict[str, Any]] = []
        texts = turn["value"].split("<image>")
        for number, text in enumerate(texts):
            if number:  # in such data sets a line break ends the placeholder, and templates write their own
                parts.append({"type": "image", "path": str(folder / next(images))})
                text = text.removeprefix("\n")
            if number < len(texts) - 1:
                text = text.removesuffix("\n")
            if text:
                parts.append({"type": "text", "text": text})
        found.append({"role": ROLES[turn["from"]], "content": parts})
    return found


def library_processor(folder: Path) -> Any:
    """The processor of a folder as Transformers builds it, without the part for videos, which needs
    torchvision: its class is called with None there, which the library's check of classes refuses."""
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    kind = PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(folder))]

    class ForImages(kind):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, name: str, value: object) -> Any:
            return None if value is None else super().check_argument_for_proper_class(name, value)

    opened = {"image_processor": AutoImageProcessor, "tokenizer": AutoTokenizer}
    parts = [
        opened[name].from_pretrained(folder) if name in opened else None for name in kind.get_attributes()
    ]
    settings, _ = kind.get_processor_dict(folder)
    return ForImages.from_args_and_dict(parts, settings)


def library_inputs(processor: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
    """The tensors of a conversation by the library's `apply_chat_template`, as its base class has it: that of
    SmolVLM asks the part for videos."""
    from transformers import ProcessorMixin

    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", **options}
    return dict(ProcessorMixin.apply_chat_template(processor, list(messages), **options))


def _row(folder: Path, number: int, rng: random.Random, scale: int) -> dict[str, Any]:
    turns, images = rng.randint(1, 3), 0 if number % 4 == 3 else rng.randint(1, 2)
    shown = sorted(rng.randrange(turns) for _ in range(images))
    names = [f"{number:03}_{place}.{rng.choice(('png', 'jpg'))}" for place in range(images)]
    drawn = [_draw(folder / name, rng, scale) for name in names]
    said: list[tuple[list[str], str, str]] = []
    for turn in range(turns):
        here = [place for place, where in enumerate(shown) if where == turn]
        if here:
            colour, form = drawn[here[-1]]
            asked = rng.choice((f"Which colour has the {form}?", "What is in the picture?\nOne word."))
            answer = colour if "colour" in asked else f"a {colour} {form}"
        else:
            one, other = rng.randrange(99), rng.randrange(99)
            asked, answer = f"What is {one} + {other}? 你好", f" {one + other}, I think.\n\nIs it right?"
        said.append(([names[place] for place in here], asked, answer))
    system = SYSTEM if rng.random() < 0.3 else ""
    return _as_messages(said, system, rng) if number % 2 else _as_conversations(said, system, rng)


def _as_conversations(said: Any, system: str, rng: random.Random) -> dict[str, Any]:
    turns = [{"from": "system", "value": system}] if system else []
    for names, asked, answer in said:
        value = asked + " <image>" * len(names) if rng.random() < 0.3 else "<image>\n" * len(names) + asked
        turns += [{"from": "human", "value": value}, {"from": "gpt", "value": answer}]
    images = [name for names, _, _ in said for name in names]
    return {"conversations": turns, **({"image": images} if images else {})}


def _as_messages(said: Any, system: str, rng: random.Random) -> dict[str, Any]:
    turns = [{"role": "system", "content": [{"type": "text", "text": system}]}] if system else []
    for names, asked, answer in said:
        parts: list[dict[str, Any]] = [{"type": "image", "path": name} for name in names]
        parts.insert(rng.randint(0, len(parts)), {"type": "text", "text": asked})
        turns.append({"role": "user", "content": parts})
        turns.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    return {"messages": turns}


def _located(part: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    return {**part, "path": str(folder / part["path"])} if "path" in part else dict(part)


def _draw(file: Path, rng: random.Random, scale: int) -> tuple[str, str]:
    """Draws a form; returns its colour and its name."""
    width, height = (scale * side for side in rng.choice(SIZES))
    ground, colour = rng.sample(COLOURS, 2)
    form = rng.choice(FORMS)
    image = Image.new("RGB", (width, height), ground)
    pen, box = ImageDraw.Draw(image), (2, 2, width - rng.randint(3, 6), height - rng.randint(3, 6))
    {"circle": pen.ellipse, "square": pen.rectangle, "line": pen.line}[form](box, fill=colour)
    image.save(file)
    return colour, form
