"""The conformance checks of engines (`mm_core.contracts.Engine`).

An engine is driven by its contract alone, and compared with a loop of plain torch over the same task.
"""

from __future__ import annotations

from functools import wraps

from mm_core.runtime.process_group import process_group
from mm_core.testing.kit import Check, Kit, checks_of
from mm_core.testing.training.engines import sharded, steps, weights
from mm_core.testing.training.engines.probe import EngineProbe


def _in_group(check: Check) -> Check:
    """The check within a process group of this process, which an engine needs."""

    @wraps(check)
    def grouped(probe: EngineProbe) -> None:
        with process_group():
            probe.require_device(probe.build().device)
            check(probe)

    return grouped


_ALONE = checks_of(weights.__name__, steps.__name__)
_ON_RANKS = checks_of(sharded.__name__)
KIT = Kit(
    {**{name: _in_group(check) for name, check in _ALONE.items()}, **_ON_RANKS},
    probe=EngineProbe,
    ranks=tuple(_ON_RANKS),
)
"""The conformance checks of engines."""
