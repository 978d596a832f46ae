"""`mm-train --dry-run --ops`: the operators of one forward and backward of a run, without its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from mm_core.config.sections import RunConfig
from mm_core.contracts import (
    Batch,
    Engine,
    EnginePlan,
    Randomness,
    TaskModule,
    torch_dtype,
)
from mm_core.contracts.bases.task_module import loss_of
from mm_core.data.loading.seeding import build_split
from mm_core.device.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from mm_core.errors import MMError
from mm_core.modules.casting import cast_as_planned
from mm_core.parallel import recompute
from mm_core.parallel.layout import ShardedPlan
from mm_core.plan import build_frozen, build_task, check_data, in_buckets, in_cache, make_plan
from mm_core.telemetry.operators import Calls, Operators, Signature, make_fake
from mm_core.training.forecast.fake_rank import load_own
from mm_core.training.training_samples import first_batch


@dataclass(frozen=True)
class Forward:
    """A run's task on the meta device, with the first micro-batch of one rank.

    Attributes:
        dtypes: the dtype in which the engine computes with a tensor of the task, by its path.
    """

    task: TaskModule
    batch: Batch
    seed: int
    dtypes: Callable[[str, Tensor], torch.dtype]

    def backward(self) -> None:
        """Computes the loss and its gradients as a training step does."""
        self.task.train()
        with torch.no_grad():
            inputs = self.task.prepare(self.batch, Randomness(self.seed))
        loss_of(self.task, inputs).total.backward()  # type: ignore[no-untyped-call]


def first_forward(config: RunConfig) -> Forward:
    """Reads the first micro-batch of a run, and prepares its task without weights as the engine would.

    Raises:
        MMError: as for the start of a training; files of encoders are missing.
    """
    loader = replace(config.data.loader, workers=0)
    config = replace(config, data=replace(config.data, loader=loader))
    task = build_task(config, {})
    engine: Engine = config.registry.build("engine", config.engine)
    check_data(config, task)
    train = build_split(config.registry, config.data.train, config.run.seed, loader.mode, "train")
    datasets, *_ = in_cache(config, task, in_buckets(config, task, {"train": train}))
    samples = datasets["train"]
    plan = make_plan(config, 1, task, engine, samples)
    batch = first_batch(config, plan, samples, task)
    build_frozen(task)
    load_own(task)
    return Forward(task, batch, config.run.seed, _as_engine(task, plan.engine))


def _as_engine(task: TaskModule, plan: EnginePlan) -> Callable[[str, Tensor], torch.dtype]:
    """Recomputes and casts as the engine does; returns the dtypes in which it computes."""
    lower = torch_dtype(plan.compute_dtype) if plan.compute_dtype else None
    if isinstance(plan, ShardedPlan):
        for path in plan.recomputed:
            recompute(task.get_submodule(path), use_reentrant=False)
    cast_as_planned(task, plan)
    roots = tuple(f"{root}." for root in task.trainable)

    def dtype(path: str, tensor: Tensor) -> torch.dtype:
        weight = isinstance(tensor, Parameter) and path.startswith(roots) and tensor.is_floating_point()
        return lower if lower is not None and weight else tensor.dtype

    return dtype


def operators_of(forward: Forward) -> dict[Signature, Calls]:
    """The operators of a forward and backward of a run's first micro-batch, as the CPU would run them.

    Nothing of the size of the model is allocated. Encoders count too, unless their features are cached.

    Raises:
        MMError: the model decides by values that are not known without weights.
    """
    calls: dict[Signature, Calls] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        make_fake(forward.task, forward.dtypes)
        try:
            with Operators(calls):
                forward.backward()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise MMError(
                f"the operators are unknown: {error.func} needs values that only a real forward has",
                where="--ops",
                hint="use torch's profiler in a real step: the config section `profile`",
            ) from None
    return calls
