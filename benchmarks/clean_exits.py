"""Starts many two-rank runs that train, save and exit, and counts those that exit cleanly.

    python benchmarks/clean_exits.py [--runs 50]

Processes that saved collectively sometimes abort in C++ teardown (`terminate called without an active
exception`) after all work is done: a job scheduler then reports a good run as failed. Each run here is
`mm-train --nproc 2` with a tiny model on clips that the script renders.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ABORTS = ("terminate called", "Aborted", "core dumped", "Segmentation fault", "Fatal Python error")


@dataclass(frozen=True)
class Run:
    """Exit of one training run."""

    code: int
    output: str
    saved: bool
    seconds: float

    @property
    def fault(self) -> str | None:
        """Why the run's exit was not clean; None for a clean one."""
        printed = [word for word in ABORTS if word in self.output]
        if printed:
            return f"printed {printed[0]!r}"
        if self.code:
            return f"exit code {self.code}"
        return None if self.saved else "no checkpoint"


def write_config(folder: Path) -> Path:
    """Writes the config of a tiny run of two steps, as JSON, which is valid YAML."""
    clips = folder / "clips"
    render = [sys.executable, str(ROOT / "examples/shapes/render.py"), "--out", str(clips), "--clips", "16"]
    subprocess.run(render, check=True, capture_output=True)
    predictor = {
        "type": "custom_dit",
        "num_layers": 2,
        "num_heads": 2,
        "head_dim": 12,
        "patch_size": [2, 2, 2],
        "in_channels": 12,
        "out_channels": 12,
        "text_dim": 32,
        "freq_dim": 32,
        "ffn_dim": 48,
        "rope_max_seq_len": 64,
    }
    config = {
        "run": {"name": "clean", "dir": str(folder / "runs")},
        "task": {
            "type": "text_to_video",
            "predictor": predictor,
            "autoencoder": {"type": "pixel", "spatial": 2},
            "text_encoder": {"type": "bytes", "hidden_size": 32},
            "scheduler": {"type": "flow_match", "shift": 5},
        },
        "data": {
            "train": {
                "type": "video_text",
                "annotations": str(clips / "data.json"),
                "num_frames": 8,
                "height": 16,
                "width": 16,
            },
            "loader": {"workers": 1},
        },
        "train": {"steps": 2, "micro_batch_size": 1},
    }
    path = folder / "clean.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def train(config: Path, folder: Path, index: int) -> Run:
    """Trains one tiny run in its own folder."""
    name = f"run.name=clean_{index}"
    command = [
        sys.executable,
        "-m",
        "mm_core.cli.main",
        "train",
        "--config",
        str(config),
        name,
        "--nproc",
        "2",
    ]
    began = time.monotonic()
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    saved = (folder / f"runs/clean_{index}/checkpoints/step_00000002").is_dir()
    return Run(done.returncode, done.stdout, saved, time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description="count clean exits of two-rank runs")
    parser.add_argument("--runs", type=int, default=50)
    count = parser.parse_args().runs
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="clean_exits-") as scratch:
        config = write_config(Path(scratch))
        for index in range(count):
            run = train(config, Path(scratch), index)
            runs.append(run)
            if run.fault:
                print(f"run {index + 1}: {run.fault}\n{run.output}", file=sys.stderr)
            elif sys.stderr.isatty():
                print(f"run {index + 1} of {count}: clean, {run.seconds:.1f} s", file=sys.stderr)
    clean = sum(run.fault is None for run in runs)
    seconds = sorted(run.seconds for run in runs)
    print(f"{'how it ended':<24} {'runs':>5}")
    for fault, times in sorted(Counter(run.fault or "clean" for run in runs).items()):
        print(f"{fault:<24} {times:>5}")
    print(f"seconds a run: median {seconds[count // 2]:.1f}, longest {seconds[-1]:.1f}")
    print(f"RESULT clean_exits {clean}/{count} {count} {'ok' if clean == count else 'short'}")
    return 0 if clean == count else 1


if __name__ == "__main__":
    sys.exit(main())
