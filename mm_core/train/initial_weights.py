"""Where the trained weights of a run come from: a checkpoint, files, or chance."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor, nn

from mm_core.config.schema import InitFromSection, RunConfig
from mm_core.contracts import Pretrained
from mm_core.plugin.registry import get_registry
from mm_core.train.agreement import Ranks
from mm_core.train.checkpoint_dcp import stored_names
from mm_core.train.warm_start import WarmStart
from mm_core.weights.adapters import AdapterWeights
from mm_core.weights.fitting import formats_of


class Resumed:
    """Weights that a checkpoint brings after the engine is ready: nothing is drawn for them."""

    def __init__(self, checkpoint: Path) -> None:
        self._names = stored_names(checkpoint, "model")

    def covers(self, state: Mapping[str, Tensor]) -> Collection[str]:
        """What the checkpoint holds."""
        return self._names & set(state)

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Nothing: all of the state is loaded together."""

    def notes(self) -> list[str]:
        """None: the resume says what it has loaded."""
        return []


class FromFiles:
    """The folders that the components name, and then `init_from`.

    Args:
        config: of the run.
        task: its task, on meta: weight formats look at the components.
    """

    def __init__(self, config: RunConfig, task: nn.Module) -> None:
        registry = get_registry(config.plugins.path)
        self.starts: list[WarmStart] = []
        for root in task.trainable:  # type: ignore[union-attr]
            component = task.get_submodule(root)
            given = component.weights_from if isinstance(component, Pretrained) else None
            if given is not None:
                wanted = InitFromSection(path=given.path, format=given.format, include=(root,))
                formats = formats_of(registry, given.format)
                self.starts.append(WarmStart(wanted, task, formats, roots=(root,), key=f"task.{root}"))
        if (init := config.init_from) is not None:
            self.starts.append(WarmStart(init, task, formats_of(registry, init.format)))
        self._started: set[str] = set()
        self._adapters = AdapterWeights(task, config.train.adapters, formats_of(registry))

    def covers(self, state: Mapping[str, Tensor]) -> Collection[str]:
        """What any of them holds."""
        self._started = {name for start in self.starts for name in start.covers(state)}
        return self._started.union(self._adapters.covers(state))

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Reads one after another: `init_from` after the components' own, adapters last."""
        for start in self.starts:
            start.fill(state)
        Ranks.current().agree("reading adapters", lambda: self._adapters.fill(state, self._started))

    def notes(self) -> list[str]:
        """What was read from where, a sentence each."""
        adapters = [f"{a.from_}: adapter {a.name!r} loaded" for a in self._adapters.adapters]
        return [*(f"{start.init.path}: {start.report}" for start in self.starts), *adapters]
