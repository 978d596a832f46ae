"""Dtypes of inputs and frozen weights.

Under mixed precision this module casts inputs, except timesteps: fully_shard's own `cast_forward_inputs`
turns timestep 998.7 into 1000 in bf16.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mm_core.contracts import CLIP_CONDITIONS, EnginePlan, TaskModule, torch_dtype
from mm_core.device.torch_private import shards_mixed
from mm_core.errors import ContractError, PlanError, first_line
from mm_core.modules.adapter_layers import adapter_of
from mm_core.modules.shards import local
from mm_core.modules.torch_calls import Args, Kwargs

KEEP = frozenset({"timestep", "timesteps", "t", "sigma", "sigmas", *CLIP_CONDITIONS})
"""Names of inputs whose precision is never lowered."""

_LOWERED = {torch.float32, torch.float16, torch.bfloat16}
_TWO_DTYPES = re.compile(
    r"same dtype|dtypes must be the same|(?:bias|weight) type .* should be the same|expected scalar type"
    r"|expected m1 and m2"
)
"""Errors of torch's products and convolutions for operands of two dtypes."""
_FLOATING = re.compile(r"\b(?:b?float|half|double)\w*", re.IGNORECASE)


def cast_frozen(task: TaskModule, dtype: torch.dtype) -> None:
    """Casts a task's frozen parameters to a dtype; adapters and buffers keep theirs.

    Call it on the meta device, before the engine plans.
    """
    for _, parameter in _frozen_of(task):
        parameter.data = parameter.data.to(dtype)


def quantise_frozen_values(task: TaskModule, state: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Rounds the tensors in `state` of a task's frozen parameters to the values of a lower dtype; their own
    dtype stays."""
    for name, _ in _frozen_of(task):
        if name in state:
            share = local(state[name])
            share.copy_(share.to(dtype))


def _frozen_of(task: TaskModule) -> Iterator[tuple[str, nn.Parameter]]:
    for root in task.trainable:
        for name, parameter in task.get_submodule(root).named_parameters(prefix=root):
            if not parameter.requires_grad and parameter.is_floating_point() and adapter_of(name) is None:
                yield name, parameter


def check_dtypes(task: TaskModule, roots: Iterable[str]) -> None:
    """Checks that this torch can shard a task's parameters: different dtypes together, and integers.

    Raises:
        PlanError: it cannot.
    """
    if shards_mixed():
        return
    for root in roots:
        kinds = {parameter.dtype for parameter in task.get_submodule(root).parameters()}
        names = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        if len(kinds) > 1:
            raise PlanError(
                f"{root} has parameters in {names}, which torch {torch.__version__} cannot shard together",
                where="train.base_dtype",
                hint="remove train.base_dtype, or install a newer torch",
            )
        if not all(kind.is_floating_point for kind in kinds):
            raise PlanError(
                f"{root} has parameters in {names}, which torch {torch.__version__} cannot shard",
                hint="install torch 2.8 or newer",
            )


def main_dtype(module: nn.Module, known: dict[torch.dtype, torch.dtype]) -> torch.dtype:
    """The dtype of most floating-point parameter elements below adapters; `known` keeps it by that of the
    first one."""
    first = next(module.parameters()).dtype
    if first not in known:
        sizes: Counter[torch.dtype] = Counter()
        for name, parameter in module.named_parameters():
            sizes[parameter.dtype] += parameter.numel() * (
                parameter.is_floating_point() and adapter_of(name) is None
            )
        known[first] = sizes.most_common(1)[0][0]  # tables and norms may have a higher precision
    return known[first]


def cast_as_planned(task: TaskModule, plan: EnginePlan) -> None:
    """Gives a task's modules their inputs in the dtype in which an engine computes, however the weights are
    stored.

    Args:
        task: its modules change in place, and its `input_dtype`.
        plan: of the engine; without a `compute_dtype` nothing changes.
    """
    if plan.compute_dtype is None:
        return
    dtype = torch_dtype(plan.compute_dtype)
    for path in plan.cast_inputs:
        cast_inputs(task.get_submodule(path), dtype)
    # A model that casts its inputs itself gets them in full precision.
    task.input_dtype = dtype if plan.cast_inputs else torch.float32


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts a module's floating-point inputs to a dtype, except those in KEEP, such as timesteps.

    Tensors in containers (rotary tables) and double-precision ones keep their dtype.
    """
    names = list(inspect.signature(module.forward).parameters)

    def convert(name: str | None, value: object) -> object:
        if name in KEEP or not isinstance(value, torch.Tensor) or value.dtype not in _LOWERED:
            return value
        return value.to(dtype)

    def hook(_: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        positions = [*names[: len(args)], *[None] * (len(args) - len(names))]
        cast_args = tuple(convert(name, value) for name, value in zip(positions, args, strict=False))
        return cast_args, {name: convert(name, value) for name, value in kwargs.items()}

    module.register_forward_pre_hook(hook, with_kwargs=True)


@contextmanager
def uncast_inputs(dtype: str) -> Iterator[None]:
    """A context for forwards of modules whose inputs are not cast, with a clear error for mixed dtypes.

    Raises:
        ContractError: in place of torch's error, if weights of `dtype` and inputs of a different dtype meet.
    """
    try:
        yield
    except RuntimeError as fault:
        line = first_line(fault)
        if not _TWO_DTYPES.search(line) or len(_FLOATING.findall(line)) < 2:
            raise
        raise ContractError(
            f"with false, the model must cast its inputs itself, but its {dtype} weights got inputs of a"
            f" different dtype: {line}",
            where="engine.cast_forward_inputs",
            hint="set engine.cast_forward_inputs: true, or cast inputs to the weights' dtype in the model",
        ) from fault
