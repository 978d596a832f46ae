"""`mm report`: writes one HTML page about one or several runs."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from mm_core.cli.options import human_size, write_named


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder; several runs are compared")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="file for the page (default: report.html in the run's folder, or here for several runs)",
    )
    parser.add_argument(
        "--max-mb",
        type=_megabytes,
        default=20.0,
        metavar="MB",
        help="size limit for clips in the page; above it, contact sheets, then file names (default 20)",
    )


def execute(args: argparse.Namespace) -> int:
    """Runs `mm report`: writes the page about the runs and prints its path."""
    from mm_core.report.page import render
    from mm_core.report.reading import read_runs

    runs = read_runs([Path(run) for run in args.runs])
    out = Path(args.out) if args.out else (runs[0].folder if len(runs) == 1 else Path()) / "report.html"
    text = render(runs, int(args.max_mb * 1e6))
    write_named(out, text, "--out")
    for run in runs:
        for remark in run.remarks:
            print(f"{run.label}: {remark}")
    print(f"{out} ({human_size(len(text.encode()))})")
    return 0


def _megabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 2000:
        raise argparse.ArgumentTypeError(f"{text} is not a number between 0 and 2000")
    return value
