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
from mm_core.config.sections import InitFromSection
from mm_core.contracts import SupportsWeightsFrom, TaskModule, WeightsFrom
from mm_core.errors import CheckpointError, MMError, TrustError, plural
from mm_core.loading.checkpoint_source import CheckpointSource
from mm_core.loading.matching import WeightMatch
from mm_core.modules.adapter_layers import adapter_of
from mm_core.plan import build_task
from mm_core.plugin.registry import Registry
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


@dataclass(frozen=True)
class WeightSources:
    """The sources of a run's initial weights: the files that its components name, then `init_from`.

    Attributes:
        task: with its adapters in place, on the meta device or not; weight formats inspect its components.
        init_from: the section of the run's current config, which may have new paths for moved files.
        registry: the components of the run's plugins.
        allow_code: run code of earlier runs even if this user has not trained with it.
    """

    task: TaskModule
    init_from: InitFromSection | None
    registry: Registry
    allow_code: bool = False

    @property
    def sections(self) -> dict[str, InitFromSection]:
        """The sources in reading order, by config key."""
        rows = {f"task.{root}": _own(self.task, root) for root in self.task.trainable}
        return {key: init for key, init in {**rows, "init_from": self.init_from}.items() if init is not None}

    def match(self, key: str, init: InitFromSection, state: Mapping[str, Tensor]) -> WeightMatch:
        """Matches a source with the task. Call it on all ranks.

        Args:
            key: config key of the source.
            init: its section.
            state: the task's parameters and buffers, by path.
        """
        roots = self.task.trainable if key == "init_from" else (key.removeprefix("task."),)
        parts = {root: self.task.get_submodule(root) for root in roots}
        formats: Formats = formats_of(self.registry, init.format)
        for root, component in parts.items() if key != "init_from" else ():
            if (given := _given(self.task, root)) is not None and given.part:
                formats = {name: FormatOfPart(one, root, component) for name, one in formats.items()}
        open_run = partial(source_of_run, allow_code=self.allow_code)
        return WeightMatch(init, state, parts, formats, key, open_run)

    def recorded(self, checkpoint: OpenedCheckpoint, state: Mapping[str, Tensor]) -> ExternalWeights:
        """Finds the frozen weights that a checkpoint does not store in their files. Call it on all ranks.

        Args:
            checkpoint: the run's checkpoint.
            state: the task's parameters and buffers, by path.

        Raises:
            CheckpointError: files that no longer exist, or whose weights have changed.
        """
        rows = checkpoint.external
        absent = set(state).intersection(frozen_names(self.task)) - checkpoint.names("model")
        starts: list[tuple[WeightMatch, frozenset[str]]] = []
        # Later sources replaced earlier ones, so they are found first.
        for row in reversed(rows if absent else []):
            faults, own = [], self.sections.get(row.key)
            for path in dict.fromkeys(filter(None, (row.path, own.path if own is not None else None))):
                init = InitFromSection(path=path, **row.recipe)
                try:
                    start = self.match(row.key, init, state)
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

    def started(self, saved: CheckpointSource, base: ExternalWeights, names: set[str]) -> ExternalWeights:
        """The files in which a run's trained weights had their first values. Call it on all ranks.

        Args:
            saved: a checkpoint of the run.
            base: the frozen weights that the checkpoint does not store, in files known to be the run's.
            names: the weights, by path in the task.

        Raises:
            CheckpointError: files whose weights have changed.
        """
        known = {start.key: start for start, _ in base.starts}
        state = dict(self.task.state_dict(keep_vars=True))
        sections = self.sections
        starts = {key: self.match(key, init, state) for key, init in sections.items() if key not in known}
        # In reading order: later sources replace earlier ones, and an imported checkpoint's comes last.
        every = {**dict.fromkeys(sections), **known, **starts}
        owners = {name: start for start in every.values() if start is not None for name in start.names}
        kept = frozen_names(self.task).intersection(saved.shapes) - base.names - names
        for start in starts.values():
            _check_unchanged(start, saved, [name for name in kept if owners.get(name) is start])
        wanted = {name: owners[name] for name in names if name in owners}
        return ExternalWeights(
            tuple(
                (start, frozenset(name for name, owner in wanted.items() if owner is start))
                for start in dict.fromkeys(wanted.values())
            )
        )


def left_out(starts: Sequence[WeightMatch], task: TaskModule) -> ExternalWeights:
    """The frozen weights of a new run that are unchanged since one of `starts`."""
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


def _check_unchanged(start: WeightMatch, saved: CheckpointSource, names: Iterable[str]) -> None:
    """CheckpointError if files differ from a checkpoint in biases and norms, which are small."""
    for name in sorted(name for name in names if len(saved.shapes[name]) == 1):
        theirs, ours = (torch.empty(saved.shapes[name], dtype=saved.dtypes[name]) for _ in range(2))
        start.fill({name: theirs})
        saved.ranks.agree(f"reading {name}", partial(saved.fill, {name: ours}))
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
        config = load_config(
            checkpoint.folder / "config.yaml", stored=True, allow_code=allow_code, fetch=True
        )
        task = build_task(config, checkpoint.adapters)
        state = {
            f"{root}.{name}": tensor
            for root in task.trainable
            for name, tensor in task.get_submodule(root).state_dict().items()
        }
        sources = WeightSources(task, config.init_from, config.registry, config.allow_code)
        source.join(sources.recorded(checkpoint, state), state)
    return source


def _contents(start: WeightMatch, names: Collection[str]) -> str:
    return start.ranks.on_first(f"reading {start.init.path}", lambda: start.fingerprint(names))


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
