"""One rank of a run on fake tensors: the engine prepares, steps, evaluates and samples; nothing is computed.

The ranks are torch's fake process group. Tensors are on the CPU, where attention keeps what the kernels of
accelerators keep; on the meta device it would keep all scores.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from mm_core.config.sections import RunConfig
from mm_core.contracts import (
    Batch,
    Engine,
    EnginePlan,
    Loss,
    Randomness,
    SampleRequest,
    SelfLoading,
    Streamed,
    SupportsModuleFlops,
    SupportsSampleForward,
    TaskModule,
)
from mm_core.contracts.bases.task_module import loss_of
from mm_core.device import current_device, synchronize
from mm_core.device.torch_private import FakeTensorMode
from mm_core.optim.adamw import has_fused_adamw
from mm_core.optim.configured import make_optimizer
from mm_core.optim.ema import EMA
from mm_core.parallel.layout import like_blocks
from mm_core.plan.bucketing import offered_buckets
from mm_core.runtime.groups import fake_ranks
from mm_core.training.forecast.calibration import clock
from mm_core.training.forecast.meter import BACKWARD, Meter

WHOLE = "whole gradients, until the last micro-batch"

Forward = tuple[str, Mapping[str, Any], int]
"""A component's path, arguments of its forward for one sample, and samples of a micro-batch."""


class _Covered:
    """Weights that need no values. Satisfies `WeightPlan` and `InitialWeights`."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names

    def fill(self, state: Mapping[str, Tensor]) -> None: ...

    def covers(self, state: Mapping[str, Tensor]) -> _Covered:
        return _Covered(state)


class _Drawn(_Covered):
    """Weights drawn at random."""

    def fill(self, state: Mapping[str, Tensor]) -> None:
        for tensor in state.values():
            if tensor.is_floating_point():
                tensor.normal_(std=0.02)

    def covers(self, state: Mapping[str, Tensor]) -> _Drawn:
        return _Drawn(state)


@dataclass
class FakeRank:
    """A run's parts on fake tensors.

    Attributes:
        task: on the meta device.
        plan: the engine's, of this task.
        micro_batches: of a step.
        on_cpu: whether the ranks compute on CPUs; else kernels of accelerators stand for some of the CPU's.
        batch: the first micro-batch; None: the data are missing.
        forward: stands for the step then, see `forward_of`.
        request: of the first clip that the run samples; None: it samples none, or files are missing.
    """

    config: RunConfig
    task: TaskModule
    engine: Engine
    plan: EnginePlan
    micro_batches: int
    on_cpu: bool
    batch: Batch | None = None
    forward: Forward | None = None
    request: SampleRequest | None = None

    def run(self, meter: Meter) -> None:
        """Computes on fakes what the run computes; the meter counts."""
        if self.batch is not None:
            load_own(self.task)
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        kernels = nullcontext() if self.on_cpu else patch.object(torch, "rms_norm", _rms_norm)
        has_fused_adamw("cpu")  # remembers its answer, which must not be a fake one
        with fake_ranks(self.plan.world), fakes, kernels, meter.counting():
            self._run(meter)

    def seconds(self) -> float:
        """Seconds of a step of this process's device with weights drawn at random, none of them fake: the
        median of some."""
        if self.batch is not None:
            load_own(self.task)
        self.engine.device = current_device()
        rng, times, unused = Randomness(self.config.run.seed), [], Meter()
        optimizer = partial(make_optimizer, self.config.registry, self.config.optimizer, self.config.train)
        with fake_ranks(self.plan.world):
            self.engine.place_frozen(self.task, self.plan, _Drawn(()))
            self.engine.prepare(self.task, self.plan, optimizer, rng, None)
            _without_flops(self.task)
            self.task.train()
            for _ in range(5):
                synchronize()
                began = clock()
                self._step(unused, None, rng)
                synchronize()
                times.append(clock() - began)
        return statistics.median(times[2:])

    def _run(self, meter: Meter) -> None:
        config, task, engine, plan = self.config, self.task, self.engine, self.plan
        rng, groups = Randomness(config.run.seed), groups_of(task)
        with meter.phase("load"), meter.making("weights being loaded"):
            engine.place_frozen(task, plan, _Covered(()))
            for name in task.frozen:
                if isinstance(component := getattr(task, name), nn.Module):
                    meter.call([*component.parameters(), *component.buffers()], name)
            names = {n for n, _ in [*task.named_parameters(), *task.named_buffers()]}
            optimizer = partial(make_optimizer, config.registry, config.optimizer, config.train)
            engine.prepare(task, plan, optimizer, rng, _Covered(names))
            held = [t for n in task.trainable for t in task.get_submodule(n).buffers()]
            meter.call([*(p for _, p in engine.named_parameters()), *held], "parameters")
            with meter.making("average"):
                ema = EMA(engine.shards, config.ema) if config.ema is not None else None
            if plan.optimizer_on_host:
                meter.rename("weights being loaded", "copies")
            meter.enter("end")
        _without_flops(task)
        self._watch(meter, groups)
        task.train()
        with meter.phase("step"), meter.making("loss"):
            untrained = self._step(meter, ema, rng)
        with meter.phase("other steps"), meter.making("optimizer"):
            for parameter in untrained:  # other steps train them, such as those of another expert
                parameter.grad = torch.zeros_like(parameter)
            engine.step(1.0, None)
        with meter.phase("between steps"):
            pass
        if config.validation is not None:
            if "validation" in config.data.splits:
                with meter.phase("evaluation"), self._evaluating(meter, ema):
                    self._evaluate(meter, rng)
            if self.request is not None:
                with meter.phase("sample"), self._evaluating(meter, ema):
                    task.sample(self.request)

    @contextmanager
    def _evaluating(self, meter: Meter, ema: EMA | None) -> Iterator[None]:
        """As a run evaluates and samples: with the averaged weights, beside which the others are kept."""
        applied = nullcontext() if ema is None else ema.applied()
        with meter.making("average"), applied, meter.making("evaluation"), self.engine.evaluating():
            yield

    def _watch(self, meter: Meter, groups: Sequence[Group]) -> None:
        task = self.task
        for name in (*task.trainable, *task.frozen):
            if isinstance(getattr(task, name.partition(".")[0], None), nn.Module):
                meter.watch(task.get_submodule(name), name)
        for group in groups:
            count = len(group.paths)
            for index, path in enumerate(group.paths):
                block = task.get_submodule(path)
                meter.watch(block, group.label)
                # The blocks in the middle need no more than those at the ends.
                place = str(index) if index < count // 2 else str(index - count)
                hook = partial(_backward_of, meter.enter, f"backward of {group.label} {place}")
                block.register_forward_hook(hook)

    def _step(self, meter: Meter, ema: EMA | None, rng: Randomness) -> list[nn.Parameter]:
        """Trains a step; returns the parameters that it has no gradients of."""
        engine, repeats = self.engine, min(self.micro_batches, 2)
        for micro in range(repeats):
            meter.enter("forward")
            engine.micro_step(partial(self._loss, meter, rng), last=micro == repeats - 1, scale=1.0)
            meter.call([p.grad for _, p in engine.named_parameters() if p.grad is not None], "gradients")
            meter.rename(BACKWARD, WHOLE)
        untrained = [p for _, p in engine.named_parameters() if p.requires_grad and p.grad is None]
        meter.enter("update")
        norm = engine.grad_norm()
        with meter.making("optimizer"):
            engine.step(norm, self.config.train.clip_grad_norm)
        if ema is not None:
            ema.update(0)
        return untrained

    def _loss(self, meter: Meter, rng: Randomness) -> Loss:
        task = self.task
        if self.batch is not None:
            meter.enter("encoding")
            with torch.no_grad(), meter.making("inputs"):
                inputs = task.prepare(self.batch, rng)
            meter.enter("forward")
            return loss_of(task, inputs)
        return self._stand_in()

    def _evaluate(self, meter: Meter, rng: Randomness) -> None:
        if self.batch is None:
            self._stand_in()
            return
        assert self.config.validation is not None
        self.task.evaluate(self.batch, rng, self.config.validation.quantiles)

    def _stand_in(self) -> Loss:
        """A loss of the trained component's forward alone."""
        assert self.forward is not None
        root, given, rows = self.forward
        out = self.task.get_submodule(root)(**tree_map_only(Tensor, partial(_rows, rows=rows), given))
        first = next(each for each in tree_leaves(out) if isinstance(each, Tensor))
        return Loss(first.float().square().mean(), float(rows))


def _without_flops(task: TaskModule) -> None:
    """Those of a shortened model would miss blocks; the meter counts."""
    for name in task.trainable:
        if isinstance(component := task.get_submodule(name), SupportsModuleFlops):
            component.module_flops = lambda **_: ()  # type: ignore[method-assign]


def load_own(task: TaskModule) -> None:
    """Loads the frozen components that have weights of their own: they may decide by what they read."""
    for component in (getattr(task, name) for name in task.frozen):
        if isinstance(component, SelfLoading) and not isinstance(component, Streamed):
            component.load(torch.device("cpu"))


def forward_of(task: TaskModule, config: RunConfig) -> Forward | None:
    """A forward of a trained component that needs no data, in buckets of the largest; None: there is none."""
    if not isinstance(task, SupportsSampleForward):
        return None
    options, rows = config.data.train.options, config.train.micro_batch_size
    if config.data.loader.mode == "variable":
        size, own = next(iter(offered_buckets(config, task, options).sizes.items()))
        options = {**options, **dict(zip(("num_frames", "height", "width"), size, strict=True))}
        rows = own or rows
    found = task.sample_forward(options)
    return None if found is None else (*found, rows)


def _rows(tensor: Tensor, rows: int) -> Tensor:
    shape = (rows, *tensor.shape[1:])
    if tensor.is_floating_point():
        return torch.empty(shape, dtype=tensor.dtype, device="cpu")
    return torch.ones(shape, dtype=tensor.dtype, device="cpu")


class _RMSNorm(torch.autograd.Function):
    """What the fused kernels of accelerators keep and make; on the CPU, torch composes it of five others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, kept: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(kept, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


_composed = torch.rms_norm


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is not None and weight.dtype != x.dtype:
        return _composed(x, shape, weight, eps)
    kept = (*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
    found: Tensor = _RMSNorm.apply(x, weight, kept)  # type: ignore[no-untyped-call]
    return found


def _backward_of(enter: Callable[[str], None], segment: str, *call: Any) -> None:
    for tensor in tree_leaves(call[-1]):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: enter(segment))  # type: ignore[no-untyped-call]
            return


@dataclass(frozen=True)
class Group:
    """Blocks of one list: its path with a star in place of their numbers, and theirs."""

    label: str
    paths: tuple[str, ...]


def groups_of(task: TaskModule) -> list[Group]:
    """The repeated blocks of a task, by the list that they are in."""
    found: dict[str, list[str]] = {}
    for name in (*task.trainable, *task.frozen):
        module = getattr(task, name.partition(".")[0], None)
        paths = like_blocks(task.get_submodule(name), name) if isinstance(module, nn.Module) else []
        for path in paths:
            found.setdefault(f"{path.rpartition('.')[0]}.*", []).append(path)
    return [Group(label, tuple(own)) for label, own in found.items()]
