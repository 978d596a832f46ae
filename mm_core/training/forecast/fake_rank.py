"""One rank of a run on fake tensors: the engine prepares, steps, evaluates and samples; nothing is computed.

The ranks are torch's fake process group. Tensors are on the CPU, where attention keeps what the kernels of
accelerators keep; on the meta device it would keep all scores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mm_core.config.sections import RunConfig
from mm_core.contracts import Batch, Engine, Loss, Randomness, SupportsSampleForward, TaskModule
from mm_core.contracts.bases.task_module import loss_of
from mm_core.device.torch_private import FakeTensorMode, fake_process_group
from mm_core.optim.adamw import has_fused_adamw
from mm_core.optim.configured import make_optimizer
from mm_core.optim.ema import EMA
from mm_core.plan import RunPlan
from mm_core.runtime.groups import forget_layouts
from mm_core.training.forecast.meter import Meter


class _Covered:
    """Weights that need no values. Satisfies `WeightPlan` and `InitialWeights`."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names

    def fill(self, state: Mapping[str, Tensor]) -> None: ...

    def covers(self, state: Mapping[str, Tensor]) -> _Covered:
        return _Covered(state)


@dataclass
class FakeRank:
    """A run's parts on fake tensors.

    Attributes:
        batch: the first micro-batch; None: the data are missing, and the trained component's forward stands
            for the step.
    """

    config: RunConfig
    task: TaskModule
    engine: Engine
    plan: RunPlan
    batch: Batch | None

    def run(self, meter: Meter) -> None:
        """Computes on fakes what the run computes; the meter counts."""
        with _fake_ranks(self.plan.engine.world), FakeTensorMode(allow_non_fake_inputs=True):
            with meter.counting():
                self._run(meter)

    def _run(self, meter: Meter) -> None:
        config, task, engine, plan = self.config, self.task, self.engine, self.plan
        rng = Randomness(config.run.seed)
        with meter.phase("load", "buffers of loading"):
            engine.place_frozen(task, plan.engine, _Covered(()))
            for name in task.frozen:
                component = getattr(task, name)
                if isinstance(component, nn.Module):
                    meter.call([*component.parameters(), *component.buffers()], name)
            names = {n for n, _ in [*task.named_parameters(), *task.named_buffers()]}
            optimizer = partial(make_optimizer, config.registry, config.optimizer, config.train)
            engine.prepare(task, plan.engine, optimizer, rng, _Covered(names))
            meter.call([p for _, p in engine.named_parameters()], "parameters")
            for name in task.trainable:
                meter.call([*task.get_submodule(name).buffers()], "parameters")
            ema = EMA(engine.shards, config.ema) if config.ema is not None else None
        for name in (*task.trainable, *task.frozen):
            if isinstance(module := getattr(task, name, None), nn.Module):
                meter.watch(module, name)
        task.train()
        for phase in ("first step", "step"):
            with meter.phase(phase, "step"):
                self._step(meter, ema, rng)

    def _step(self, meter: Meter, ema: EMA | None, rng: Randomness) -> None:
        engine, repeats = self.engine, min(self.plan.accumulation, 2)
        for micro in range(repeats):
            engine.micro_step(partial(self._loss, rng), last=micro == repeats - 1, scale=1.0)
            meter.call([p.grad for _, p in engine.named_parameters() if p.grad is not None], "gradients")
        norm = engine.grad_norm()
        with _named(meter, "optimizer"):
            engine.step(norm, self.config.train.clip_grad_norm)
        if ema is not None:
            with _named(meter, "average"):
                ema.update(0)

    def _loss(self, rng: Randomness) -> Loss:
        task, spec = self.task, self.config.data.train.options
        if self.batch is not None:
            with torch.no_grad():
                inputs = task.prepare(self.batch, rng)
            return loss_of(task, inputs)
        assert isinstance(task, SupportsSampleForward)
        found = task.sample_forward(spec)
        assert found is not None
        root, given = found
        rows = self.config.train.micro_batch_size
        out = task.get_submodule(root)(**tree_map_only(Tensor, partial(_rows, rows=rows), given))
        first = out if isinstance(out, Tensor) else next(iter(out.values()))
        return Loss(first.float().square().mean(), float(rows))


def _rows(tensor: Tensor, rows: int) -> Tensor:
    shape = (rows, *tensor.shape[1:])
    if tensor.is_floating_point():
        return torch.empty(shape, dtype=tensor.dtype, device="cpu")
    return torch.ones(shape, dtype=tensor.dtype, device="cpu")


@contextmanager
def _named(meter: Meter, part: str) -> Iterator[None]:
    before, meter.part = meter.part, part
    try:
        yield
    finally:
        meter.part = before


@contextmanager
def _fake_ranks(world: int) -> Iterator[None]:
    has_fused_adamw("cpu")  # remembers its answer, which must not be a fake one
    fake_process_group(world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_layouts()
