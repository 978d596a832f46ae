"""Runs the text classification example from data to report: test accuracy, time, and each row evaluated once.

    python benchmarks/text_classification.py [--nproc 2] [--eval-nproc 1 2 3] [--engine deepspeed]

Needs the extra `dev`. The example's package is installed into a folder of this benchmark. The time is that of
mm-train, including validations and checkpoints; the model starts from random weights.
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

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/text_classification"
ACCURACY, SECONDS = 0.95, 300
OVERRIDES = {
    "fsdp2": (),
    "deepspeed": ("engine.type=deepspeed", "engine.settings.zero_optimization.stage=2"),
}
"""Engine -> overrides of the example's YAML."""


def main() -> int:
    parser = argparse.ArgumentParser(description="the classification example, from data to report")
    parser.add_argument("--nproc", type=int, default=2, help="number of ranks for training")
    parser.add_argument(
        "--eval-nproc", type=int, nargs="+", default=[1, 2, 3], help="numbers of ranks for evaluation"
    )
    parser.add_argument("--engine", choices=OVERRIDES, default="fsdp2", help="deepspeed trains at stage 2")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        install(folder / "site")
        call(folder, "mm_emotion.make_data", "--out", "data/emotion")
        config = folder / "site/mm_emotion/configs/emotion.yaml"
        began = perf_counter()
        words = ["train", "--config", config, "--nproc", args.nproc, *OVERRIDES[args.engine]]
        call(folder, "mm_core.cli.main", *words)
        seconds = perf_counter() - began
        lines = (folder / "runs/emotion/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        found = [predictions(folder, ranks) for ranks in args.eval_nproc]
        call(folder, "mm_emotion.report", f"predictions_{args.eval_nproc[-1]}.jsonl", show=True)
    classes = [[(row["row"], row["label"], row["prediction"]) for row in rows] for rows in found]
    same = all(rows == classes[0] for rows in classes)
    once = [row for row, *_ in classes[0]] == list(range(len(classes[0])))
    accuracy = sum(label == prediction for _, label, prediction in classes[0]) / len(classes[0])
    logged = [row for row in map(json.loads, lines) if "validation/accuracy" in row]
    dev = max(logged, key=lambda row: row["validation/accuracy"])
    best = dev["validation/accuracy"]
    print(*(f"{key} {value:g}" for key, value in dev.items()), sep="\n")
    results = [
        ("classification_dev_accuracy", f"{best:.4f}", f">={ACCURACY}", best >= ACCURACY),
        ("classification_accuracy", f"{accuracy:.4f}", f">={ACCURACY}", accuracy >= ACCURACY),
        ("classification_seconds", f"{seconds:.0f}", f"<{SECONDS}", seconds < SECONDS),
        ("classification_rows_once_on_any_ranks", f"{len(classes[0])}", "all", same and once),
    ]
    for result, value, bar, good in results:
        print(f"RESULT {result} {value} {bar} {'ok' if good else 'short'}")
    return 0 if all(good for *_, good in results) else 1


def install(target: Path) -> None:
    """Installs the example's package from a copy, because the build writes files beside its sources."""
    copy = target.parent / "source"
    subprocess.run(["cp", "-r", EXAMPLE, copy], check=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", target, copy], check=True)


def predictions(folder: Path, ranks: int) -> list[dict[str, object]]:
    """Predictions of `mm eval` for each test row, on this number of ranks."""
    file = folder / f"predictions_{ranks}.jsonl"
    choice = ["--run", "runs/emotion", "--checkpoint", "best", "--split", "test"]
    call(folder, "mm_core.cli.main", "eval", *choice, "--nproc", ranks, "--predictions", file)
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def call(folder: Path, module: str, *words: object, show: bool = False) -> None:
    """Runs a Python module in `folder`; prints its output if it fails, or if `show` is set."""
    paths = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if show or done.returncode:
        print(done.stdout, done.stderr, sep="\n")
    done.check_returncode()


if __name__ == "__main__":
    raise SystemExit(main())
