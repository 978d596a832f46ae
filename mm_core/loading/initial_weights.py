"""Where the trained weights of a run come from: a checkpoint, files, or chance."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from torch import Tensor

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.checkpoint.files.layout import listed
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.reading import load_model_only
from mm_core.config.schema import RunConfig
from mm_core.contracts import TaskModule
from mm_core.loading.left_out import ExternalWeights, left_out, recorded, starts_of
from mm_core.loading.matching import WeightMatch
from mm_core.modules.adapter_layers import adapter_of
from mm_core.runtime.ranks import Ranks
from mm_core.weights.adapters.inject import AdapterWeights, passed_over
from mm_core.weights.fitting import formats_of


class ResumedWeights:
    """Weights that a checkpoint brings after the engine is ready: nothing is drawn for them.

    Args:
        checkpoint: of the run. config: of the run as it is now. task: with its adapters in place.
    """

    def __init__(self, checkpoint: OpenedCheckpoint, config: RunConfig, task: TaskModule) -> None:
        self._names = checkpoint.names("model")
        self._checkpoint, self._config, self._task = checkpoint, config, task
        self.absent = ExternalWeights()
        """What the checkpoint leaves to other files, once `covers` was called."""

    def covers(self, state: Mapping[str, Tensor]) -> Collection[str]:
        """What the checkpoint holds, or leaves to files that are there."""
        self.absent = recorded(self._checkpoint, self._config, self._task, state)
        return (self._names & set(state)) | self.absent.names

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """What the checkpoint leaves to other files: all of its own state is loaded together, later."""
        self.absent.fill(state)

    def left_out(self) -> ExternalWeights:
        """What the next checkpoints leave out: what this one does, unless they are to hold all."""
        return ExternalWeights() if self._config.checkpoint.frozen else self.absent

    def notes(self) -> list[str]:
        """Where what the checkpoint leaves out was read; the resume says what else it has loaded."""
        return [f"{start.place}: {len(names)} frozen tensors loaded" for start, names in self.absent.starts]


class CheckpointWeights:
    """The weights of a checkpoint, or their average, and what it leaves to other files, for a task that is
    trained no further.

    Args:
        checkpoint: of the run. config: of the run as it is now. task: with its adapters in place.
        weights: `model`, `ema`, or `auto`: the average where there is one.
    """

    def __init__(
        self,
        checkpoint: OpenedCheckpoint,
        config: RunConfig,
        task: TaskModule,
        weights: Literal["auto", "model", "ema"] = "auto",
    ) -> None:
        self._checkpoint, self._config, self._task, self._weights = checkpoint, config, task, weights
        self._absent = ExternalWeights()

    def covers(self, state: Mapping[str, Tensor]) -> Collection[str]:
        """All: a checkpoint that lacks one is refused."""
        self._absent = recorded(self._checkpoint, self._config, self._task, state)
        return state.keys()

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Reads all of them, each rank its shards, cast to the dtypes that they have in `state`."""
        absent = self._absent.names
        own = {name: tensor for name, tensor in state.items() if name not in absent}
        load_model_only(self._checkpoint, own, self._weights)
        self._absent.fill(state)


class FileWeights:
    """The folders that the components name, and then `init_from`: what it brings is read from there alone.

    Args:
        config: of the run.
        task: its task, on meta: weight formats look at the components.
    """

    def __init__(self, config: RunConfig, task: TaskModule) -> None:
        formats = formats_of(config.registry)
        self.starts = starts_of(config, task)
        self._config, self._task = config, task
        self._started: set[str] = set()
        self._read: dict[WeightMatch, set[str]] = {}
        self._adapters = AdapterWeights(task, config.train.adapters, formats)

    def covers(self, state: Mapping[str, Tensor]) -> Collection[str]:
        """What any of them holds. A folder all of whose weights a later one brings is not opened."""
        starts, self.starts = self.starts, []
        for start in reversed(starts):
            root = start.key.removeprefix("task.")
            own = [name for name in state if name.startswith(f"{root}.") and adapter_of(name) is None]
            if own and self._started.issuperset(own):
                continue
            self._read[start] = set(start.covers(state)) - self._started
            self._started |= self._read[start]
            self.starts.insert(0, start)
        return self._started.union(self._adapters.covers(state))

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Reads one after another what no later one brings: `init_from` after the components' own, adapters
        last."""
        for start in self.starts:
            if self._read[start]:
                start.fill(state, self._read[start])
        Ranks.current().agree("reading adapters", lambda: self._adapters.fill(state, self._started))

    def _given_up(self, start: WeightMatch) -> str:
        """What of it was not read, for the note."""
        others = len(start.covered) - len(self._read[start])
        return f"; {others} of them are those of {self.starts[-1].init.path}" if others else ""

    def left_out(self) -> ExternalWeights:
        """What checkpoints leave out, once `covers` was called."""
        return left_out(self.starts, self._task, self._config)

    def notes(self) -> list[str]:
        """What was read from where, a sentence each."""
        adapters = [f"{a.from_}: adapter {a.name!r} loaded" for a in self._adapters.adapters]
        left = [sentence_on(self._task, adapter) for adapter in self._config.train.adapters]
        loaded = [f"{start.init.path}: {start.report}{self._given_up(start)}" for start in self.starts]
        return [*loaded, *adapters, *filter(None, left)]


def sentence_on(task: TaskModule, adapter: AdapterConfig) -> str:
    """What an adapter's targets hold beside linear layers, for a person to know; "" for nothing."""
    found = [f"{path} ({kind})" for path, kind in passed_over(task, adapter).items()]
    if not found:
        return ""
    return f"adapter {adapter.name!r} is of linear layers alone; its targets also hold {listed(found, 5)}"
