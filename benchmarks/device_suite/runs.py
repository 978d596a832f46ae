"""Runs of mm_core in a part of the device suite: configs, steps, figures, models at real sizes."""

from __future__ import annotations

import gc
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mm_wan.presets import PRESETS
from mm_wan.testing import make_tiny_checkpoint
from omegaconf import OmegaConf

from mm_core.config.load import load_config
from mm_core.data import moving_shapes
from mm_core.device import current_device, reset_peak_memory
from mm_core.training.assembly import assemble
from mm_core.training.loop import Training, run_steps
from mm_core.training.run import running

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples/shapes"))
from render import write_mp4  # noqa: E402

QUICKSTART = "custom_dit/quickstart"
CLIPS = 4
"""Clips for Wan."""
FAR = 1 << 30
"""A step that no run reaches: what happens every so many steps, or after the last one, does not happen."""

Settings = Mapping[str, Any]


def on_device() -> bool:
    """Whether this process has an accelerator: if not, parts have their tiny form."""
    return current_device().type != "cpu"


def result(name: str, value: float, bar: float | None = None, at_least: bool = False) -> None:
    """Prints a RESULT line: `value` must be at most `bar`, or at least, where there is one."""
    ok = bar is None or (value >= bar if at_least else value <= bar)
    print(f"RESULT {name} {value:.4g} {'-' if bar is None else bar} {'ok' if ok else 'short'}", flush=True)


def holds(name: str, fact: bool) -> None:
    """Prints a RESULT line of what must be so."""
    result(name, fact, 1, at_least=True)


def config_file(folder: Path, name: str, of: str, settings: Settings) -> Path:
    """Writes a shipped config with other settings to a folder; a mapping takes the place of a section.

    Args:
        folder: of the part.
        name: of the run.
        of: the shipped config, below configs/, without its suffix.
        settings: value by dotted key; the key's section must exist.
    """
    config = OmegaConf.load(ROOT / "configs" / f"{of}.yaml")
    common = {"run.name": name, "run.dir": str(folder / "runs"), "data.loader.workers": 0, "log.every": 1}
    common |= {"log.trackers": [], "checkpoint.every": FAR, "lr_schedule": {"type": "constant"}}
    common |= {"checkpoint.async": False}  # else a thread pins host memory while steps are measured
    for key, value in {**common, **settings}.items():
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    config.pop("validation", None)
    config.data.pop("validation", None)
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)
    file = folder / f"{name}.yaml"
    OmegaConf.save(config, file)
    return file


def release() -> None:
    """Frees what runs before have held, and measures the peak of memory from here."""
    torch._dynamo.reset()
    gc.collect()
    if on_device():
        torch.get_device_module().empty_cache()
    reset_peak_memory()


@contextmanager
def run_of(folder: Path, name: str, of: str, settings: Settings) -> Iterator[Training]:
    """A run that is ready for its first step, and saves nothing.

    Args: see `config_file`.
    """
    config = load_config(config_file(folder, name, of, settings), [])
    release()
    run = assemble(config, "never")
    run.between.steps = FAR
    with running(run):
        yield run


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The logged lines of a run."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def trained(
    folder: Path,
    name: str,
    of: str,
    settings: Settings,
    change: Callable[[Training], None] = lambda run: None,
) -> list[dict[str, Any]]:
    """Trains a run to its last step in this process, after `change`; returns its logged lines."""
    with run_of(folder, name, of, settings) as run:
        change(run)
        run_steps(run, run.start)
        run.between.settled()  # logs the last step, if it ends late
    return rows_of(folder, name)


def steps_of(run: Training) -> Callable[[int], None]:
    """A function that trains a run's next steps."""
    whole, taken = run.plan, run.start

    def steps(number: int) -> None:
        nonlocal taken
        run.plan = replace(whole, steps=taken + number)
        taken = run_steps(run, taken)

    return steps


# -- data and models -------------------------------------------------------------------------------------


def shapes(folder: Path, clips: int, frames: int, size: tuple[int, int]) -> str:
    """The annotation file of rendered clips of moving shapes, (height, width) pixels."""
    out = folder / f"clips_{frames}x{size[0]}x{size[1]}"
    if not (out / "data.json").exists():
        (out / "videos").mkdir(parents=True)
        rows = []
        for number in range(clips):
            rng = random.Random(number)
            drawn = moving_shapes.TRAINED[number % len(moving_shapes.TRAINED)]
            scene = moving_shapes.draw_scene(drawn, rng, size, frames)
            clip = moving_shapes.draw(scene, size, frames)
            write_mp4(out / f"videos/{number}.mp4", clip, fps=8, lossless=max(size) <= 64)
            caption = moving_shapes.caption(scene.colour, scene.shape, scene.direction)
            height, width = size
            row = {"path": f"videos/{number}.mp4", "cap": caption, "num_frames": frames, "fps": 8}
            rows.append(row | {"resolution": {"height": height, "width": width}})
        (out / "data.json").write_text(json.dumps(rows))
    return str(out / "data.json")


def quickstart(folder: Path, **settings: Any) -> Settings:
    """Settings of the quickstart for its clips, 10 steps of two micro-batches."""
    common = {"data.train.annotations": shapes(folder, 64, 8, (16, 16)), "train.steps": 10}
    return {**common, "train.micro_batch_size": 2, "train.global_batch_size": 4, **settings}


def tiny_wan(folder: Path, lora: bool = False) -> tuple[str, dict[str, Any]]:
    """The shipped config of a tiny Wan on rendered clips, and settings for it."""
    pipeline = folder / "wan_tiny"
    if not pipeline.exists():
        make_tiny_checkpoint(pipeline)
    return f"wan/t2v_tiny{'_lora' * lora}", {
        **pipeline_settings(pipeline),
        "data.train.annotations": shapes(folder, CLIPS, 9, (64, 64)),
        "data.train.fps": 8,
        "train.steps": 10,
    }


def pipeline_settings(pipeline: Path) -> dict[str, Any]:
    """Settings for the weights of a Wan pipeline."""
    parts = {"predictor": "", "autoencoder": "/vae", "text_encoder": "/text_encoder"}
    return {f"task.{part}.from_pretrained": f"{pipeline}{place}" for part, place in parts.items()}


def wan(folder: Path, frames: int, lora: bool = False) -> tuple[str, dict[str, Any]]:
    """The shipped config of Wan 1.3B on clips of 480x832, and settings for it; the tiny one on the CPU.

    Weights are random; encoders have the sizes of the published ones, but the text encoder has one layer.
    """
    one = {"train.micro_batch_size": 1, "train.global_batch_size": 1}
    if not on_device():
        of, settings = tiny_wan(folder, lora)
        return of, settings | one
    pipeline = folder / "wan"
    if not pipeline.exists():
        make_tiny_checkpoint(pipeline)
        write_large(pipeline)
    return f"wan/t2v_1_3b{'_lora' * lora}", {
        **pipeline_settings(pipeline),
        "data.train.annotations": shapes(folder, CLIPS, 49, (480, 832)),
        "data.train.folder": None,
        "data.train.num_frames": frames,
        "data.train.fps": 8,
        **one,
    }


def write_large(pipeline: Path) -> None:
    """Replaces a tiny pipeline's parts by those of Wan 1.3B; the text encoder is as wide, with one layer."""
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    tiny = json.loads((pipeline / "text_encoder/config.json").read_text())
    sizes = {"d_model": 4096, "d_kv": 64, "num_heads": 64, "d_ff": 1024, "num_layers": 1}
    with torch.device(current_device()):
        models = {
            "transformer": WanTransformer3DModel(**PRESETS["wan2.1-t2v-1.3b"].architecture.fields),
            "vae": AutoencoderKLWan(),
            "text_encoder": UMT5EncoderModel(UMT5Config(**(tiny | sizes))),
        }
    for name, model in models.items():
        shutil.rmtree(pipeline / name)
        model.to(torch.bfloat16).save_pretrained(pipeline / name)


def internvl(folder: Path) -> tuple[str, Settings]:
    """The shipped config of InternVL 3.5 2B on packed rows of 8,192 tokens, and settings for it; the tiny one
    on the CPU. Weights are random, and the tokenizer is the tiny one."""
    from mm_internvl.presets import write_config
    from mm_internvl.testing import make_tiny_checkpoint, make_tiny_conversations

    large, model = on_device(), folder / "internvl"
    if not model.exists():
        make_tiny_checkpoint(model)
        if large:
            token = json.loads((model / "config.json").read_text())["image_token_id"]
            (model / "config.json").unlink()
            (model / "model.safetensors").unlink()
            write_config(model, "internvl3.5-2b")
            side = {"size": {"height": 448, "width": 448}}  # a tile has 256 tokens
            for file, keys in {
                "config.json": {"image_token_id": token},
                "preprocessor_config.json": side,
                "video_preprocessor_config.json": side,
                "processor_config.json": {"image_seq_length": 256},
            }.items():
                (model / file).write_text(json.dumps(json.loads((model / file).read_text()) | keys))
    rows = make_tiny_conversations(folder / "digits", rows=400 if large else 40)
    return f"internvl/{'2b' if large else 'tiny'}", {
        "task.from_pretrained": str(model),
        "task.weights": "random",
        "data.train.processor": str(model),
        "data.train.sources": [{"annotations": str(rows)}],
        "data.train.max_length": 8192 if large else 128,
        "data.loader.workers": 8 * large,
        "train.global_batch_size": 1,
    }
