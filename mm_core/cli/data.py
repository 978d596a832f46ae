"""`mm data inspect|check`: what a run's sources contain and leave out; which of their files are bad."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from mm_core.cli.options import add_allow_code, config_of, count, print_json, print_table, write_page
from mm_core.errors import DataError, MMError, plural

if TYPE_CHECKING:
    from mm_core.config.sections import RunConfig
    from mm_core.contracts import Dataset
    from mm_core.data.datasets.media_report import Checked

_SHOWN = 5  # rows whose sizes differ
_EVERY = 10.0  # seconds between two lines of progress


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="inspect|check", required=True)
    inspect = actions.add_parser(
        "inspect", help="rows, media, sizes, and what is left out, of each source", allow_abbrev=False
    )
    check = actions.add_parser(
        "check", help="decode everything once and list the bad files (exit code 1)", allow_abbrev=False
    )
    for action in (inspect, check):
        action.add_argument("--config", required=True, metavar="YAML", help="the run's config file")
        action.add_argument("overrides", nargs="*", metavar="key=value", help="override a config key")
        action.add_argument("--split", metavar="SPLIT", help="only train, validation or test")
        action.add_argument("--json", action="store_true", help="print JSON")
        add_allow_code(action)
    inspect.add_argument("--page", metavar="FILE", help="write an HTML page with contact sheets too")
    check.add_argument(
        "--workers", type=count, default=4, metavar="N", help="threads that decode (default 4)"
    )


def execute(args: argparse.Namespace) -> int:
    """Runs `mm data inspect` or `check` and returns its exit code."""
    config = config_of(args)
    return _inspect(config, args) if args.action == "inspect" else _check(config, args)


def _datasets(config: RunConfig, split: str | None) -> Iterator[tuple[str, Dataset]]:
    from mm_core.data.loading.seeding import build_dataset

    splits = config.data.splits
    if config.data.loader.mode == "base":
        what = "`mm data` reads sources of media_text, but this run reads a Dataset as it is (mode: base)"
        raise MMError(what, where="data.loader.mode", hint="look at the Dataset in Python")
    if split is not None and split not in splits:
        raise MMError(f"the config has no data.{split}", accepted=", ".join(splits))
    for name in splits if split is None else [split]:
        yield name, build_dataset(config.registry, splits[name], config.run.seed)


def _inspect(config: RunConfig, args: argparse.Namespace) -> int:
    from mm_core.data.datasets.media_report import inspect

    splits = {name: (data, inspect(data)) for name, data in _datasets(config, args.split)}
    found = {name: sources for name, (_, sources) in splits.items()}
    if args.page is not None:
        from mm_core.data.datasets.media_page import render

        write_page(Path(args.page), render(config.run.name, splits), "--page")
    if args.json:
        print_json({name: [source._asdict() for source in sources] for name, sources in found.items()})
        return 0
    head = ("SPLIT", "SOURCE", "IMAGES", "CLIPS", "PER EPOCH", "SIZES")
    rows = [
        (
            split,
            source.source,
            *(f"{n:,}" for n in (source.images, source.clips, source.samples)),
            "; ".join(islice(source.sizes, 4)) or "unknown",
        )
        for split, sources in found.items()
        for source in sources
    ]
    print_table([head, *rows])
    for split, sources in found.items():
        for source in sources:
            for reason, left_out in source.left_out.items():
                print(f"data.{split}: {source.source}: {plural(left_out, 'row')} left out: {reason}")
    if args.page is not None:
        print(f"contact sheets: {args.page}")
    return 0


def _check(config: RunConfig, args: argparse.Namespace) -> int:
    from mm_core.data.datasets.media_report import check

    bad: list[dict[str, object]] = []
    differing: list[dict[str, object]] = []
    total = 0
    for split, dataset in _datasets(config, args.split):
        shown = time.monotonic()
        state: Checked
        for state in check(dataset, args.workers):
            if state.fault is not None:
                bad.append({"split": split, "file": state.name, "reason": _reason(state.fault)})
                if not args.json:
                    print(f"{state.name}: {_reason(state.fault)}", flush=True)
            if state.differs:
                differing.append({"split": split, "file": state.name, "declared": state.differs})
            if time.monotonic() - shown > _EVERY:
                shown = time.monotonic()
                print(f"data.{split}: {state.done:,} of {state.of:,} read", file=sys.stderr, flush=True)
            total += 1
    if args.json:
        print_json({"read": total, "bad": bad, "differing": differing})
        return 1 if bad else 0
    if differing:
        what = f"the sizes in {plural(len(differing), 'row')} differ from the files, such as"
        print(f"{what}\n" + "\n".join(f"  {each['file']}: {each['declared']}" for each in differing[:_SHOWN]))
        print("  the files decide what is read; `where` and buckets go by the rows")
    print(f"{plural(total, 'sample')} read, {len(bad):,} bad")
    return 1 if bad else 0


def _reason(fault: DataError) -> str:
    return fault.what.replace("\n", "; ")
