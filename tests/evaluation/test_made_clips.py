"""Too few clips end all ranks with one error: no rank waits for one that has given up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from mm_core.errors import ContractError
from mm_core.evaluation.sampled_clips import check_made


@dataclass
class TwoThreads:
    """Stands in for two ranks: `gather` waits for both."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=10))
    items: dict[int, Any] = field(default_factory=dict)

    def of(self, rank: int, made: int) -> None:
        class Rank:
            def gather(_, item: Any) -> list[Any]:
                self.items[rank] = item
                self.barrier.wait()
                return [self.items[0], self.items[1]]

        check_made(Rank(), "mine/task", made, 2)


@pytest.mark.parametrize(("first", "second"), ((2, 1), (0, 3)))
def test_all_ranks_end_where_one_made_too_few(first: int, second: int) -> None:
    ranks = TwoThreads()
    made = first + min(second, 2)
    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(ranks.of, rank, count) for rank, count in enumerate((first, second))]
        for end in ends:
            with pytest.raises(ContractError, match=rf"the task mine/task made {made} clips? for 4 prompts"):
                end.result()


def test_none_ends_where_all_are_there() -> None:
    ranks = TwoThreads()
    with ThreadPoolExecutor(2) as threads:
        assert [t.result() for t in [threads.submit(ranks.of, 0, 2), threads.submit(ranks.of, 1, 3)]] == [
            None
        ] * 2
