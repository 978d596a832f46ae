"""Trains a tiny InternVL from scratch to read one rendered digit, on two ranks.

    python benchmarks/internvl_digits.py [--steps 1200] [--images 16000] [--nproc 2]

Needs the extra `dev` and the plugin mm-internvl. The script draws the pictures: a digit of varied size,
place and shade, with noise. The score is the share of exact answers to pictures outside the training data,
from `mm eval`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import yaml
from mm_internvl.testing import make_tiny_checkpoint
from PIL import Image, ImageDraw, ImageFont

from mm_core.errors import PlanError
from mm_core.parallel.gloo_averaging import check_replicas

SIDE, UNSEEN = 28, 500
ACCURACY, SECONDS = 0.95, 180


def main() -> int:
    parser = argparse.ArgumentParser(description="train a tiny InternVL to read digits")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--images", type=int, default=16000, help="number of training pictures")
    parser.add_argument("--nproc", type=int, default=2, help="number of ranks for training")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        accuracy, seconds = read_digits(Path(name), args.steps, args.images, args.nproc)
    results = [
        ("internvl_digits_exact_match", f"{accuracy:.4f}", f">={ACCURACY}", accuracy >= ACCURACY),
        ("internvl_digits_seconds", f"{seconds:.0f}", f"<{SECONDS}", seconds < SECONDS),
    ]
    for result, value, bar, good in results:
        print(f"RESULT {result} {value} {bar} {'ok' if good else 'short'}")
    return 0 if all(good for *_, good in results) else 1


def read_digits(folder: Path, steps: int, images: int, nproc: int) -> tuple[float, float]:
    """Trains a tiny InternVL on digits; returns the share of unseen pictures read exactly and mm train's
    seconds."""
    model = make_tiny_checkpoint(folder / "model")
    _in_small_tiles(model)
    draw_rows(folder / "train", images, seed=0)
    draw_rows(folder / "unseen", UNSEEN, seed=1)
    (folder / "digits.yaml").write_text(yaml.safe_dump(config_of(folder, steps)), encoding="utf-8")
    began = perf_counter()
    call("train", "--config", folder / "digits.yaml", "--nproc", nproc)
    seconds = perf_counter() - began
    out = call("eval", "--run", folder / "runs/digits", "--json")
    return float(json.loads(out)["metrics"]["exact_match"]), seconds


def draw_rows(folder: Path, count: int, seed: int) -> None:
    """Writes `rows.jsonl` with pictures of digits, and the question which digit each shows."""
    folder.mkdir(parents=True)
    draw, rows = np.random.default_rng(seed), []
    fonts = {size: ImageFont.load_default(size) for size in range(18, 27)}
    for number in range(count):
        digit = str(draw.integers(10))
        picture(digit, draw, fonts).save(folder / f"{number}.png", compress_level=1)
        asked = {"from": "human", "value": "<image>\nwhich digit?"}
        answered = {"from": "gpt", "value": digit}
        rows.append(json.dumps({"image": f"{number}.png", "conversations": [asked, answered]}) + "\n")
    (folder / "rows.jsonl").write_text("".join(rows), encoding="utf-8")


def picture(digit: str, draw: np.random.Generator, fonts: dict[int, Any]) -> Image.Image:
    """Draws a digit, light on dark, with random font size, place, shades and noise."""
    font = fonts[int(draw.choice(list(fonts)))]
    found = Image.new("L", (SIDE, SIDE), int(draw.integers(0, 60)))
    ink = ImageDraw.Draw(found)
    left, top, right, bottom = ink.textbbox((0, 0), digit, font=font)
    x, y = draw.integers(0, SIDE - (right - left) + 1), draw.integers(0, SIDE - (bottom - top) + 1)
    ink.text((x - left, y - top), digit, fill=int(draw.integers(150, 256)), font=font)
    noisy = np.asarray(found, dtype=np.float64) + draw.normal(0, 10, (SIDE, SIDE))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).convert("RGB")


def _in_small_tiles(model: Path) -> None:
    """Sets tiles of 28 pixels with 4 x 4 patches of 7: the smallest size at which digits are legible."""
    file = model / "preprocessor_config.json"
    known = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**known, "size": {"height": SIDE, "width": SIDE}}), encoding="utf-8")


def config_of(folder: Path, steps: int) -> dict[str, Any]:
    """Config of the run: 64 pictures per step, random initial weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
    vision = {**sizes, "image_size": [SIDE, SIDE], "patch_size": [7, 7], "layer_scale_init_value": 1.0}
    data = {"type": "internvl/conversations", "processor": str(folder / "model"), "max_length": 64}
    data |= {"max_tiles": 1}
    return {
        "run": {"name": "digits", "dir": str(folder / "runs")},
        "task": {
            "type": "pretrained",
            "from_pretrained": str(folder / "model"),
            "auto_class": "mm_internvl.model:InternVLForConditionalGeneration",
            "weights": "random",
            "overrides": {"vision_config": vision, "text_config": sizes},
            "max_new_tokens": 4,
        },
        "data": {
            "train": {**data, "sources": [{"annotations": str(folder / "train/rows.jsonl")}]},
            "validation": {**data, "sources": [{"annotations": str(folder / "unseen/rows.jsonl")}]},
            "loader": {"workers": 1},
        },
        "engine": {"type": "fsdp2", "sharding_size": shards()},
        "optimizer": {"type": "adamw", "lr": 2e-3, "weight_decay": 0.01},
        "lr_schedule": {"type": "cosine", "warmup_steps": 50},
        "train": {"steps": steps, "micro_batch_size": 32, "global_batch_size": 64, "clip_grad_norm": 1.0},
        "validation": {"every": 10**6, "metrics": [{"type": "exact_match"}]},
        "checkpoint": {"every": 10**6},
        "log": {"every": 50, "trackers": []},
    }


def shards() -> int | str:
    """Value of sharding_size: no sharding, the fastest for so few weights, if this torch supports it on a
    CPU."""
    try:
        check_replicas(torch.device("cpu"), 2)
    except PlanError:
        return "auto"
    return 1


def call(*words: object) -> str:
    """Runs a command of mm and returns its output. On failure, prints the complete output."""
    command = [sys.executable, "-m", "mm_core.cli.main", *map(str, words)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n")
    done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
