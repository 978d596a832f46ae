"""Files that a run needs and that are missing."""

from __future__ import annotations

from pathlib import Path

from mm_core.config.components import absent_inputs
from mm_core.config.sections import RunConfig
from mm_core.contracts import Frozen, SupportsWeightsFrom, TaskModule
from mm_core.plan.run_plan import MissingFile
from mm_core.plugin.checks.values import returned
from mm_core.weights.stored import missing_at


def missing_files(config: RunConfig, task: TaskModule) -> tuple[MissingFile, ...]:
    """Missing files: of trained and frozen components, of others (a scheduler) for sampling, and of data."""
    trained = task.trainable
    frozen = task.frozen
    found = []
    for name in trained:
        component = task.get_submodule(name)
        given = component.weights_from if isinstance(component, SupportsWeightsFrom) else None
        paths = missing_at(Path(given.path)) if given is not None else []
        found += [MissingFile(path, name, "to begin") for path in paths]
    others = [name for name in config.task.options if name not in (*trained, *frozen)]
    samples = config.validation is not None and config.validation.samples is not None
    for name in (*frozen, *others):
        part = getattr(task, name, None)  # an option of a task need not be an attribute
        if isinstance(part, Frozen):
            now = name in frozen or samples
            paths = returned(Frozen.missing_files, part.missing_files(), part)
            found += [MissingFile(path, name, "to train" if now else "to sample") for path in paths]
    for split, paths in absent_inputs(config).items():
        found += [MissingFile(path, f"data.{split}", "to train") for path in paths]
    return tuple(found)
