"""`mm align record|compare|recorder|checklist`: which number differs first between two trainings."""

from __future__ import annotations

import argparse
import json
import math
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_core.cli.options import add_allow_code, config_of, count, print_json, print_table, whole, write_named
from mm_core.cli.ranks import add_ranks, on_ranks
from mm_core.errors import MMError, plural, printable
from mm_core.files import read_plain

if TYPE_CHECKING:
    from mm_core.config.sections import RunConfig
    from mm_core.report.align.compare import Comparison

_BEFORE_STEPS = {"logs", ".lock", "config.yaml", "manifest.json", "metrics.jsonl", "telemetry.json"}
"""What a run's folder has before its first step."""


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="record|compare|recorder|checklist", required=True)
    several: dict[str, Any] = {"action": "append", "default": []}
    record = actions.add_parser("record", help="train some steps and record every number", allow_abbrev=False)
    add = record.add_argument
    add("--config", required=True, metavar="YAML", help="the run's config file")
    add("overrides", nargs="*", metavar="key=value", help="override a config key")
    add("--out", required=True, metavar="DIR", help="new folder for the record")
    add("--steps", type=count, default=1, metavar="N", help="steps to record (default 1)")
    add("--after", type=whole, default=0, metavar="N", help="steps to train before, unrecorded (default 0)")
    add("--like", metavar="DIR", help="feed this record's inputs and initial weights")
    add("--weights", action="store_true", help="store the initial weights, for --like of another run")
    add("--modules", **several, metavar="PATTERN", help="also store tensors of these modules")
    add("--resume", default="never", metavar="PATH", help="begin with this checkpoint or run")
    add_ranks(record)
    add_allow_code(record)
    compare = actions.add_parser("compare", help="name the first number that differs", allow_abbrev=False)
    add = compare.add_argument
    add("records", nargs=2, metavar="DIR", help="folder of a record")
    close = "relative difference that counts as equal; 0 compares bits"
    add("--tolerance", type=_tolerance, metavar="X", help=close)
    add("--by-order", action="store_true", help="match modules by their order and shapes where names differ")
    add("--html", metavar="FILE", help="also write a page")
    add("--svg", metavar="FILE", help="also write the page's chart alone")
    add("--json", action="store_true", help="print JSON")
    for action in (record, compare):
        theirs = "names of the other record, e.g. layers=blocks"
        action.add_argument("--map", **several, metavar="THEIRS=OURS", help=theirs)
    printed = "print the file that records other training scripts"
    recorder = actions.add_parser("recorder", help=printed, allow_abbrev=False)
    recorder.add_argument("--out", metavar="FILE", help="write it to this file")
    checklist = actions.add_parser("checklist", help="settings in which two runs differ", allow_abbrev=False)
    checklist.add_argument("files", nargs=2, metavar="FILE", help="a run's YAML, or a record's folder")
    checklist.add_argument("--json", action="store_true", help="print JSON")
    add_allow_code(checklist)


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a difference of at least 0")
    return value


def execute(args: argparse.Namespace) -> int:
    """Runs `mm align`; the exit code of `compare` and `checklist` is 1 where something differs."""
    if args.action == "record":
        return on_ranks(args, "align record", _record, _check)
    if args.action != "recorder":
        return _compare(args) if args.action == "compare" else _checklist(args)
    text = (files("mm_core.telemetry.align") / "recorder.py").read_text(encoding="utf-8")
    if args.out:
        write_named(Path(args.out), text, "--out")
    else:
        print(text, end="")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Finds errors in the config and in options before ranks are started."""
    _config(args)
    out = Path(args.out)
    if out.exists() and not (out.is_dir() and _unused(out)):
        raise MMError("the folder of the record is not empty", where=str(out), hint="choose another --out")


def _unused(folder: Path) -> bool:
    """Whether a folder is empty, or has only the files of a record that failed before its first step."""
    run, metrics = folder / "run", folder / "run" / "metrics.jsonl"
    found = [*folder.iterdir()]
    failed = found == [run] and run.is_dir() and {each.name for each in run.iterdir()} <= _BEFORE_STEPS
    return not found or (failed and not (metrics.exists() and metrics.stat().st_size))


def _config(args: argparse.Namespace) -> RunConfig:
    from mm_core.training.optional.aligning import QUIET

    return config_of(args, *QUIET, f"run.dir={args.out}", "run.name=run", fetch=True)


def _record(args: argparse.Namespace) -> int:
    from mm_core.device import environment_world
    from mm_core.report.align.records import Names
    from mm_core.training.optional.aligning import Recording, record

    given = {key: getattr(args, key) for key in ("steps", "after", "weights", "modules", "resume")}
    like = Path(args.like) if args.like else None
    asked = Recording(Path(args.out), like=like, names=Names.parse(args.map), **given)
    notes = record(_config(args), asked)
    if environment_world().rank == 0:
        for note in notes:
            print(printable(note))
        print(f"{plural(args.steps, 'step')} recorded in {args.out}")
    return 0


def _compare(args: argparse.Namespace) -> int:
    from mm_core.report.align import render
    from mm_core.report.align.compare import compare
    from mm_core.report.align.records import Names, names_by_order, read_record

    one, two = map(Path, args.records)
    names, ours = Names.parse(args.map), read_record(one)
    if args.by_order:
        names = names_by_order(ours, read_record(two, names), names)
    result = compare(ours, read_record(two, names), args.tolerance)
    if not result.pairs:
        what = "; ".join(["the two records have no tensor in common", *result.notes])
        hint = "map names with --map THEIRS=OURS, or match --by-order"
        raise MMError(what, where=f"{one}, {two}", hint=hint)
    elements = None if args.json and not args.html else _elements(result, one, two)
    if args.html:
        write_named(Path(args.html), render.page(result, args.records, elements), "--html")
    if args.svg:
        write_named(Path(args.svg), render.chart(render.growth(result)), "--svg")
    if args.json:
        print_json(render.document(result))
    else:
        print(render.text(result, elements))
    return 0 if result.same else 1


def _elements(result: Comparison, one: Path, two: Path) -> str | None:
    """What the stored tensors of the first finding show; None where they are not stored."""
    a, b = (result.findings[0].row.facts, result.findings[0].other.facts) if result.findings else ({}, {})
    if "file" not in a or "file" not in b or a["shape"] != b["shape"]:
        return None
    from mm_core.telemetry.align.stored import elements

    return elements(one / a["file"], two / b["file"])


def _checklist(args: argparse.Namespace) -> int:
    from mm_core.report.align.compare import settings_that_differ

    different = settings_that_differ(*(_facts(Path(name), args.allow_code) for name in args.files))
    if args.json:
        print_json({"different": different})
    elif different:
        rows = [(key, str(one), str(two)) for key, (one, two) in different.items()]
        print_table([("setting", *args.files), *rows])
    else:
        print("no setting differs")
    return 1 if different else 0


def _facts(path: Path, allow_code: bool) -> dict[str, Any]:
    """What is known of a run: of a record or a run's folder its facts, of a YAML its complete config."""
    for file in (path / "record.json", path / "manifest.json"):
        if file.exists():
            try:
                found = json.loads(read_plain(file))
            except (OSError, ValueError, RecursionError) as error:
                raise MMError(f"the file is damaged: {error}", where=str(file)) from None
            if not isinstance(found, dict):
                raise MMError("the file holds no settings", where=str(file), accepted="a JSON object")
            return found
    from mm_core.config.dump import to_mapping
    from mm_core.config.load import load_config

    return {"config": to_mapping(load_config(path, allow_code=allow_code))}
