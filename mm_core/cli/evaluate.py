"""`mm evaluate`: held-out loss and metrics of a trained run."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_core.errors import MMError


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--run", required=True, metavar="DIR", help="a run's folder, or one of its checkpoints"
    )
    parser.add_argument(
        "--split", choices=("validation", "test"), default="validation", help="the dataset under data"
    )
    add_weights(parser)
    parser.add_argument("--clips", type=_count, metavar="N", help="rows, evenly spaced (default: as the run)")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="over the run's config, for other data"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def add_weights(parser: argparse.ArgumentParser) -> None:
    """The options that choose a checkpoint and its weights."""
    parser.add_argument(
        "--weights",
        choices=("auto", "ema", "model"),
        default="auto",
        help="of the checkpoint; auto: the moving average where there is one",
    )
    parser.add_argument(
        "--checkpoint", choices=("latest", "best"), default="latest", help="of a run's folder"
    )


def execute(args: argparse.Namespace) -> int:
    """Evaluates on one process and prints the figures."""
    if not Path(args.run).exists():
        raise MMError("there is no such run", where=args.run, hint="mm-train prints the run's folder")
    from mm_core.train.evaluation import evaluate

    found = evaluate(
        args.run,
        split=args.split,
        weights=args.weights,
        checkpoint=args.checkpoint,
        clips=args.clips,
        overrides=args.overrides,
        note=lambda sentence: print(f"mm: {sentence}", file=sys.stderr),
    )
    if args.json:
        facts = {"step": found.step, "split": found.split, "weights": found.weights}
        print(json.dumps({"checkpoint": str(found.checkpoint), **facts, "figures": _plain(found.figures)}))
        return 0
    print(f"{found.checkpoint}, {found.weights} weights, data.{found.split}")
    width = max(map(len, found.figures))
    for name, value in found.figures.items():
        print(f"  {name:<{width}}  {value:.6g}")
    return 0


def _plain(figures: Mapping[str, float]) -> dict[str, Any]:
    """JSON has no numbers for what is not finite: their names, which `float()` reads."""
    return {name: value if math.isfinite(value) else str(value) for name, value in figures.items()}


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value
