"""Runs as training leaves them: the names and forms of their files, clips made by the writer of clips."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mm_core.contracts import Clip
from mm_core.data.media.video_files import write_clips

PROMPTS = ("a red circle moves left", "a blue square moves up")
BINS = [f"{i / 10:g}-{(i + 1) / 10:g}" for i in range(10)]


def line(step: int, loss: float | str, **more: float) -> dict[str, object]:
    """One line of metrics.jsonl, with the figures by noise level every tenth step."""
    row: dict[str, object] = {
        "step": step,
        "loss": loss,
        "grad_norm": 0.5,
        "step_time": 0.25,
        "data_wait": 0.05,
        "samples_per_second": 32.0,
        "samples": 8.0 * step,
        "memory": 2.0**30,
        "time/data": 0.05,
        "time/forward_backward": 0.2,
        "lr": 1e-3,
    }
    if step % 10 == 0:
        for index, label in enumerate(BINS):
            row[f"loss_by_sigma/{label}"] = 1.0 + index
            row[f"grad_norm_by_sigma/{label}"] = 0.1 * index
            row[f"timesteps_by_sigma/{label}"] = 0.1
    return row | more


@pytest.fixture
def make_run(tmp_path) -> Callable[..., Path]:
    """`make_run("name", steps=40, validated=True, sampled=[20, 40], prompts=..., lr=...)` -> its folder."""

    def make(
        name: str,
        steps: int = 40,
        planned: int = 40,
        validated: bool = True,
        sampled: tuple[int, ...] = (),
        prompts: tuple[str, ...] = PROMPTS,
        lr: float = 1e-3,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        rows = [line(step, 2.0 / step, lr=lr) for step in range(1, steps + 1)]
        if validated:
            for step in range(10, steps + 1, 10):
                rows.append({"step": step, "validation/loss": 3.0 / step, "validation_ema/loss": 2.5 / step})
        rows.sort(key=lambda row: row["step"])
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        bins = {"name": "sigma", "edges": [i / 10 for i in range(11)], "declared": [0.1] * 10}
        (folder / "telemetry.json").write_text(json.dumps({"bins": bins}))
        manifest = {
            "config": {"run": {"name": name}, "optimizer": {"type": "core/adamw", "lr": lr}},
            "plugins": [{"key": "task", "type": "core/x", "distribution": "mm-core", "version": "0.1.0"}],
            "devices": {"device": "cpu"},
            "world": 1,
            "plan": {"steps": planned, "global_batch_size": 8, "modules": []},
        }
        (folder / "manifest.json").write_text(json.dumps(manifest))
        (folder / "config.yaml").write_text(f"run: {{name: {name}}}\n")
        for step in sampled:
            clips = [
                Clip(torch.full((3, 8, 16, 16), step / 100 - 0.5 + 0.1 * i), 8.0, prompt)
                for i, prompt in enumerate(prompts)
            ]
            write_clips(clips, folder / f"samples/step_{step:08d}")
        return folder

    return make
