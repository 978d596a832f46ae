"""Frozen weights that checkpoints do not store and that are re-read from their original files.

A run with adapters changes about a hundredth of its weights. Its checkpoints contain the trained weights,
and for the others their files and a fingerprint; these files are read again when the run is resumed, sampled
or exported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mm_core.checkpoint.external_rows import RECIPE, ExternalRow
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.config.load import load_config
from mm_core.config.sections import InitFromSection, RunConfig
from mm_core.contracts import SupportsWeightsFrom, TaskModule, WeightsFrom
from mm_core.errors import CheckpointError, MMError, TrustError, plural
from mm_core.loading.checkpoint_source import CheckpointSource
from mm_core.loading.matching import WeightMatch
from mm_core.loading.run_adapters import task_of
from mm_core.modules.adapter_layers import adapter_of
from mm_core.runtime.ranks import Ranks
from mm_core.weights.fitting import Formats, formats_of
from mm_core.weights.formats.part_of import FormatOfPart


@dataclass(frozen=True)
class ExternalWeights:
    """Frozen weights that a checkpoint does not store, with the files to read them from.

    Satisfies `WeightPlan`.

    Attributes:
        starts: sources of weights, and for each the names (paths in the task) that are read from it.
    """

    starts: tuple[tuple[WeightMatch, frozenset[str]], ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """Names of all weights that the checkpoint does not store."""
        return frozenset(name for _, names in self.starts for name in names)

    def rows(self, literals: Collection[str] = ()) -> list[dict[str, Any]]:
        """The manifest's rows for weights that the checkpoint does not store: one row per source.

        Call it on all ranks.

        Args:
            literals: config keys that the environment sets; a path from the environment is not recorded.
        """
        rows: list[dict[str, Any]] = []
        for start, names in self.starts:
            secret = any(key.startswith(f"{start.key}.") for key in literals)
            recipe = {key: value for key, value in asdict(start.init).items() if key in RECIPE}
            place = {"path": None if secret else str(start.place), "tensors": len(names)}
            rows.append({"key": start.key, **place, **recipe, "sha256": _contents(start, names)})
        return rows

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Reads weights that the checkpoint does not store into `state`'s tensors. Call it on all ranks."""
        for start, names in self.starts:
            if wanted := {name: tensor for name, tensor in state.items() if name in names}:
                start.fill(wanted)


def starts_of(config: RunConfig, task: TaskModule) -> list[tuple[str, InitFromSection]]:
    """The sources of a run's initial weights in reading order, by config key: the components' folders, then
    `init_from`."""
    rows = [(f"task.{root}", _own(task, root)) for root in task.trainable]
    places = (*rows, ("init_from", config.init_from))
    return [(key, init) for key, init in places if init is not None]


def left_out(starts: Sequence[WeightMatch], task: TaskModule, config: RunConfig) -> ExternalWeights:
    """The frozen weights that a new run's checkpoints do not store: those unchanged since one of `starts`."""
    held = config.checkpoint.frozen
    if held or (held is None and not config.train.adapters):
        return ExternalWeights()
    frozen = frozen_names(task)
    last = {name: start for start in starts for name in start.names if name in frozen}
    owned = ((start, frozenset(n for n, owner in last.items() if owner is start)) for start in starts)
    return ExternalWeights(tuple((start, names) for start, names in owned if names))


def frozen_names(task: TaskModule) -> set[str]:
    """Names of a task's frozen parameters in its trained components, without those of adapters."""
    roots = task.trainable
    return {
        name
        for root in roots
        for name, parameter in task.get_submodule(root).named_parameters(prefix=root)
        if not parameter.requires_grad and adapter_of(name) is None
    }


def recorded(
    checkpoint: OpenedCheckpoint, config: RunConfig, task: TaskModule, state: Mapping[str, Tensor]
) -> ExternalWeights:
    """Finds the frozen weights that a checkpoint does not store in their files. Call it on all ranks.

    Args:
        checkpoint: the run's checkpoint.
        config: the run's current config, which may have new paths for moved files.
        task: with its adapters in place.
        state: the task's parameters and buffers, by path.

    Raises:
        CheckpointError: files that no longer exist, or whose weights have changed.
    """
    rows = checkpoint.external
    absent = set(state).intersection(frozen_names(task)) - checkpoint.names("model")
    starts: list[tuple[WeightMatch, frozenset[str]]] = []
    # Later sources replaced earlier ones, so they are found first.
    for row in reversed(rows if absent else []):
        faults = []
        for path in _places(row, config, task):
            init = InitFromSection(path=path, **row.recipe)
            try:
                start = start_at(row.key, init, task, config, state)
                names = absent.intersection(start.names)
                if len(names) != row.tensors or _contents(start, names) != row.sha256:
                    raise CheckpointError("its weights have changed since the run used them", where=path)
            except TrustError:
                raise
            except MMError as fault:
                faults.append(fault)
                continue
            starts.insert(0, (start, frozenset(names)))
            absent = absent - names
            break
        else:
            raise _lost(row, checkpoint.folder, faults)
    return ExternalWeights(tuple(starts))


def started(
    saved: CheckpointSource,
    config: RunConfig,
    task: TaskModule,
    base: ExternalWeights,
    names: set[str],
) -> ExternalWeights:
    """The files in which a run's trained weights had their first values. Call it on all ranks.

    Args:
        saved: a checkpoint of the run.
        config: the run's current config.
        task: with its adapters in place.
        base: the frozen weights that the checkpoint does not store: their files are known to be the run's.
        names: the weights, by path in the task.

    Raises:
        CheckpointError: files whose weights have changed.
    """
    known = {start.key: start for start, _ in base.starts}
    state = dict(task.state_dict(keep_vars=True))
    rows = [row for row in starts_of(config, task) if row[0] not in known]
    starts = {key: start_at(key, init, task, config, state) for key, init in rows}
    # In reading order: later sources replace earlier ones, and an imported checkpoint's comes last.
    order = [key for key, _ in starts_of(config, task)]
    every = {**dict.fromkeys(order), **known, **starts}
    owners = {name: start for start in every.values() if start is not None for name in start.names}
    kept = frozen_names(task).intersection(saved.shapes) - base.names - names
    for start in starts.values():
        _check_unchanged(start, saved, [name for name in kept if owners.get(name) is start])
    wanted = {name: owners[name] for name in names if name in owners}
    return ExternalWeights(
        tuple(
            (start, frozenset(name for name, owner in wanted.items() if owner is start))
            for start in dict.fromkeys(wanted.values())
        )
    )


def _check_unchanged(start: WeightMatch, saved: CheckpointSource, names: Iterable[str]) -> None:
    """CheckpointError if files differ from a checkpoint in biases and norms, which are small."""
    for name in sorted(name for name in names if len(saved.shapes[name]) == 1):
        theirs, ours = (torch.empty(saved.shapes[name], dtype=saved.dtypes[name]) for _ in range(2))
        start.fill({name: theirs})
        Ranks.current().agree(f"reading {name}", partial(saved.fill, {name: ours}))
        if not torch.equal(theirs, ours):
            raise CheckpointError("its weights have changed since the run used them", where=str(start.place))


def source_of_run(path: Path, weights: Literal["model", "ema"], allow_code: bool = False) -> CheckpointSource:
    """Opens a checkpoint as initial weights, with the frozen weights that it does not store.

    Raises:
        TrustError: the checkpoint's run has code that this user has not trained with (unless `allow_code`).
    """
    source = CheckpointSource(path, weights)
    checkpoint = source.checkpoint
    if checkpoint.external:
        config = load_config(checkpoint.folder / "config.yaml", stored=True, allow_code=allow_code)
        task = task_of(config, checkpoint)
        state = {
            f"{root}.{name}": tensor
            for root in task.trainable
            for name, tensor in task.get_submodule(root).state_dict().items()
        }
        source.join(recorded(checkpoint, config, task, state), state)
    return source


def _places(row: ExternalRow, config: RunConfig, task: TaskModule) -> list[str]:
    """Paths where the weights may be: from the checkpoint, and from the current config."""
    root = row.key.removeprefix("task.")
    own = config.init_from if row.key == "init_from" else _own(task, root)
    return list(dict.fromkeys(path for path in (row.path, own.path if own is not None else None) if path))


def _contents(start: WeightMatch, names: Collection[str]) -> str:
    return Ranks.current().on_first(f"reading {start.init.path}", lambda: start.fingerprint(names))


def _lost(row: ExternalRow, checkpoint: Path, faults: Sequence[MMError]) -> CheckpointError:
    reasons = "; ".join(f"{fault.where}: {fault.what}" for fault in faults)
    return CheckpointError(
        f"this checkpoint does not contain {plural(row.tensors, 'frozen weight')}, and their files cannot be"
        f" used: {reasons or 'no config names them'}",
        where=str(checkpoint),
        accepted="the files that the run started from",
        hint=f"put the files back, or set {row.key} to their new place; to store such weights in checkpoints,"
        " train with checkpoint.frozen: true",
    )


def _own(task: TaskModule, root: str) -> InitFromSection | None:
    """The files that a component's own config names."""
    given = _given(task, root)
    if given is None:
        return None
    new = tuple(f"{root}.{path}" for path in given.new)
    return InitFromSection(path=given.path, format=given.format, include=(root,), exclude=new)


def _given(task: TaskModule, root: str) -> WeightsFrom | None:
    component = task.get_submodule(root) if root in task.trainable else None
    return component.weights_from if isinstance(component, SupportsWeightsFrom) else None


def start_at(
    key: str, init: InitFromSection, task: TaskModule, config: RunConfig, state: Mapping[str, Tensor]
) -> WeightMatch:
    """Matches one of `starts_of` with a task. Call it on all ranks.

    Args:
        key: config key of the source.
        init: its section.
        task: on the meta device or not; weight formats inspect its components.
        config: the run's config.
        state: the task's parameters and buffers, by path.
    """
    roots = task.trainable if key == "init_from" else (key.removeprefix("task."),)
    parts = {root: task.get_submodule(root) for root in roots}
    formats: Formats = formats_of(config.registry, init.format)
    for root, component in parts.items() if key != "init_from" else ():
        if (given := _given(task, root)) is not None and given.part:
            formats = {name: FormatOfPart(one, root, component) for name, one in formats.items()}
    open_run = partial(source_of_run, allow_code=config.allow_code)
    return WeightMatch(init, state, parts, formats, key, open_run)
