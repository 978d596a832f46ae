"""Options that several commands take, and how they print sizes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mm_core.config.sections import RunConfig


def add_allow_code(parser: argparse.ArgumentParser) -> None:
    """The consent to run what the config of a stored run names."""
    parser.add_argument(
        "--allow-code",
        action="store_true",
        help="run the code that a stored run's config names, though you have not trained with it",
    )


def config_of(args: argparse.Namespace) -> RunConfig:
    """The config that --config names, under the overrides. MMError with every fault of it."""
    from mm_core.config.load import load_config

    return load_config(args.config, args.overrides, allow_code=args.allow_code)


def count(text: str) -> int:
    """A number of things, of which there is at least one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def human_size(size: float, digits: int = 1) -> str:
    """Bytes as `12 B`, `3.4 kB`. digits: of gigabytes."""
    for unit, places in (("B", 0), ("kB", 1), ("MB", 1)):
        if size < 1000:
            return f"{size:.{places}f} {unit}"
        size /= 1000
    return f"{size:.{digits}f} GB"
