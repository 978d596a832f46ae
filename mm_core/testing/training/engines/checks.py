"""The conformance checks of engines (`mm_core.contracts.Engine`).

An engine is driven by its contract alone, and compared with a loop of plain torch over the same task.
"""

from __future__ import annotations

from functools import wraps

from mm_core.runtime.process_group import process_group
from mm_core.testing.kit import Check, Kit, by_name
from mm_core.testing.training.engines.probe import EngineProbe
from mm_core.testing.training.engines.sharded import sharded_checkpoint, sharded_training
from mm_core.testing.training.engines.steps import (
    clipping,
    evaluation,
    gradient_norm,
    learning_rates,
    micro_batches,
    skipped_steps,
    trains,
    untrained,
)
from mm_core.testing.training.engines.weights import (
    exported_weights,
    frozen_weights,
    initial_weights,
    initialises,
    plans,
    resumes,
    shards,
)

_ALONE = (
    *(plans, initialises, initial_weights, trains, micro_batches, gradient_norm, clipping),
    *(learning_rates, skipped_steps, resumes, exported_weights, shards, frozen_weights, evaluation),
    untrained,
)
_ON_RANKS = by_name(sharded_training, sharded_checkpoint)


def _in_group(check: Check) -> Check:
    """The check within a process group of this process, which an engine needs."""

    @wraps(check)
    def grouped(probe: EngineProbe) -> None:
        with process_group():
            probe.require_device(probe.build().device)
            check(probe)

    return grouped


KIT = Kit(by_name(*map(_in_group, _ALONE), *_ON_RANKS.values()), probe=EngineProbe, ranks=tuple(_ON_RANKS))
"""The conformance checks of engines."""
