"""The beginning and the end of programs that `support.ranks.run_ranks` starts."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch.distributed as dist

from mm_core.runtime.groups import start_process_group
from mm_core.runtime.launch.rank_process import leave


def run_as_rank(main: Callable[..., None]) -> None:
    """Joins the other ranks, calls `main` with the program's arguments, and leaves with them."""
    start_process_group()
    main(*sys.argv[1:])
    dist.barrier()
    dist.destroy_process_group()
    leave(0)  # torch's teardown of gloo aborts now and then
