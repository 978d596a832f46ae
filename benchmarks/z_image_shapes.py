"""Trains a tiny Z-Image on rendered photos of five shapes in buckets, on two ranks, and judges its pictures.

    python benchmarks/z_image_shapes.py [--steps 1500] [--rows 234] [--samples 12] [--picture FILE]

Needs the extra `dev` and the plugin mm-diffusers. The pipeline is of Diffusers' and Transformers' own
classes with random weights; the lossless `pixel` takes its autoencoder's place, since a random one keeps
nothing of a picture. Photos are PNG files, twice as large as their buckets, with captions beside them: a
circle or square of one of four colours at one of four sides. Six of the 32 combinations occur nowhere,
though each two of their parts do. The score is the share of pictures, over all five shapes, that show both
the colour and the side of such a caption; the control is the share of colours or sides, the larger, for
captions of other pictures. The figure is not judged: it is 5 to 7 pixels large. The processor time is that
of all processes of `mm cache build`, `mm train` and `mm sample`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
import yaml
from mm_diffusers.testing import TINY
from PIL import Image

from mm_core.data import moving_shapes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples/shapes"))
from judge import judge_clip, judge_prompt, score

SIZES = ((16, 32), (32, 16), (20, 24), (24, 20), (20, 20))
"""Height and width of the buckets, which `auto` finds; those of the files are twice as large."""
TEXT = 64  # width of the text states
FOLLOWED, CONTROL, MINUTES = 0.90, 0.30, 8


def main() -> int:
    parser = argparse.ArgumentParser(description="train a tiny Z-Image on photos of five shapes")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rows", type=int, default=234, help="photos of each shape")
    parser.add_argument("--samples", type=int, default=12, help="captions of each shape")
    parser.add_argument("--nproc", type=int, default=2, help="number of ranks for training")
    parser.add_argument("--seed", type=int, default=1234, help="of the weights and the run")
    parser.add_argument("--picture", type=Path, help="PNG to write: photos above, sampled pictures below")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="z_image_shapes-") as name:
        folder = Path(name)
        render(folder / "photos", args.rows)
        write_pipeline(folder / "pipeline", args.seed)
        config = folder / "run.yaml"
        config.write_text(yaml.safe_dump(config_of(folder, args.steps, args.seed)), encoding="utf-8")
        spent = {"cache": mm("cache", "build", "--config", config)}
        spent["training"] = mm("train", "--config", config, "--nproc", args.nproc)
        unseen = moving_shapes.HELD_OUT
        prompts = [caption_of(unseen[number % len(unseen)]) for number in range(args.samples)]
        (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
        spent["sampling"] = sum(sample(folder, size) for size in SIZES)
        pictures = {size: read(folder / f"{size[0]}x{size[1]}") for size in SIZES}
        if args.picture is not None:
            photos = [Image.open(folder / "photos" / f"{y}x{x}_{n}.png") for n in (0, 1) for y, x in SIZES]
            sheet(photos, [pictures[size][n] for n in (0, 1) for size in SIZES]).save(args.picture)
    return report(pictures, prompts, spent)


def render(folder: Path, rows: int) -> None:
    """Writes photos of all sizes, each with its caption beside it."""
    folder.mkdir()
    for height, width in SIZES:
        size = (2 * height, 2 * width)
        for number in range(rows):
            rng = random.Random(f"{size} {number}")
            combination = moving_shapes.TRAINED[number % len(moving_shapes.TRAINED)]
            name = f"{height}x{width}_{number}"
            Image.fromarray(photo(combination, rng, size)).save(folder / f"{name}.png")
            (folder / f"{name}.txt").write_text(caption_of(combination), encoding="utf-8")


def photo(combination: tuple[str, str, str], rng: random.Random, size: tuple[int, int]) -> np.ndarray:
    """A figure near one side of a photo uint8 [Y,X,3], and near the middle across."""
    scene = moving_shapes.draw_scene(combination, rng, size, 1)
    places = {}
    for name, step, extent in zip("xy", moving_shapes.DIRECTIONS[scene.direction], size[::-1], strict=True):
        reach = (extent - scene.side) / 2
        way = step * rng.uniform(0.8, 1.0) if step else rng.uniform(-0.2, 0.2)
        places[name] = extent / 2 + way * reach
    return moving_shapes.draw(replace(scene, **places), size, 1)[0]


def caption_of(combination: tuple[str, str, str]) -> str:
    """The caption of a photo: "a red circle stays left"."""
    return moving_shapes.caption(*combination).replace("moves", "stays")


def write_pipeline(folder: Path, seed: int) -> None:
    """Writes a Z-Image pipeline with random weights, as `save_pretrained` does."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 320, "hidden_size": TEXT, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    parts = TINY["ZImagePipeline"]() | {
        "transformer": diffusers.ZImageTransformer2DModel(
            **{"in_channels": 12, "dim": 96, "n_layers": 3, "n_refiner_layers": 1, "n_heads": 3},
            **{"n_kv_heads": 3, "cap_feat_dim": TEXT, "axes_dims": [8, 12, 12], "axes_lens": [256, 64, 64]},
        ),
        "text_encoder": transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads)),
    }
    diffusers.ZImagePipeline(**parts).save_pretrained(folder)


def config_of(folder: Path, steps: int, seed: int) -> dict[str, Any]:
    """Config of the run: all weights of the transformer, 16 photos a step; a token is 4 x 4 pixels."""
    data = {"type": "media_text", "sources": [{"annotations": str(folder / "photos")}], "num_frames": 1}
    return {
        "run": {"name": "shapes", "dir": str(folder / "runs"), "seed": seed},
        "task": {
            "type": "diffusers",
            "pipeline": str(folder / "pipeline"),
            "autoencoder": {"type": "pixel", "spatial": 2},
            "text_encoder": {"dtype": "fp32"},
            "scheduler": {"shift": "sampling", "timesteps": "uniform"},
            "caption_dropout": 0.1,
            "sample": {"steps": 16, "guidance": 4.0},
        },
        "data": {
            "train": {**data, "max_height": 16, "max_width": 32},
            "loader": {"mode": "variable", "buckets": "auto", "workers": 0},
            "cache": {"dir": str(folder / "cache")},
        },
        "engine": {"type": "fsdp2", "sharding_size": 1},
        "optimizer": {"type": "adamw", "lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.01},
        "lr_schedule": {"type": "cosine", "warmup_steps": 50, "min_lr": 5e-5},
        "train": {"steps": steps, "micro_batch_size": 8, "global_batch_size": 16, "clip_grad_norm": 1.0},
        "checkpoint": {"every": 10**6},
        "log": {"every": 50, "trackers": []},
    }


def mm(*words: object) -> float:
    """Runs a command of mm, shows what it prints, and returns the minutes of processors that it took."""
    before = os.times()
    command = [sys.executable, "-m", "mm_core.cli.main", *map(str, words)]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return spent / 60


def sample(folder: Path, size: tuple[int, int]) -> float:
    """Samples the prompts in a size into a folder named after it; returns the minutes of processors."""
    sized = ("--height", size[0], "--width", size[1], "--out", folder / f"{size[0]}x{size[1]}")
    return mm("sample", "--run", folder / "runs/shapes", "--prompts", folder / "prompts.json", *sized)


def read(folder: Path) -> list[np.ndarray]:
    """The pictures of a folder in the order of their prompts, [3,1,Y,X] in [-1,1]."""
    files = sorted(file for file in folder.glob("*.png") if file.stem != "contact_sheet")
    return [np.asarray(Image.open(file)).transpose(2, 0, 1)[:, None] / 127.5 - 1 for file in files]


def sheet(photos: list[Image.Image], sampled: list[np.ndarray]) -> Image.Image:
    """Photos of the training data above sampled pictures, ten of each, enlarged."""
    made = Image.new("RGB", (10 * 136 - 8, 2 * 136 - 8), "white")
    shown = [Image.fromarray(np.uint8((one[:, 0].transpose(1, 2, 0) + 1) * 127.5 + 0.5)) for one in sampled]
    for number, one in enumerate([*photos, *shown]):
        large = one.resize([side * 128 // max(one.size) for side in one.size], Image.Resampling.NEAREST)
        made.paste(large, (number % 10 * 136, number // 10 * 136))
    return made


def report(
    pictures: dict[tuple[int, int], list[np.ndarray]], prompts: list[str], spent: dict[str, float]
) -> int:
    """Prints the scores of each size and the results; returns 0 if all reach their bars."""
    print("height  width  pictures  colour   side  both")
    asked, followed = [judge_prompt(prompt) for prompt in prompts], []
    for (height, width), shown in pictures.items():
        pairs = zip(map(judge_clip, shown), asked, strict=True)
        both = [(a.colour, a.direction) == (b.colour, b.direction) for a, b in pairs]
        own = score(shown, prompts)
        print(f"{height:6}  {width:5}  {len(shown):8}  {own.colour:6.0%}  {own.direction:5.0%}", end="  ")
        print(f"{np.mean(both):4.0%}")
        followed += both
    every = score([each for shown in pictures.values() for each in shown], prompts * len(pictures))
    print("processor minutes:", ", ".join(f"{name} {minutes:.2f}" for name, minutes in spent.items()))
    share, control = float(np.mean(followed)), max(every.control_colour, every.control_direction)
    minutes = sum(spent.values())
    results = [
        ("z_image_shapes_followed", f"{share:.4f}", f">={FOLLOWED}", share >= FOLLOWED),
        ("z_image_shapes_control", f"{control:.4f}", f"<={CONTROL}", control <= CONTROL),
        ("z_image_shapes_processor_minutes", f"{minutes:.2f}", f"<={MINUTES}", minutes <= MINUTES),
    ]
    for result, value, bar, good in results:
        print(f"RESULT {result} {value} {bar} {'ok' if good else 'short'}")
    return 0 if all(good for *_, good in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
