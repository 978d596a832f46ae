"""Run by each rank: measures conversations with the others, and prints what it found as one line of JSON.

usage: token_count_ranks.py MODEL ROWS LENGTHS BAD OTHER
ROWS: a file of conversations. LENGTHS: keeps their lengths. BAD: none of its rows can be read. OTHER: a
folder with a file of other rows for each rank.
"""

from __future__ import annotations

import json
import sys

import torch.distributed as dist

from mm_core.builtin.configs.conversations import ConversationSource as Source
from mm_core.errors import DataError
from mm_core.runtime.groups import start_process_group
from mm_core.runtime.launch.rank_process import leave
from mm_core.tasks.conversations import lengths
from mm_core.tasks.conversations.dataset import Conversations


def main() -> None:
    model, rows, kept, bad, other = sys.argv[1:]
    start_process_group()
    asked: list[str] = []
    measure = Conversations._length
    Conversations._length = lambda self, row: asked.append(row.place) or measure(self, row)
    wrote = []
    keep = lengths.Lengths._keep
    lengths.Lengths._keep = lambda self, found: wrote.append(1) or keep(self, found)

    def measured(file: str, **options) -> list[int]:
        return Conversations((Source(file),), model, **options).lengths().tolist()

    found = {"lengths": measured(rows, lengths=kept), "asked": asked[:], "wrote": len(wrote)}
    asked.clear()
    found["again"] = [measured(rows, lengths=kept), len(asked)]
    for name, file in (("bad", bad), ("other", f"{other}/{dist.get_rank()}.jsonl")):
        try:
            measured(file)
        except DataError as fault:
            found[name] = str(fault)
    print(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()
    leave(0)
