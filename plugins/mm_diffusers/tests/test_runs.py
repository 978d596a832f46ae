"""Runs from a pipeline's folder: over ranks, cached, resumed, sampled, exported for Diffusers."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
import yaml
from mm_diffusers.families import FAMILIES
from mm_diffusers.pictures import open_processor
from mm_diffusers.testing.parity import HEIGHT, WIDTH, pair_of
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from tuned import SMALL, check_elsewhere

from mm_core.builtin.tiny import write_clip
from mm_core.contracts import Randomness
from support import warm
from support.logs import losses

pytestmark = pytest.mark.slow

LORA = "train.adapters=[{targets: auto, rank: 4}]"


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Twelve photos of three sizes."""
    folder, rows = tmp_path_factory.mktemp("photos"), []
    for number in range(12):
        size = ((64, 64), (96, 64), (64, 96))[number % 3]
        colour = ("red", "green", "blue")[number % 3]
        picture = Image.new("RGB", size, "white")
        ImageDraw.Draw(picture).ellipse((8, 8, 30 + number, 30 + number), fill=colour)
        picture.save(folder / f"{number}.png")
        rows.append({"path": f"{number}.png", "cap": f"a {colour} circle" * (1 + number % 2)})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    """Eight clips of 9 frames and two sizes, of noise that moves."""
    folder, rows = tmp_path_factory.mktemp("clips"), []
    for number in range(8):
        y, x = ((64, 64), (96, 64))[number % 2]
        noise = torch.randint(
            0, 255, (y // 8, x // 8 + 9, 3), generator=torch.Generator().manual_seed(number)
        )
        frames = torch.stack([noise[:, place : place + x // 8] for place in range(9)])
        write_clip(folder / f"{number}.mp4", frames.repeat_interleave(8, 1).repeat_interleave(8, 2).byte(), 8)
        rows.append(
            {"path": f"{number}.mp4", "cap": f'noise {number} with "text"' if number % 3 else "noise"}
        )
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def edits(photos) -> Path:
    """The photos, each with the pictures that it was edited from: of its size, and for some one more."""
    rows = list(map(json.loads, (photos / "rows.jsonl").read_text().splitlines()))
    for number, row in enumerate(rows):
        row["shown"] = [f"{(number + 3) % 12}.png", *(["0.png"] if number % 3 == 1 else [])]
    (photos / "edits.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return photos / "edits.jsonl"


@pytest.fixture(scope="module", params=FAMILIES)
def run(request, pipeline_of, photos, clips, edits, tmp_path_factory) -> Path:
    """The YAML of a run in buckets."""
    folder, video = tmp_path_factory.mktemp(request.param), bool(FAMILIES[request.param].strides[0])
    rows = (clips if video else photos) / "rows.jsonl"
    data = {"type": "media_text", "sources": [{"annotations": str(rows)}], "num_frames": 9 if video else 1}
    config = {
        "run": {"name": "run", "dir": str(folder), "seed": 3},
        "task": {
            "type": "diffusers",
            "pipeline": str(pipeline_of(request.param)),
            "text_encoder": {"dtype": "fp32"},
            "caption_dropout": 0.3,
            "sample": {"steps": 3, "num_frames": 1, "height": HEIGHT, "width": WIDTH},
        },
        "data": {
            "train": {**data, "max_height": 64, "max_width": 64},
            "loader": {"mode": "variable", "workers": 0},
        },
        "optimizer": {"type": "adamw", "lr": 1e-3},
        "train": {"steps": 4, "micro_batch_size": 2, "global_batch_size": 4},
        "checkpoint": {"every": 2},
        "log": {"every": 1},
    }
    family = FAMILIES[request.param]
    if family.areas:
        most = 2 if family.references[1] else 1
        small = replace(family, areas=[SMALL[area] for area in family.areas])
        config["task"]["predictor"] = {"references": most, "family": asdict(small)}
        config["data"]["train"]["sources"] = edited(edits, most, folder)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def edited(rows: Path, most: int, folder: Path) -> list[dict]:
    """Sources of rows with pictures, up to so many of each."""
    shown = [json.loads(line) for line in rows.read_text().splitlines()]
    shown = [{**row, "shown": row["shown"][:most]} for row in shown]
    own = rows.with_name(f"{folder.name}.jsonl")
    own.write_text("\n".join(map(json.dumps, shown)), encoding="utf-8")
    field = {"name": "references", "column": "shown", "kind": "images", "most": most}
    return [{"annotations": str(own), "columns": {"fields": [field]}}]


def mm(*arguments: object, code: int = 0) -> str:
    done = warm.mm(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def trained(run: Path, name: str, *options: object, code: int = 0) -> list[float]:
    mm("train", "--config", run, *options, f"run.name={name}", code=code)
    return losses(run.parent / name)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_two_ranks_a_cache_and_a_resume_train_as_one_rank(run, kind):
    more = [LORA] if kind == "lora" else []
    plain = trained(run, f"{kind}_plain", *more)
    assert len(plain) == 4
    two = trained(run, f"{kind}_two", "--nproc", 2, "train.micro_batch_size=1", *more)
    assert two == pytest.approx(plain, rel=1e-6)
    cache = f"data.cache.dir={run.parent / 'cache'}"
    mm("cache", "build", "--config", run, cache)
    assert trained(run, f"{kind}_cached", cache, *more) == pytest.approx(plain, rel=1e-6)
    trained(run, f"{kind}_resumed", "--stop-after", 2, *more, code=75)
    assert trained(run, f"{kind}_resumed", *more) == plain


def test_a_lora_makes_the_same_picture_in_the_pipeline(run, photos):
    folder, config = run.parent, yaml.safe_load(run.read_text())
    trained(run, "adapted", LORA, "optimizer.lr=0.05")
    file = folder / "lora.safetensors"
    mm("export", "--run", folder / "adapted", "--to", "lora/diffusers", "--out", file)
    guidance = 0.0 if FAMILIES[kind := Path(config["task"]["pipeline"]).name].guidance == "added" else 1.0
    pair = pair_of(kind, Path(config["task"]["pipeline"]))
    sampled = ["--prompt", "a red circle", "--seed", 5, "--guidance", guidance, "--out", folder / "ours"]
    if pair.family.first_frame:
        Image.fromarray(pair.first_frame.permute(1, 2, 0).numpy()).save(folder / "first.png")
        sampled += ["--input", f"first={folder / 'first.png'}"]
    if pair.family.areas:
        sampled += ["--input", f"references={photos / '3.png'}"]
    mm("sample", "--run", folder / "adapted", *sampled)
    shape = pair.task.autoencoder.latent_shape(1, HEIGHT, WIDTH)
    noise = Randomness(5).normal(shape, "sample", 0)[None]
    given = {"prompt": ["a red circle"], **({"num_frames": 1} if pair.frames > 1 else {})}
    if pair.family.areas:
        given["image"] = Image.open(photos / "3.png").convert("RGB")
    before = pair.pictures(noise, 3, **given)
    if hasattr(pair.pipe, "load_lora_weights"):
        pair.pipe.load_lora_weights(folder, weight_name=file.name)
    else:  # HunyuanVideo 1.5's pipelines have no such method
        pair.pipe.transformer.load_lora_adapter(folder, weight_name=file.name)
    wanted = (pair.pictures(noise, 3, **given)[0, :, 0] + 1) * 127.5
    (shown,) = [path for path in (folder / "ours").rglob("*.png") if "sheet" not in path.name]
    with Image.open(shown) as picture:
        found = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float()
    assert (found - wanted.clamp(0, 255)).abs().max() <= 0.51  # the rounding of a PNG
    assert (wanted - (before[0, :, 0] + 1) * 127.5).abs().max() > 1  # the LoRA matters
    check_elsewhere(folder / "adapted", Path(config["task"]["pipeline"]), file)


def test_a_pipeline_is_exported_as_it_came(run):
    folder, top = run.parent, Path(yaml.safe_load(run.read_text())["task"]["pipeline"])
    mm("train", "--config", run, "run.name=still", "optimizer.lr=0", "train.steps=1")
    mm("export", "--run", folder / "still", "--to", "diffusers", "--out", folder / "whole")
    # Diffusers opens the processor of pictures with torchvision alone.
    own = {"processor": open_processor(folder / "whole/processor")} if FAMILIES[top.name].areas else {}
    loaded = diffusers.DiffusionPipeline.from_pretrained(folder / "whole", **own)
    assert type(loaded).__name__ == top.name
    (stored,) = (top / "transformer").glob("*.safetensors")
    wanted, found = load_file(stored), loaded.transformer.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
