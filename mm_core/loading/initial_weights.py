"""Where the trained weights of a run come from: a checkpoint, files, or chance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.checkpoint.files.layout import listed
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.reading import load_model_only
from mm_core.config.sections import RunConfig
from mm_core.contracts import TaskModule
from mm_core.loading.left_out import ExternalWeights, left_out, recorded, starts_of
from mm_core.loading.matching import MatchedWeights
from mm_core.modules.adapter_layers import adapter_of
from mm_core.modules.tying import trained_state
from mm_core.runtime.ranks import Ranks
from mm_core.weights.adapters.inject import AdapterWeights, skipped_layers
from mm_core.weights.fitting import formats_of


class ResumedWeights:
    """Weights that a checkpoint brings after the engine is ready: nothing is drawn for them. Satisfies
    `WeightPlan`; made by all ranks together.

    Args:
        checkpoint: of the run. config: of the run as it is now. task: with its adapters in place.

    Attributes:
        absent: what the checkpoint leaves to other files, which are there.
    """

    def __init__(self, checkpoint: OpenedCheckpoint, config: RunConfig, task: TaskModule) -> None:
        self._config = config
        state = trained_state(task)
        self.absent = recorded(checkpoint, config, task, state)
        self.names = (checkpoint.names("model") & state.keys()) | self.absent.names

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
    trained no further. Satisfies `WeightPlan`; made by all ranks together.

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
        self._checkpoint, self._weights = checkpoint, weights
        state = trained_state(task)
        self._absent = recorded(checkpoint, config, task, state)
        self.names = state.keys()
        """All: a checkpoint that lacks one is refused."""

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Reads all of them, each rank its shards, cast to the dtypes that they have in `state`."""
        absent = self._absent.names
        own = {name: tensor for name, tensor in state.items() if name not in absent}
        load_model_only(self._checkpoint, own, self._weights)
        self._absent.fill(state)


class FileWeights:
    """The folders that the components name, and then `init_from`: what it brings is read from there alone.
    Satisfies `WeightPlan`; made by all ranks together.

    Args:
        config: of the run.
        task: its task, on meta: weight formats look at the components.

    Raises:
        MMError: weights that cannot be read, or do not fit.
    """

    def __init__(self, config: RunConfig, task: TaskModule) -> None:
        self._config, self._task = config, task
        self._adapters = AdapterWeights(task, config.train.adapters, formats_of(config.registry))
        self._read: list[tuple[MatchedWeights, set[str]]] = []
        """What is read one after another, and what of it no later one brings."""
        self._known: set[str] = set()
        state = trained_state(task)
        for start in reversed(starts_of(config, task)):
            root = start.key.removeprefix("task.")
            own = [name for name in state if name.startswith(f"{root}.") and adapter_of(name) is None]
            if own and self._known.issuperset(own):
                continue  # a later one brings all of it: the folder is not opened
            part = start.covers(state)
            self._read.insert(0, (part, set(part.names) - self._known))
            self._known |= set(part.names)
        self.names = self._known | self._adapters.names

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """`init_from` after the components' own, adapters last."""
        for part, names in self._read:
            if names:
                part.fill({name: state[name] for name in names})
        Ranks.current().agree("reading adapters", lambda: self._adapters.fill(state, self._known))

    def left_out(self) -> ExternalWeights:
        """What checkpoints leave out."""
        return left_out([part for part, _ in self._read], self._task, self._config)

    def notes(self) -> list[str]:
        """What was read from where, a sentence each."""
        adapters = [f"{a.from_}: adapter {a.name!r} loaded" for a in self._adapters.adapters]
        left = [sentence_on(self._task, adapter) for adapter in self._config.train.adapters]
        loaded = []
        for part, names in self._read:
            given_up = len(part.names) - len(names)
            also = f"; {given_up} of them are those of {self._read[-1][0].init.path}" if given_up else ""
            loaded.append(f"{part.init.path}: {part.found.report}{also}")
        return [*loaded, *adapters, *filter(None, left)]


def sentence_on(task: TaskModule, adapter: AdapterConfig) -> str:
    """What an adapter's targets hold beside linear layers, for a person to know; "" for nothing."""
    found = [f"{path} ({kind})" for path, kind in skipped_layers(task, adapter).items()]
    if not found:
        return ""
    return f"adapter {adapter.name!r} is of linear layers alone; its targets also hold {listed(found, 5)}"
