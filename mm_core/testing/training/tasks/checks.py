"""The conformance checks of tasks, by name."""

from __future__ import annotations

from mm_core.testing.kit import Kit, by_name
from mm_core.testing.training.tasks.evaluations import clips, evaluation
from mm_core.testing.training.tasks.losses import (
    accepts_its_data,
    bins,
    determinism,
    gradients,
    initialisation,
    inputs_unchanged,
    loss,
    modules,
    over_ranks,
    sharded_modules,
    sums,
    transforms,
    weights,
)
from mm_core.testing.training.tasks.probe import TaskProbe
from mm_core.testing.training.tasks.reports import (
    answers,
    cached_features,
    notes,
    sample_flops,
    sample_forward,
)

KIT = Kit(
    by_name(
        *(modules, initialisation, accepts_its_data, transforms, loss, weights, sums, determinism),
        *(inputs_unchanged, gradients, sharded_modules, bins, evaluation, clips),
        *(answers, notes, sample_flops, sample_forward, cached_features, over_ranks),
    ),
    probe=TaskProbe,
    ranks=("over_ranks",),
)
"""The conformance checks of tasks."""
