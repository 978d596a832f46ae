"""The files and folders that a run's initial weights came from, followed back through earlier runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from mm_core.checkpoint.reading import open_checkpoint
from mm_core.config.load import load_config
from mm_core.config.sections import InitFromSection
from mm_core.contracts import SupportsWeightsFrom, TaskModule
from mm_core.errors import MMError, TrustError
from mm_core.plan import build_task

_RUNS = 8
"""Maximum number of earlier runs that are followed."""


def given_weights(init_from: InitFromSection | None, facts: Mapping[str, Any]) -> str | None:
    """The path of a run's initial weights, from `mm import` or `init_from`; None for none."""
    imported = facts.get("imported")
    if isinstance(imported, Mapping):
        return str(imported.get("path"))
    return init_from.path if init_from is not None else None


def own_weights(component: nn.Module) -> str | None:
    """The path of the weights that a component's own config names; None for none."""
    named = component.weights_from if isinstance(component, SupportsWeightsFrom) else None
    return named.path if named is not None else None


def sources_of(
    given: str | None,
    task: TaskModule,
    allow_code: bool,
    note: Callable[[str], None] = lambda sentence: None,
    runs: int = _RUNS,
) -> dict[str, tuple[Path, ...]]:
    """The paths that each trained component's initial weights came from, most recent first.

    Some paths may no longer exist.

    Args:
        given: from `given_weights` of a checkpoint.
        task: built from its config.
        allow_code: run code of earlier runs even if this user has not trained with it.
        note: called with a message about a run that is not followed because its code is unknown.
        runs: how many earlier runs to follow.
    """
    before: Mapping[str, tuple[Path, ...]] = {}
    if given is not None and runs > 0:
        before = _earlier_runs(Path(given), allow_code, note, runs - 1)
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
        config = load_config(
            checkpoint.folder / "config.yaml", stored=True, allow_code=allow_code, fetch="configs"
        )
        task, given = (
            build_task(config, checkpoint.adapters),
            given_weights(config.init_from, checkpoint.facts),
        )
        return sources_of(given, task, config.allow_code, note, runs)
    except TrustError as fault:
        note(f"the initial weights of the run at {path} are unknown: {fault.render()}")
        return {}
    except MMError:
        return {}
