"""The conformance checks of tasks, by name."""

from __future__ import annotations

from mm_core.testing.kit import Kit, checks_of
from mm_core.testing.training.tasks import evaluations, losses, reports
from mm_core.testing.training.tasks.probe import TaskProbe

_MODULES = (module.__name__ for module in (losses, evaluations, reports))
KIT = Kit(checks_of(*_MODULES), probe=TaskProbe, ranks=("over_ranks",))
"""The conformance checks of tasks."""
