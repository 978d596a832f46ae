"""`mm eval`: held-out loss, metrics and predictions of a trained run."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mm_core.cli.train import refuse_among_ranks
from mm_core.errors import MMError

if TYPE_CHECKING:
    from mm_core.train.evaluation import EvaluationResult


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add = parser.add_argument
    add("--run", required=True, metavar="DIR[@STEP]", help="a run's folder, or one of its checkpoints")
    add(
        "--split",
        choices=("validation", "test", "train"),
        default="validation",
        help="the dataset under data (default: validation)",
    )
    add_weights(parser)
    add(
        "--metric",
        type=_metric,
        action="append",
        default=[],
        metavar="TYPE",
        help="beside the run's own: accuracy, or '{type: f1, average: micro}'; may be repeated",
    )
    add("--clips", type=_count, metavar="N", help="rows, evenly spaced (default: as the run)")
    add("overrides", nargs="*", metavar="key=value", help="over the run's config, for other data")
    add(
        "--nproc",
        type=_count,
        metavar="N",
        help="ranks on this host that share the model, as in training, and the rows (default 1)",
    )
    add(
        "--out",
        metavar="FILE",
        help="of the figures, as JSON (default: one in the run's evaluations/)",
    )
    add("--predictions", metavar="FILE", help="what was found of each row, a JSON object a line")
    add("--json", action="store_true", help="print one JSON object instead of a table")


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


def run_folder(run: str) -> Path:
    """The folder of `DIR` or `DIR@STEP`, a run's or a checkpoint's. MMError where there is none."""
    for folder in (Path(run), Path(run.rpartition("@")[0] or run)):
        if folder.exists():
            return folder
    raise MMError("there is no such run", where=run, hint="mm-train prints the run's folder")


def execute(args: argparse.Namespace) -> int:
    """Evaluates, prints the figures and writes the files. Under a launcher (RANK is set) this process is a
    rank, and does not return."""
    if "RANK" in os.environ:
        refuse_among_ranks(["--nproc"] if args.nproc is not None else [])
        from mm_core.train.failure import leave, run_as_rank

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # heard in a collective too; there is nothing to save
        leave(run_as_rank(lambda: _evaluate(args)))
    run_folder(args.run)
    for path in (args.out, args.predictions):
        if path is not None:
            _check_place(Path(path))
    if args.nproc in (None, 1):
        return _evaluate(args)
    from mm_core.train.evaluation import choose
    from mm_core.train.launch import Nodes, launch

    choose(args.run, args.split, args.checkpoint, args.overrides)  # what is missing is said once, and soon
    command = [sys.executable, "-m", "mm_core.cli.main", *_words(args)]
    return launch(command, Nodes(args.nproc), announce=False)


def _words(args: argparse.Namespace) -> list[str]:
    """The command line of a rank."""
    options = vars(args).copy()
    words = ["eval", *options.pop("overrides")]
    words += [f"--metric={json.dumps(each)}" for each in options.pop("metric")]
    words += ["--json"] * options.pop("json")
    del options["nproc"]
    return words + [f"--{name}={value}" for name, value in options.items() if value is not None]


def _evaluate(args: argparse.Namespace) -> int:
    """Alone, or as one of several ranks, of which the first prints and writes."""
    from mm_core.train.evaluation import evaluate
    from mm_core.train.predictions import write_predictions, write_text

    found = evaluate(
        args.run,
        split=args.split,
        weights=args.weights,
        checkpoint=args.checkpoint,
        clips=args.clips,
        metrics=args.metric,
        predictions=args.predictions is not None,
        overrides=args.overrides,
        note=lambda sentence: print(f"mm: {sentence}", file=sys.stderr),
    )
    if os.environ.get("RANK", "0") != "0":
        return 0
    document = found.to_mapping()
    print(json.dumps(document) if args.json else _table(found), flush=True)
    if args.predictions is not None:
        write_predictions(found.predictions, Path(args.predictions))
    out = Path(args.out) if args.out is not None else _place(found)
    try:
        write_text(out, json.dumps(document, indent=2) + "\n")
    except MMError as fault:
        if args.out is not None:
            raise
        print(f"mm: warning: {fault.render()}", file=sys.stderr)  # nobody asked for this file
    return 0


def _table(found: EvaluationResult) -> str:
    width = max(map(len, found.figures))
    head = f"{found.checkpoint}, {found.weights} weights, data.{found.split}"
    return "\n".join([head, *(f"  {name:<{width}}  {value:.6g}" for name, value in found.figures.items())])


def _place(found: EvaluationResult) -> Path:
    """Where the figures are kept that nobody has named a file for."""
    folder = found.checkpoint.parent
    root = folder.parent if folder.name == "checkpoints" else folder
    return root / "evaluations" / f"{found.split}_step_{found.step:08d}_{found.weights}.json"


def _check_place(path: Path) -> None:
    """MMError for a file that could not be written at the end of a long evaluation."""
    fault = "this is a folder" if path.is_dir() else None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            fault = "its folder can not be written to"
    except OSError as error:
        fault = error.strerror or str(error)
    if fault is not None:
        raise MMError(f"the file can not be written: {fault}", where=str(path), accepted="the path of a file")


def _metric(text: str) -> str | Mapping[str, Any]:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        found = None
    if not isinstance(found, str | dict) or (isinstance(found, dict) and "type" not in found):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a type nor {{type: .., key: value}}")
    return found


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value
