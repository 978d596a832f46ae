"""Run by each rank: opens rows, which one rank of the host reads, then rows that no rank can read.

usage: media_ranks.py ROWS: prints the folder of the rows, who has read them, and the error of the others.
"""

from __future__ import annotations

import sys

from mm_core.builtin.configs.data import MediaColumns, MediaSource
from mm_core.data.datasets.media_text import MediaTextDataset
from mm_core.errors import DataError
from support.rank_program import run_as_rank


def program(rows: str) -> None:
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    data = MediaTextDataset([MediaSource(rows)], 1, 8, 8)
    print(data.rows.folder)
    print(f"rows {'read' if rows in opened else 'mapped'}: {len(data.rows)}")
    try:
        MediaTextDataset([MediaSource(rows, columns=MediaColumns(path="file"))], 1, 8, 8)
    except DataError as fault:
        assert "no column 'file'" in fault.what
        print("the table has no column")


if __name__ == "__main__":
    run_as_rank(program)
