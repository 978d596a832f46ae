"""The files and folders that a run's initial weights came from, followed back through earlier runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from mm_core.checkpoint.reading import open_checkpoint
from mm_core.config.load import load_config
from mm_core.config.sections import RunConfig
from mm_core.contracts import SupportsWeightsFrom, TaskModule
from mm_core.errors import MMError, TrustError
from mm_core.loading.run_adapters import task_of

_RUNS = 8
"""Maximum number of earlier runs that are followed."""


def given_weights(config: RunConfig, facts: Mapping[str, Any]) -> str | None:
    """The path of a run's initial weights, from `mm import` or `init_from`; None for none."""
    imported = facts.get("imported")
    if isinstance(imported, Mapping):
        return str(imported.get("path"))
    return config.init_from.path if config.init_from is not None else None


def own_weights(component: nn.Module) -> str | None:
    """The path of the weights that a component's own config names; None for none."""
    named = component.weights_from if isinstance(component, SupportsWeightsFrom) else None
    return named.path if named is not None else None


def sources_of(
    config: RunConfig,
    facts: Mapping[str, Any],
    task: TaskModule,
    note: Callable[[str], None] = lambda sentence: None,
    runs: int = _RUNS,
) -> dict[str, tuple[Path, ...]]:
    """The paths that each trained component's initial weights came from, most recent first.

    Some paths may no longer exist.

    Args:
        config: config of a checkpoint.
        facts: facts of the checkpoint.
        task: built from that config.
        note: called with a message about a run that is not followed because its code is unknown.
        runs: how many earlier runs to follow.
    """
    given = given_weights(config, facts)
    before: Mapping[str, tuple[Path, ...]] = {}
    if given is not None and runs > 0:
        before = _earlier_runs(Path(given), config.allow_code, note, runs - 1)
    found: dict[str, tuple[Path, ...]] = {}
    for root in task.trainable:
        named = (given, own_weights(task.get_submodule(root)))
        found[root] = tuple(Path(path) for path in named if path is not None) + before.get(root, ())
    return found


def _earlier_runs(
    path: Path, allow_code: bool, note: Callable[[str], None], runs: int
) -> dict[str, tuple[Path, ...]]:
    """The sources of the run at `path`, if there is one that can still be read."""
    if not any((path / name).exists() for name in ("checkpoints", "config.yaml")):
        return {}
    try:
        checkpoint = open_checkpoint(path)
        config = load_config(checkpoint.folder / "config.yaml", stored=True, allow_code=allow_code)
        return sources_of(config, checkpoint.facts, task_of(config, checkpoint), note, runs)
    except TrustError as fault:
        note(f"the initial weights of the run at {path} are unknown: {fault.render()}")
        return {}
    except MMError:
        return {}
