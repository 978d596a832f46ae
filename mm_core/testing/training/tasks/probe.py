"""A task under test, with batches of the dataset that it is tested with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mm_core.contracts import Batch, Evaluation, Loss, Randomness, SupportsBeginStep, seeded
from mm_core.contracts.bases.task_module import loss_of
from mm_core.loading.frozen import load_frozen
from mm_core.testing.common import KindProbe
from mm_core.testing.data.reading import SEED, DatasetProbe
from mm_core.testing.kit import NotApplicable, Probe
from mm_core.testing.tensors import fill

_QUANTILES = (0.25, 0.5, 0.75)
_CLOSE = 1e-4  # of a value: sums in another order, in float32


class TaskProbe(KindProbe):
    """A task under test, with batches of the dataset that it is tested with."""

    def on_meta(self) -> Any:
        """Builds a new task without memory for its weights, as the core does."""
        _ = self.probe.config  # its files are made with memory
        with torch.device("meta"):
            return self.build()

    def ready(self) -> Any:
        """Builds a new task in evaluation mode on the CPU, filled as the engine fills it."""
        task = self.on_meta()
        for name in task.trainable:
            fill(task.get_submodule(name), name, f"{self.probe.place}, {name}")
        for name in task.frozen:
            load_frozen(getattr(task, name), "cpu", self.probe.registry)
        return task.eval()

    @cached_property
    def task(self) -> Any:
        """A task for all checks, in evaluation mode: without dropout. A check leaves it as it is."""
        return self.ready()

    @cached_property
    def data(self) -> DatasetProbe:
        """The dataset that the task is tested with: `examples` of its Component, or the plugin's first one.

        Raises:
            NotApplicable: there is none.
        """
        registered, registry = self.probe.registered, self.probe.registry
        fields: Mapping[str, object] | None = self.probe.examples
        folder = self.probe.folder / "dataset"
        folder.mkdir(exist_ok=True)
        if fields is not None:
            found = registry.resolve("dataset", str(fields["type"]))
            return DatasetProbe(
                Probe(found, registry, folder, {k: v for k, v in fields.items() if k != "type"})
            )
        own = [c for c in registry.components("dataset") if c.namespace == registered.namespace]
        if not own:
            raise NotApplicable(
                "its plugin has no dataset: name one by Component(..., examples='module:function'),"
                " a function that returns {'type': ..., ...}"
            )
        return DatasetProbe(Probe(own[0], registry, folder))

    def batch(self, rows: Sequence[int], weights: Sequence[float] = (), task: Any = None) -> Batch:
        """A batch of some of the dataset's samples, as it comes from a data worker."""
        made, _ = self.data.batch(weights, rows)
        task = self.task if task is None else task
        transformed: Batch = task.batch_transform()(made)
        return transformed

    @property
    def pair(self) -> tuple[int, int]:
        """Two samples that one batch can have.

        Raises:
            NotApplicable: the dataset takes one sample a batch, or has only one.
        """
        if self.data.rows < 2:
            raise NotApplicable("the dataset it is tested with has one sample a batch")
        return (0, 1)

    def loss(self, batch: Batch, task: Any = None, step: int = 0, stray: int = 0) -> Loss:
        """The loss of a batch, computed as the loop computes it.

        Args:
            batch: from `batch`.
            task: None: that of all checks.
            step: of the training.
            stray: seed of the process's own generators.
        """
        return loss_of_batch(self.task if task is None else task, batch, step, stray)

    def evaluation(self, batch: Batch, task: Any = None, stray: int = 0) -> Evaluation:
        """The evaluation of a batch, as the validator calls it; `stray` as in `loss`."""
        task = self.task if task is None else task
        with torch.no_grad(), seeded(Randomness(SEED).at("stray", stray)):
            found: Evaluation = task.evaluate(batch.to(torch.device("cpu")), Randomness(SEED), _QUANTILES)
        return found


def loss_of_batch(task: Any, batch: Batch, step: int = 0, stray: int = 0) -> Loss:
    """See `TaskProbe.loss`."""
    if isinstance(task, SupportsBeginStep):
        task.begin_step(step)
    with seeded(Randomness(SEED).at("model", stray)):
        with torch.no_grad():
            inputs = task.prepare(batch.to(torch.device("cpu")), Randomness(SEED))
        return loss_of(task, inputs)


def state_of(task: Any) -> dict[str, Tensor]:
    """The tensors of the trained modules."""
    return {
        f"{root}.{name}": tensor.detach()
        for root in task.trainable
        for name, tensor in task.get_submodule(root).state_dict().items()
    }


def total_of(found: Loss) -> float:
    return float(found.total.detach())


def near(first: float, second: float) -> bool:
    return abs(first - second) <= _CLOSE * max(abs(first), abs(second), 1e-6)
