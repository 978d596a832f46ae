"""`--allow-code`, of every command that reads the config of a stored run."""

from __future__ import annotations

import argparse


def add_allow_code(parser: argparse.ArgumentParser) -> None:
    """The consent to run what the config of a stored run names."""
    parser.add_argument(
        "--allow-code",
        action="store_true",
        help="run the code that a stored run's config names, though you have not trained with it",
    )
