"""`mm` as one rank, which prints a line after each chunk of measured rows. usage: stopped_run.py WORDS"""

from __future__ import annotations

import sys

from mm_core.cli.main import main
from mm_core.tasks.conversations import token_counts

if __name__ == "__main__":
    token_counts.SECONDS = 0.0
    raise SystemExit(main(sys.argv[1:]))
