"""The default process group of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from mm_core.config.sections import RunSection
from mm_core.runtime.groups import end_process_group, set_patience, start_process_group, wait_for_ranks
from mm_core.runtime.launch.signals import leaving_at_signals
from mm_core.runtime.ranks import Ranks


@contextmanager
def process_group(stuck_after: float | None = RunSection.stuck_after) -> Iterator[Ranks]:
    """Joins the default process group for the duration of a run; an existing group is used as it is.

    Args:
        stuck_after: `run.stuck_after` in seconds, the watchdog's limit; collectives wait longer.

    Yields:
        This process as one of the ranks.
    """
    set_patience(stuck_after)
    if not (joined := dist.is_initialized()):
        with leaving_at_signals("waiting for the other ranks to connect", patience=1.0, noted=True):
            start_process_group()
    ranks = Ranks.current()
    if joined:
        yield ranks
        return
    try:
        yield ranks
        with leaving_at_signals("waiting for the other ranks to end", patience=5.0):
            held = wait_for_ranks()
    except BaseException:
        if dist.get_world_size() == 1:  # with several ranks, the others may hang in a collective
            held = wait_for_ranks()
            end_process_group()
            del held
        raise
    end_process_group()
    del held
