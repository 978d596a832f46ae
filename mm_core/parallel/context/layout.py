"""Where the trained components of a task have their tokens, resolved to module paths in the task."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from mm_core.builtin.configs.engines import ContextParallelConfig
from mm_core.contracts import ContextPlan, SupportsContextPlan, TaskModule
from mm_core.device import returns_log_sums
from mm_core.errors import ContractError, PlanError, plural
from mm_core.modules.patterns import match
from mm_core.plugin.checks.places import place_of_method

_KEY = "engine.context_parallel"


@dataclass(frozen=True)
class ContextLayout:
    """How the tokens of a task's samples are spread over ranks: module paths in the task.

    Attributes:
        size: ranks that share a sample.
        kind: `ulysses` or `ring`.
        attention: self-attention modules.
        split: path -> argument or number of an output -> dimension of the tokens.
        gather: path -> dimension of the tokens in the output.
        beside: arguments and outputs in `split` of other tokens, which attend in the same sequence.
    """

    size: int
    kind: str
    attention: tuple[str, ...] = ()
    split: Mapping[str, Mapping[str | int, int]] = field(default_factory=dict)
    gather: Mapping[str, int] = field(default_factory=dict)
    beside: tuple[str | int, ...] = ()


def decide_context(
    task: TaskModule, trainable: Sequence[str], wanted: ContextParallelConfig, world: int, device_type: str
) -> ContextLayout | None:
    """Decides how a task's tokens are spread over ranks; None where each rank has samples of its own.

    Args:
        task: the task, on the meta device or not.
        trainable: names of the trained components.
        wanted: what the config sets.
        world: number of ranks.
        device_type: of the ranks.

    Raises:
        PlanError: the size does not divide the ranks, no component declares its tokens, or the kind does not
            work for it.
    """
    if wanted.size == 1:
        return None
    if world % wanted.size:
        sizes = [str(n) for n in range(1, world + 1) if world % n == 0]
        raise PlanError(
            f"context size {wanted.size} does not divide {plural(world, 'rank')}",
            where=f"{_KEY}.size",
            accepted=", ".join(sizes),
        )
    if wanted.kind == "ring" and not returns_log_sums(device_type):
        raise PlanError(
            f"ring attention has no kernel for the device {device_type}",
            where=f"{_KEY}.kind",
            accepted="ulysses",
        )
    plans = {root: plan for root in trainable if (plan := _plan_of(task, root)) is not None}
    if not plans:
        names = ", ".join(f"{root} ({type(task.get_submodule(root)).__name__})" for root in trainable)
        raise PlanError(
            f"no trained component declares where its tokens are: {names}",
            where=_KEY,
            accepted="components with a `context_plan`, such as wan/transformer",
            hint='write context_plan in the model (the page "Long clips"), or set size: 1',
        )
    for root, plan in plans.items():
        if wanted.kind == "ring" and not plan.ring:
            raise PlanError(
                f"{root} uses masks in its attention, which ring attention does not have",
                where=f"{_KEY}.kind",
                accepted="ulysses",
            )
        if wanted.kind == "ulysses" and plan.heads < wanted.size:
            heads, ranks = plural(plan.heads, "head"), plural(wanted.size, "rank")
            raise PlanError(
                f"{root} has {heads}, too few for {ranks} to share",
                where=f"{_KEY}.size",
                accepted=f"at most {plan.heads} with kind: ulysses",
                hint="set kind: ring, which splits no heads",
            )
    return _resolved(task, plans, wanted)


def _plan_of(task: TaskModule, root: str) -> ContextPlan | None:
    component = task.get_submodule(root)
    if not isinstance(component, SupportsContextPlan):
        return None
    plan = component.context_plan()
    if not isinstance(plan, ContextPlan):
        raise ContractError(
            f"context_plan of {type(component).__name__} returned {plan!r}",
            where=f"{root}, {place_of_method(component, 'context_plan')}",
            accepted="a mm_core.contracts.ContextPlan",
        )
    return plan


def _resolved(
    task: TaskModule, plans: Mapping[str, ContextPlan], wanted: ContextParallelConfig
) -> ContextLayout:
    attention: list[str] = []
    split: dict[str, Mapping[str | int, int]] = {}
    gather: dict[str, int] = {}
    for root, plan in plans.items():
        paths = [name for name, _ in task.get_submodule(root).named_modules() if name]
        where = f"{root}.context_plan()"
        attention += [f"{root}.{path}" for path in match(plan.attention, paths, f"{where}.attention")]
        for key in ("split", "gather"):
            match([*getattr(plan, key)], paths, f"{where}.{key}")
        for path, dims in plan.split.items():
            _check_arguments(f"{where}.split", path, task.get_submodule(f"{root}.{path}"), dims)
        split |= {f"{root}.{path}": dims for path, dims in plan.split.items()}
        gather |= {f"{root}.{path}": dim for path, dim in plan.gather.items()}
    beside = tuple(key for plan in plans.values() for key in plan.beside)
    return ContextLayout(wanted.size, wanted.kind, tuple(attention), split, gather, beside)


def _check_arguments(where: str, path: str, module: nn.Module, dims: Mapping[str | int, int]) -> None:
    known = inspect.signature(module.forward).parameters
    for name in dims:
        if isinstance(name, str) and name not in known:
            raise PlanError(
                f"the forward of {path} ({type(module).__name__}) has no argument {name!r}",
                where=where,
                accepted=", ".join(known),
            )
