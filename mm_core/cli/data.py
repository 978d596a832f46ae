"""`mm data inspect|check`: what a run's sources contain and leave out; which of their files are bad."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_core.cli.options import add_allow_code, config_of, count, print_json, print_table, write_named
from mm_core.errors import DataError, MMError, plural, printable

if TYPE_CHECKING:
    from mm_core.config.sections import RunConfig
    from mm_core.contracts import CountingTokenizer, Dataset, SupportsRendered
    from mm_core.data.datasets.media_report import Bucketed, Checked, Found
    from mm_core.data.loading.cut_captions import CutCaptions

_SIZES = 4  # of a source
_SHOWN = 5  # rows whose sizes differ
_AT_ONCE = 512  # captions that a tokenizer counts
_EVERY = 10.0  # seconds between two lines of progress


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="inspect|check", required=True)
    inspect = actions.add_parser(
        "inspect",
        help="media, sizes, and what is left out, of each source, and buckets",
        allow_abbrev=False,
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
    inspect.add_argument(
        "--rows",
        type=count,
        metavar="N",
        help="rows of texts (default 3), and rows of each source on the page (default 12, texts 3)",
    )
    inspect.add_argument("--page", metavar="FILE", help="write an HTML page with pictures and texts too")
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
    from mm_core.contracts import SupportsRendered
    from mm_core.data.datasets.media_page import ROWS_OF_TEXTS, render
    from mm_core.data.datasets.media_report import inspect

    every = [*_datasets(config, args.split)]
    texts: dict[str, object] = {}
    for name, data in every:
        if isinstance(data, SupportsRendered):
            rows = [_row(data, number) for number in range(min(args.rows or ROWS_OF_TEXTS, len(data)))]
            texts[name] = {"rows": len(data), "first": rows}
            if not args.json:
                _print_rows(name, len(data), rows)
    media = {name: data for name, data in every if name not in texts}
    buckets = _buckets(config, media) if media else {}
    splits = {name: (data, inspect(data, buckets.get(name))) for name, data in media.items()}
    if args.page is not None:
        shown = {name: splits.get(name, (data, [])) for name, data in every}
        write_named(Path(args.page), render(config.run.name, shown, buckets, args.rows), "--page")
    if args.json:
        found = {name: [source._asdict() for source in sources] for name, (_, sources) in splits.items()}
        print_json(texts | found | ({"buckets": _as_json(buckets)} if buckets else {}))
        return 0
    if splits:
        _print_sources({name: sources for name, (_, sources) in splits.items()})
    for name, (_, sources) in splits.items():
        for source in sources:
            for each in source.remarks():
                print(f"data.{name}: {printable(source.source)}: {printable(each)}")
    _print_buckets(buckets)
    if args.page is not None:
        print(f"page: {args.page}")
    return 0


def _row(dataset: SupportsRendered, number: int) -> dict[str, object]:
    """The pieces of a row of texts, or why it cannot be read."""
    try:
        return {"pieces": [{"text": t, "learnt": learnt} for t, learnt in dataset.rendered(number)]}
    except DataError as fault:
        return {"error": str(fault), "pieces": []}


def _print_rows(split: str, count: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """The first rows of a dataset of texts: what is learnt is green, or, in a file, within `[[` and `]]`."""
    start, end = ("\x1b[32m", "\x1b[0m") if sys.stdout.isatty() else ("[[", "]]")
    print(f"data.{split}: {plural(count, 'row')}; learnt: {start}so{end}")
    for number, row in enumerate(rows, 1):
        pieces = [(piece["text"].replace("\x1b", "\\x1b"), piece["learnt"]) for piece in row["pieces"]]
        shown = "".join(f"{start}{text}{end}" if learnt else text for text, learnt in pieces)
        print(f"\n-- {number}\n{row.get('error', shown)}")


def _buckets(config: RunConfig, datasets: Mapping[str, Dataset]) -> dict[str, Bucketed]:
    """What each split has in buckets; nothing in the loader's other modes."""
    from mm_core.data.datasets.media_report import inspected
    from mm_core.plan import build_task, report_buckets

    if config.data.loader.mode != "variable":
        return {}
    task = build_task(_of_data(config))
    return {name: report_buckets(config, task, inspected(data), name) for name, data in datasets.items()}


def _of_data(config: RunConfig) -> RunConfig:
    """The config without adapters: samples do not depend on them, and they need a library."""
    train = replace(config.train, adapters=(), also_train=(), base_dtype=None)
    return replace(config, train=train, checkpoint=replace(config.checkpoint, export=None))


def _as_json(buckets: Mapping[str, Bucketed]) -> dict[str, object]:
    return {
        split: {
            "buckets": [{**asdict(bucket), "samples": samples} for bucket, samples in each.buckets],
            "unfit": each.unfit,
            "pictures": each.pictures,
        }
        for split, each in buckets.items()
    }


def _print_sources(found: Mapping[str, Sequence[Found]]) -> None:
    head = ("SPLIT", "SOURCE", "IMAGES", "CLIPS", "PER EPOCH", "HEIGHT x WIDTH")
    rows = [
        (
            split,
            source.source,
            *(f"{n:,}" for n in (source.images, source.clips, source.samples)),
            source.probed(_SIZES),
        )
        for split, sources in found.items()
        for source in sources
    ]
    print_table([head, *rows])


def _print_buckets(buckets: Mapping[str, Bucketed]) -> None:
    from mm_core.data.datasets.media_report import BUCKET_COLUMNS

    if buckets:
        head = ("BUCKETS OF", *(name.upper() for name in BUCKET_COLUMNS))
        print()
        print_table([head, *((split, *row) for split, each in buckets.items() for row in each.table())])
    for split, each in buckets.items():
        for remark in each.remarks():
            print(f"data.{split}: {printable(remark)}")


def _check(config: RunConfig, args: argparse.Namespace) -> int:
    from mm_core.data.datasets.media_report import check, remarks
    from mm_core.data.loading.cut_captions import CutCaptions

    notes: list[str] = []
    tokenizer = _tokenizer(config, notes)
    bad: list[dict[str, object]] = []
    differing: list[dict[str, object]] = []
    total = 0
    for split, dataset in _datasets(config, args.split):
        shown, before = time.monotonic(), total
        state: Checked
        cut = CutCaptions()
        for state in _counted(check(dataset, args.workers), tokenizer, cut):
            if state.fault is not None:
                bad.append({"split": split, "file": state.name, "reason": _reason(state.fault)})
                if not args.json:
                    print(f"{printable(state.name)}: {printable(_reason(state.fault))}", flush=True)
            if state.differs:
                differing.append({"split": split, "file": state.name, "declared": state.differs})
            if time.monotonic() - shown > _EVERY:
                shown = time.monotonic()
                print(f"data.{split}: {state.done:,} of {state.of:,} read", file=sys.stderr, flush=True)
            total = before + state.done
        notes += [f"data.{split}: {each}" for each in (*remarks(dataset), cut.described()) if each]
    if args.json:
        print_json({"read": total, "bad": bad, "differing": differing, "notes": notes})
        return 1 if bad else 0
    if differing:
        what = f"the sizes in {plural(len(differing), 'row')} differ from the files, such as"
        lines = (f"  {printable(str(each['file']))}: {each['declared']}" for each in differing[:_SHOWN])
        print(f"{what}\n" + "\n".join(lines))
        print("  the files decide what is read; `where` and buckets go by the rows")
    for note in notes:
        print(printable(note))
    print(f"{plural(total, 'sample')} read, {len(bad):,} bad")
    return 1 if bad else 0


def _tokenizer(config: RunConfig, notes: list[str]) -> CountingTokenizer | None:
    """The tokenizer of the run's text encoder, if it counts; a note where its files are not there."""
    from mm_core.contracts import CountingTokenizer
    from mm_core.plan import build_task
    from mm_core.tasks.text_to_video.captions import TokenizeCaptions

    try:
        transform = build_task(_of_data(config)).batch_transform()
        if isinstance(transform, TokenizeCaptions) and isinstance(transform.tokenizer, CountingTokenizer):
            transform.tokenizer.token_counts([""])  # opens its files
            return transform.tokenizer
    except MMError as fault:
        notes.append(f"the tokens of captions are not counted: {fault.what}")
    return None


def _counted(
    states: Iterator[Checked], tokenizer: CountingTokenizer | None, cut: CutCaptions
) -> Iterator[Checked]:
    """Passes samples on and counts their captions that the tokenizer cuts."""
    waiting: list[str] = []
    for state in states:
        waiting += state.captions
        if tokenizer is not None and (len(waiting) >= _AT_ONCE or state.done == state.of):
            cut.count(tokenizer, waiting)
            waiting = []
        yield state


def _reason(fault: DataError) -> str:
    return fault.what.replace("\n", "; ")
