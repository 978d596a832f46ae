"""The initial weights of a run's trained components: a checkpoint, files, or random initialisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.reading import load_model_only
from mm_core.contracts import TaskModule
from mm_core.errors import PlanError, plural, some
from mm_core.loading.left_out import ExternalWeights, WeightSources, left_out
from mm_core.loading.matching import WeightMatch
from mm_core.modules.adapter_layers import adapter_of, base_name
from mm_core.modules.casting import quantise_frozen_values
from mm_core.modules.tying import trained_state
from mm_core.runtime.ranks import Ranks
from mm_core.weights.adapters.inject import AdapterWeights
from mm_core.weights.adapters.targets import skipped_layers
from mm_core.weights.fitting import formats_of


class ResumedWeights:
    """The weights of a resumed run: its checkpoint is loaded later, so they are not initialised randomly.

    Satisfies `WeightPlan`; create it on all ranks together.

    Args:
        checkpoint: the run's checkpoint.
        sources: of the run's initial weights.
        frozen: `checkpoint.frozen`: whether the next checkpoints store frozen weights.

    Attributes:
        absent: weights that the checkpoint does not store, found in their original files.
    """

    def __init__(self, checkpoint: OpenedCheckpoint, sources: WeightSources, frozen: bool | None) -> None:
        self._frozen = frozen
        state = trained_state(sources.task)
        self.absent = sources.recorded(checkpoint, state)
        self.names = (checkpoint.names("model") & state.keys()) | self.absent.names

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Reads the weights that the checkpoint does not store; its own state is loaded later."""
        self.absent.fill(state)

    def left_out(self) -> ExternalWeights:
        """The frozen weights that the next checkpoints do not store: the same, unless they store all."""
        return ExternalWeights() if self._frozen else self.absent

    def notes(self) -> list[str]:
        """Sentences for the log: the files with the weights that the checkpoint does not store."""
        starts = self.absent.starts
        return [f"{start.place}: {plural(len(names), 'frozen tensor')} loaded" for start, names in starts]


class CheckpointWeights:
    """The weights of a checkpoint, or their average, for a task that is not trained further.

    Weights that the checkpoint does not store are read from their original files; those below adapters get
    the values that training had. Satisfies `WeightPlan`; create it on all ranks together.

    Args:
        checkpoint: the run's checkpoint.
        sources: of the run's initial weights.
        weights: `model`, `ema`, or `auto`: the average if the checkpoint has one.
        rounds: whether frozen weights had a lower dtype in training.
    """

    def __init__(
        self,
        checkpoint: OpenedCheckpoint,
        sources: WeightSources,
        weights: Literal["auto", "model", "ema"],
        rounds: bool,
    ) -> None:
        self._checkpoint, self._weights, self._task = checkpoint, weights, sources.task
        self._rounds = rounds
        state = trained_state(sources.task)
        self._absent = sources.recorded(checkpoint, state)
        self.names = state.keys()
        """All names of the task: a checkpoint that lacks one is refused."""

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Reads a checkpoint's weights into the task, each rank its shards, cast to the dtypes in `state`."""
        absent = self._absent.names
        own = {name: tensor for name, tensor in state.items() if name not in absent}
        if own:
            load_model_only(self._checkpoint, own, self._weights)
        self._absent.fill(state)
        if self._rounds:
            quantise_frozen_values(self._task, state, torch.bfloat16)


class FileWeights:
    """The initial weights of a new run from files: the components' own folders, `init_from`, and adapters.

    A tensor in `init_from` is read only from there. Satisfies `WeightPlan`; create it on all ranks together.

    Args:
        sources: of weights; their task is on the meta device.
        adapters: see `AdapterWeights`.
        frozen: `checkpoint.frozen`: whether the run's checkpoints store frozen weights.

    Raises:
        MMError: weights that cannot be read, or do not fit.
    """

    def __init__(
        self, sources: WeightSources, adapters: Sequence[AdapterConfig] = (), frozen: bool | None = None
    ) -> None:
        task = self._task = sources.task
        self._adapted, self._frozen = adapters, frozen
        self._adapters = AdapterWeights(task, adapters, formats_of(sources.registry))
        self._read: list[tuple[WeightMatch, set[str]]] = []
        """The sources in reading order, and for each the names that no later source has."""
        self._known: set[str] = set()
        state = trained_state(task)
        for key, init in reversed(sources.sections.items()):
            root = key.removeprefix("task.")
            own = [name for name in state if name.startswith(f"{root}.") and adapter_of(name) is None]
            if own and self._known.issuperset(own):
                continue  # later sources have all of it: the folder is not opened
            part = sources.match(key, init, state)
            self._read.insert(0, (part, set(part.names) - self._known))
            self._known |= set(part.names)
        self.names = self._known | self._adapters.names

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Reads a run's initial weights from files: the components' own, then `init_from`, then adapters."""
        for part, names in self._read:
            if held := {name: state[name] for name in state if name in names}:
                part.fill(held)
        Ranks.current().agree("reading adapters", lambda: self._adapters.fill(state, self._known))

    def left_out(self) -> ExternalWeights:
        """The frozen weights that the run's checkpoints do not store."""
        added = self._adapters.added
        if added and self._frozen:
            raise PlanError(
                f"the file of an adapter also adds to {plural(len(added), 'weight')} of the base, which"
                " checkpoint.frozen: true would mix with those from other files",
                where="checkpoint.frozen",
                hint="set checkpoint.frozen: false",
            )
        if self._frozen or (self._frozen is None and not self._adapted):
            return ExternalWeights()
        found = left_out([part for part, _ in self._read], self._task)
        starts = (
            (start, frozenset(n for n in own if base_name(n) not in added)) for start, own in found.starts
        )
        return ExternalWeights(tuple((start, names) for start, names in starts if names))

    def notes(self) -> list[str]:
        """Sentences for the log: which initial weights were read from which files."""
        adapters = [f"{a.from_}: adapter {a.name!r} loaded" for a in self._adapters.adapters]
        left = [sentence_on(self._task, adapter) for adapter in self._adapted]
        loaded = []
        for part, names in self._read:
            given_up = len(part.names) - len(names)
            also = f"; {given_up} of them replaced by {self._read[-1][0].init.path}" if given_up else ""
            loaded.append(f"{part.init.path}: {part}{also}")
        return [*loaded, *adapters, *self._adapters.notes, *filter(None, left)]


def sentence_on(task: TaskModule, adapter: AdapterConfig) -> str:
    """A note for the log on layers in an adapter's targets that are not linear; "" if there are none."""
    found = [f"{path} ({kind})" for path, kind in skipped_layers(task, adapter).items()]
    if not found:
        return ""
    return f"adapter {adapter.name!r} changes linear layers only, and leaves out {some(found, 5)}"
