"""Run by each rank: counts captions of its own and prints the sum over the ranks that lead their share."""

from __future__ import annotations

from mm_core.data.loading.cut_captions import CutCaptions
from mm_core.runtime.ranks import Ranks
from support.rank_program import run_as_rank


def program() -> None:
    rank, own = Ranks.current().rank, CutCaptions()
    own.add(10, [20 + rank] * rank, 16)
    print(own.of_ranks(leads=rank != 1).described())


if __name__ == "__main__":
    run_as_rank(program)
