"""How a task's components come to DeepSpeed: planned on meta, filled by rows over the ranks, handed over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mm_core.contracts import EnginePlan, TaskModule, TrainingFacts
from mm_core.engines import FSDP2Engine
from mm_core.errors import PlanError
from mm_core.modules import tie
from mm_core.parallel import decide_layout, device_mesh, plan_frozen
from mm_core.plugin import ComponentConfig
from mm_deepspeed.keys import AUTO, checked, section
from mm_deepspeed.settings import Settings

Tied = Mapping[str, Mapping[str, str]]
"""Tied weights of each component, by its path in the task (`tied_names`)."""


def plan_of(settings: Settings, task: TaskModule, world: int, state_tensors: float) -> EnginePlan:
    """The plan of a stage of ZeRO for `world` ranks, with the bytes of each.

    Args:
        settings: the stage, the dtypes and what is in host memory.
        task: on the meta device.
        world: number of ranks.
        state_tensors: tensors of optimizer state per parameter.

    Raises:
        PlanError: stage 3 does not have a weight that the loss needs.
    """
    if settings.stage == 3 and getattr(task, "defers_logits", False):
        raise PlanError(
            "ZeRO 3 has the output embedding for its own forward alone, which a chunked loss comes after",
            where="task.loss",
            accepted="plain",
            hint="set task.loss: plain, or a stage up to 2",
        )
    layout = decide_layout(task, task.trainable, wrap="auto", recompute=None, ignore=())
    half, stage = settings.dtype != "fp32", settings.stage
    own = [p for name in task.trainable for p in task.get_submodule(name).parameters()]
    trained = sum(p.numel() for p in own if p.requires_grad)
    sizes = (p.numel() * ((2 if half else 4) if p.is_floating_point() else p.element_size()) for p in own)
    lowered = sum(sizes) // (world if stage == 3 else 1)
    masters = 4 * trained // world if stage else 0
    gradient = 2 if half and settings.grad_accum != "fp32" else 4
    return EnginePlan(
        world=world,
        data_parallel=world,
        mesh={"zero": world},
        recomputed=layout.recomputed,
        ignored=(),
        parameter_bytes=lowered + masters,
        gradient_bytes=gradient * trained // (world if stage > 1 else 1),
        optimizer_bytes=round(4 * trained * state_tensors / (world if stage else 1)),
        frozen=plan_frozen(task, placements={}, ignored=(), shards=1),
        offloaded_bytes=(masters if settings.offload_optimizer else 0)
        + (lowered if settings.offload_param else 0),
        compute_dtype=settings.dtype if half else None,
        cast_inputs=(*layout.wrapped, *task.trainable) if half else (),
        details={f"ZeRO {stage}": task.trainable, "recomputed": layout.recomputed},
    )


def buffers_of(given: Mapping[str, Any], settings: Settings, plan: EnginePlan) -> dict[str, dict[str, int]]:
    """What DeepSpeed allocates on a device besides model states, during a backward and during an update.

    Args:
        given: the keys of the JSON file.
        settings: what is read from them.
        plan: of the stage.
    """
    zero, stage = section(checked(given)[0], "zero_optimization"), settings.stage
    width = 4 if settings.dtype == "fp32" else 2

    def elements(key: str, usual: int) -> int:
        value = zero.get(key, AUTO)
        return usual if value == AUTO else int(value)

    each = 2 if width == 2 and settings.grad_accum != "fp32" else 4
    trained = plan.gradient_bytes // each * (plan.world if stage > 1 else 1)
    masters = 4 * trained // plan.world
    bucket = elements("reduce_bucket_size", 500_000_000)
    if not stage:
        return {"backward": {}, "update": {"bucket": 4 * min(bucket, trained)}}
    update = {} if settings.offload_optimizer else {"flat gradients": masters}
    if stage == 3:
        live = width * elements("stage3_max_live_parameters", 1_000_000_000)
        gathered = min((plan.parameter_bytes - masters) * plan.world, live)
        update["bucket"] = width * bucket
        sent = width * (bucket + min(bucket, trained))
        return {"backward": {"bucket": sent, "gathered weights": gathered}, "update": update}
    if stage == 1 and settings.dtype == "bf16":  # another optimizer of DeepSpeed, without a bucket
        return {"backward": {"gradients in bf16": width * trained}, "update": update}
    buckets = 2 if zero.get("overlap_comm") is True else 1
    return {"backward": {"bucket": width * bucket * buckets}, "update": update}


def stand_in_of(settings: Settings) -> FSDP2Engine:
    """The engine `fsdp2` with the activations and the communication of a stage."""
    preset = ("ddp", "ddp", "zero2", "zero3")[settings.stage]
    accumulate = "reduced" if settings.stage > 1 else "deferred"
    dtype = settings.dtype if settings.dtype != "fp32" else None
    return FSDP2Engine(preset=preset, accumulate=accumulate, param_dtype=dtype, reduce_dtype=None)


def facts_of(shares: int) -> TrainingFacts:
    """A run of which nothing is known but the number of shares of the data."""
    nothing = ComponentConfig("optimizer", "core/adamw"), ComponentConfig("lr_schedule", "core/constant")
    return TrainingFacts(1, 1, 1, shares, None, *nothing)


def split_rows(trained: Mapping[str, nn.Module], tied: Tied) -> None:
    """Replaces the parameters of components (by path in the task), on meta, by DTensors of a rank's rows."""
    mesh = device_mesh((dist.get_world_size(),), ("zero",))
    for path, module in trained.items():
        for owner in module.modules():
            for key, parameter in owner._parameters.items():
                if parameter is None or isinstance(parameter, DTensor):
                    continue
                how = [Shard(0) if parameter.dim() else Replicate()]
                rows = distribute_tensor(parameter.detach(), mesh, how, src_data_rank=None)
                owner._parameters[key] = nn.Parameter(rows, parameter.requires_grad)
        tie(module, tied[path])


def handed_over(
    trained: Mapping[str, nn.Module],
    tied: Tied,
    rows: Mapping[str, nn.Parameter],
    dtype: torch.dtype,
    split: Callable[[nn.Parameter], nn.Parameter] | None,
) -> dict[str, nn.Parameter]:
    """Gives components plain parameters with the values of `rows`, one after another; called by all ranks.

    Args:
        trained: the components by path in the task.
        tied: their tied weights.
        rows: their parameters by path in the task.
        dtype: of the new parameters; integers keep theirs.
        split: splits a whole parameter over the ranks; None: each rank keeps it whole.

    Returns:
        The new parameters, by the names of `rows`.
    """
    made: dict[str, nn.Parameter] = {}
    for path, module in trained.items():
        for name, parameter in [*module.named_parameters(prefix=path)]:
            values = whole(parameter)
            values = values.to(dtype) if values.is_floating_point() else values  # codes of a quantised base
            new = nn.Parameter(values, parameter.requires_grad)
            made[name] = new = new if split is None else split(new)
            owner, _, key = name.removeprefix(f"{path}.").rpartition(".")
            module.get_submodule(owner)._parameters[key] = new
        tie(module, tied[path])
    return {name: made[name] for name in rows}


class Root(nn.Module):
    """One root of all trained components, as DeepSpeed wants it; its forward runs the task's."""

    def __init__(self, trained: Iterable[nn.Module]) -> None:
        super().__init__()
        self.trained = nn.ModuleList(trained)

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        """Runs a forward of the task in it."""
        return compute()


def whole(parameter: Tensor) -> Tensor:
    """The whole tensor on this rank. A collective."""
    found: Tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return found.detach()
