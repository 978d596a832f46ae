"""Run by each of two ranks: stores a tensor of which each rank holds a range.

usage: flat_ranks.py OUT
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mm_core.checkpoint.files import dcp
from mm_core.checkpoint.files.fingerprints import fingerprints
from mm_core.errors import CheckpointError
from mm_core.modules.flat_shards import FlatShard
from mm_core.runtime.ranks import Ranks
from support.rank_program import run_as_rank


def main(out: str) -> None:
    ranks, values = Ranks.current(), torch.arange(60.0)
    for cut in (17, 0, 60):
        start, stop = ((0, cut), (cut, 60))[ranks.rank]
        held = FlatShard(values[start:stop].clone(), (3, 4, 5), start)
        assert torch.equal(held.gathered(), values.view(3, 4, 5))
        state = {"model": {"a": held}}
        live = fingerprints(1, state)
        dcp.write_tensors(Path(out) / str(cut), state, ranks=ranks, expected=live)
    cut = slice(17) if ranks.rank == 0 else slice(17, 60)
    held = FlatShard(values[cut].clone(), (3, 4, 5), cut.start or 0)
    state = {"model": {"a": held}}
    live = fingerprints(1, state)
    if ranks.rank == 1:
        held.share[-1] += 1
    folder = Path(out) / "bad"
    with pytest.raises(CheckpointError, match=r"the copy of model\.a"):
        ranks.agree("writing", lambda: dcp.write_tensors(folder, state, ranks=ranks, expected=live))


if __name__ == "__main__":
    run_as_rank(main)
