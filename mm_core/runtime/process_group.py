"""The default process group of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from mm_core.config.sections import RunSection
from mm_core.runtime.groups import set_patience, start_process_group, wait_for_ranks
from mm_core.runtime.launch.signals import leaving_at_signals
from mm_core.runtime.ranks import Ranks


@contextmanager
def process_group(stuck_after: float | None = RunSection.stuck_after) -> Iterator[Ranks]:
    """The default process group for the length of a run, and this process in it. One that the caller made is
    left alone.

    stuck_after: `run.stuck_after`, which the watchdog ends the run by.
    """
    set_patience(stuck_after)
    if dist.is_initialized():
        yield Ranks.current()
        return
    with leaving_at_signals("waited for the other ranks to come"):
        start_process_group()
    try:
        yield Ranks.current()
        with leaving_at_signals("waited for the other ranks to end", patience=5.0):
            held = wait_for_ranks()
    except BaseException:
        if dist.get_world_size() == 1:  # among several, the others may wait in a collective for ever
            held = wait_for_ranks()
            dist.destroy_process_group()
            del held
        raise
    dist.destroy_process_group()
    del held
