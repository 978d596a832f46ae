"""Trains a tiny vision-language model from scratch to name the colour of a figure and its box, packed, on two
ranks.

    python benchmarks/chat_boxes.py [--steps 700] [--seed 1234]

Needs the extra `dev` and the plugin mm-internvl, for the tiny model. The script draws the pictures: a square
or circle on noise. Of the triples of colour, column and row, a fifth is held out. The score is the share of
held-out pictures whose colour is answered exactly, and of those whose box has an intersection over union of
at least one half with the drawn one, from `mm eval`.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from internvl_digits import SIDE, _in_small_tiles, call, shards
from mm_internvl.testing import make_tiny_checkpoint
from PIL import Image, ImageDraw

from mm_core.tasks.conversations.rows.boxes import boxes_in

COLOURS = ("red", "green", "blue", "yellow", "white")
GRID, SIZES = 4, (8, 12, 16)
SHARE, MINUTES, IMAGES, UNSEEN = 0.9, 8.0, 6000, 200


def main() -> int:
    parser = argparse.ArgumentParser(description="train a tiny vision-language model to find a figure")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        shares, minutes = find_figures(Path(name), args.steps, args.seed)
    results = [
        *(
            (f"chat_boxes_{key}", f"{value:.3f}", f">={SHARE}", value >= SHARE)
            for key, value in shares.items()
        ),
        ("chat_boxes_processor_minutes", f"{minutes:.1f}", f"<={MINUTES}", minutes <= MINUTES),
    ]
    for result, value, bar, good in results:
        print(f"RESULT {result} {value} {bar} {'ok' if good else 'short'}")
    return 0 if all(good for *_, good in results) else 1


def find_figures(folder: Path, steps: int, seed: int) -> tuple[dict[str, float], float]:
    """The share of held-out pictures with the right colour, and with the right box; processor minutes."""
    _in_small_tiles(make_tiny_checkpoint(folder / "model"))
    draw_rows(folder / "train", IMAGES, seed=0, held_out=False)
    draw_rows(folder / "unseen", UNSEEN, seed=1, held_out=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(config_of(folder, steps, seed)), encoding="utf-8")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    call("train", "--config", folder / "run.yaml", "--nproc", 2)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    minutes = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 60
    call("eval", "--run", folder / "runs/boxes", "--predictions", folder / "found.jsonl")
    rows = [json.loads(line) for line in (folder / "found.jsonl").read_text().splitlines()]
    right: dict[str, list[bool]] = {"colour": [], "box": []}
    for row in rows:
        text, (wanted,) = row["text"], row["references"]
        if wanted in COLOURS:
            right["colour"].append(text == wanted)
        else:
            size = (1000, 1000)
            found, box = (
                boxes_in(text, size, size, "relative_1000"),
                boxes_in(wanted, size, size, "relative_1000"),
            )
            right["box"].append(len(found) == 1 and overlap(found[0], box[0]) >= 0.5)
    return {key: sum(values) / len(values) for key, values in right.items()}, minutes


def overlap(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Intersection over union of two boxes."""
    if len(one) != 4:
        return 0.0
    sides = [max(0.0, min(one[n + 2], other[n + 2]) - max(one[n], other[n])) for n in (0, 1)]
    areas = [abs((box[2] - box[0]) * (box[3] - box[1])) for box in (one, other)]
    both = sides[0] * sides[1]
    return both / max(sum(areas) - both, 1e-9)


def is_held_out(colour: int, x: int, y: int) -> bool:
    return (3 * colour + x + 2 * y) % 5 == 0


def draw_rows(folder: Path, count: int, seed: int, held_out: bool) -> None:
    """Writes `rows.jsonl` with pictures, and the questions which colour a figure has and where it is: in two
    turns of a row; held out, also the first alone."""
    folder.mkdir(parents=True)
    draw, noise, rows = random.Random(seed), np.random.default_rng(seed), []
    while len(rows) < count * (1 + held_out):
        size, colour = draw.choice(SIZES), draw.randrange(len(COLOURS))
        x, y = (draw.randrange((SIDE - size) // GRID + 1) for _ in range(2))
        if is_held_out(colour, x, y) != held_out:
            continue
        box = [GRID * x, GRID * y, GRID * x + size, GRID * y + size]
        name = f"{len(rows)}.png"
        picture(COLOURS[colour], box, draw.random() < 0.5, noise).save(folder / name, compress_level=1)
        turns = [("<image>which colour?", COLOURS[colour]), ("where?", "<bbox>")]
        for asked in [turns[:1], turns] if held_out else [turns]:
            messages = [
                {"role": r, "content": t}
                for turn in asked
                for r, t in zip(("user", "assistant"), turn, strict=True)
            ]
            boxes = {"objects": {"bbox": [box]}} if asked[-1][1] == "<bbox>" else {}
            rows.append(json.dumps({"messages": messages, "images": [name], **boxes}) + "\n")
    (folder / "rows.jsonl").write_text("".join(rows), encoding="utf-8")


def picture(colour: str, box: list[int], round_: bool, noise: np.random.Generator) -> Image.Image:
    """A figure in a box, on dark noise."""
    made = Image.fromarray(noise.integers(0, 60, (SIDE, SIDE, 3), dtype=np.uint8))
    pen, corners = ImageDraw.Draw(made), [box[0], box[1], box[2] - 1, box[3] - 1]
    (pen.ellipse if round_ else pen.rectangle)(corners, fill=colour)
    return made


def config_of(folder: Path, steps: int, seed: int) -> dict[str, Any]:
    """Config of the run: packed rows, random initial weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
    vision = {**sizes, "image_size": [SIDE, SIDE], "patch_size": [7, 7], "layer_scale_init_value": 1.0}
    data = {"type": "conversations", "boxes": "relative_1000", "max_length": 640}
    return {
        "run": {"name": "boxes", "dir": str(folder / "runs"), "seed": seed},
        "task": {
            "type": "pretrained",
            "from_pretrained": str(folder / "model"),
            "auto_class": "AutoModelForImageTextToText",
            "attn_implementation": "packed_sdpa",
            "weights": "random",
            "overrides": {"vision_config": vision, "text_config": sizes},
            "max_new_tokens": 32,
        },
        "data": {
            "train": {
                **data,
                "packing": True,
                "sources": [{"annotations": str(folder / "train/rows.jsonl")}],
            },
            "validation": {**data, "sources": [{"annotations": str(folder / "unseen/rows.jsonl")}]},
            "loader": {"workers": 1},
        },
        "engine": {"type": "fsdp2", "sharding_size": shards()},
        "optimizer": {"type": "adamw", "lr": 3e-3, "weight_decay": 0.01},
        "lr_schedule": {"type": "cosine", "warmup_steps": 50},
        "train": {"steps": steps, "micro_batch_size": 1, "global_batch_size": 6, "clip_grad_norm": 1.0},
        "validation": {"every": 10**6},
        "checkpoint": {"every": 10**6},
        "log": {"every": 50, "trackers": []},
    }


if __name__ == "__main__":
    raise SystemExit(main())
