"""`mm eval`: held-out loss, metrics and predictions of a trained run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mm_core.cli.options import count, print_json
from mm_core.cli.ranks import add_ranks, on_ranks
from mm_core.cli.runs.stored_run import add_run, check_place, root_of, run_folder
from mm_core.errors import MMError, printable

if TYPE_CHECKING:
    from mm_core.inference.evaluate import EvaluationResult


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_run(parser, "other data")
    add(
        "--split",
        choices=("validation", "test", "train"),
        default="validation",
        help="which dataset of the config's `data` to evaluate (default: validation)",
    )
    add(
        "--metric",
        type=_metric,
        action="append",
        default=[],
        metavar="TYPE",
        help="extra metric, e.g. accuracy or '{type: f1, average: micro}'; may be repeated",
    )
    add(
        "--rows",
        "--clips",
        type=count,
        metavar="N",
        help="number of rows to evaluate, evenly spaced (default: as in the run's config)",
    )
    add_ranks(parser, ", and the rows")
    add(
        "--out",
        metavar="FILE",
        help="JSON file for the results (default: one in the run's evaluations/)",
    )
    add("--predictions", metavar="FILE", help="file for the predictions: one line of JSON per row")
    add("--json", action="store_true", help="print one JSON object instead of a table")


def execute(args: argparse.Namespace) -> int:
    """Runs `mm eval`: evaluates a trained run, prints the results and writes them to files.

    Under a launcher (RANK is set) this process is a rank, and does not return.
    """
    return on_ranks(args, "eval", _evaluate, _check, before_launch=_choose)


def _check(args: argparse.Namespace) -> None:
    run_folder(args.run)
    for path in (args.out, args.predictions):
        if path is not None:
            check_place(Path(path))


def _choose(args: argparse.Namespace) -> None:
    from mm_core.inference.evaluate import choose

    choose(args.run, args.split, args.checkpoint, args.overrides, args.allow_code)


def _evaluate(args: argparse.Namespace) -> int:
    """Evaluates in this process, or as one of several ranks, of which the first prints and writes."""
    from mm_core.evaluation.predictions import write_predictions
    from mm_core.files import write_text
    from mm_core.inference.evaluate import evaluate

    found = evaluate(
        args.run,
        split=args.split,
        weights=args.weights,
        checkpoint=args.checkpoint,
        rows=args.rows,
        metrics=args.metric,
        predictions=args.predictions is not None,
        overrides=args.overrides,
        allow_code=args.allow_code,
        note=lambda sentence: print(f"mm: {printable(sentence)}", file=sys.stderr),
    )
    if os.environ.get("RANK", "0") != "0":
        return 0
    document = found.to_mapping()
    if args.json:
        print_json(document, indent=None)
    else:
        print(_table(found), flush=True)
    if args.predictions is not None:
        write_predictions(found.predictions, Path(args.predictions))
    out = Path(args.out) if args.out is not None else _place(found)
    try:
        write_text(out, json.dumps(document, indent=2) + "\n")
    except MMError as fault:
        if args.out is not None:
            raise
        print(f"mm: warning: {fault.render()}", file=sys.stderr)  # the user did not ask for this file
    return 0


def _table(found: EvaluationResult) -> str:
    width = max(map(len, found.figures))
    head = f"{found.checkpoint}, {found.weights} weights, data.{found.split}"
    return "\n".join([head, *(f"  {name:<{width}}  {value:.6g}" for name, value in found.figures.items())])


def _place(found: EvaluationResult) -> Path:
    """The file for the results when --out names none."""
    name = f"{found.split}_step_{found.step:08d}_{found.weights}.json"
    return root_of(found.checkpoint) / "evaluations" / name


def _metric(text: str) -> str | Mapping[str, Any]:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        found = None
    if not isinstance(found, str | dict) or (isinstance(found, dict) and "type" not in found):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a metric nor {{type: METRIC, key: value}}")
    return found
