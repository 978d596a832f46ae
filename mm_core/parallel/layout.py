"""The sharding layout: which modules are wrapped, ignored and recomputed, decided on the meta device."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import torch
from torch import nn

from mm_core.contracts import EnginePlan, TaskModule
from mm_core.errors import PlanError, plural
from mm_core.modules.patterns import match
from mm_core.parallel.context.layout import ContextLayout
from mm_core.parallel.shard_plans import ModelPlan, Prefetch, backwards, in_order, model_plans

_WRAP, _RECOMPUTE = "engine.sub_modules_to_wrap", "engine.recompute_modules"
_RESHARD = "engine.reshard_after_forward"
Size = int | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sharding layout of a task: module paths in the task, in module order.

    Attributes:
        wrapped: modules sharded as units of their own.
        recomputed: modules whose activations are recomputed in the backward.
        ignored: modules that are not sharded.
        forward_prefetch: wrapped module -> wrapped modules to gather while its forward computes.
        backward_prefetch: the same for the backward.
        decided_by: what was decided (`wrapped`, `recomputed`, `prefetched`) -> who decided; empty if no model
            brings a plan.
    """

    wrapped: tuple[str, ...]
    recomputed: tuple[str, ...]
    ignored: tuple[str, ...]
    forward_prefetch: Prefetch = field(default_factory=dict)
    backward_prefetch: Prefetch = field(default_factory=dict)
    decided_by: Mapping[str, str] = field(default_factory=dict)

    def shown(self) -> dict[str, tuple[str, ...]]:
        """The layout's paths by label, for display."""
        found = {"wrapped": self.wrapped, "recomputed": self.recomputed, "ignored": self.ignored}
        if self.decided_by and (ahead := {*self.forward_prefetch, *self.backward_prefetch}):
            found["prefetched"] = tuple(path for path in self.wrapped if path in ahead)
        return found


@dataclass(frozen=True)
class ShardedPlan(Layout, EnginePlan):
    """The plan of an engine that shards a task: the layout, and what follows from it for a number of ranks.

    Attributes:
        context: how the tokens of a sample are spread; None where each rank has samples of its own.
        compiled: modules that torch.compile compiles.
        resharded: modules that drop gathered parameters after their forward.
        attention: trained component -> library and its name of the kernel, where known.
        kept: operators whose outputs recomputed modules keep.
        activations_on_host: whether wrapped modules keep in host memory what their backward needs.
    """

    context: ContextLayout | None = None
    compiled: tuple[str, ...] = ()
    resharded: tuple[str, ...] = ()
    attention: Mapping[str, str] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    activations_on_host: bool = False


Patterns = Literal["auto"] | Sequence[str]


def decide_layout(
    task: TaskModule,
    trainable: Sequence[str],
    *,
    wrap: Patterns,
    recompute: Patterns | None,
    ignore: Sequence[str],
    forward_prefetch: int | None = None,
    backward_prefetch: int | None = None,
) -> Layout:
    """Decides a task's sharding layout: resolves the engine's module patterns against the task's modules.

    A component that brings its own plan decides what the config leaves to `auto` or None.

    Args:
        task: the task, on the meta device or not.
        trainable: names of the trained components.
        wrap: patterns of modules to shard as units.
        recompute: patterns of modules to recompute; None for those of the components' plans.
        ignore: patterns of modules not to shard.
        forward_prefetch: number of wrapped modules to gather ahead; None for the components' plans.
        backward_prefetch: the same for the backward.

    Raises:
        PlanError: a trained component is a list, a pattern matches nothing, or would exclude trained
            parameters from sharding.
    """
    for root in trainable:
        if isinstance(module := task.get_submodule(root), (nn.ModuleList, nn.ModuleDict)):
            raise PlanError(
                f"{root} is a {type(module).__name__}, which is never called as a whole",
                where="task.trainable",
                accepted="modules with a forward, since sharded weights are complete only during a call",
                hint=f"name the modules in it: {', '.join(f'{root}.{n}' for n in module._modules)}",
            )
    plans = model_plans(task, trainable)
    ignored = tuple(match(list(ignore), _paths(task), "engine.ignored_modules"))
    _check_ignored(task, trainable, ignored)
    wrapped, who_wraps = _wrapped(task, trainable, wrap, plans)
    recomputed, who_recomputes = _recomputed(task, trainable, recompute, plans)
    for key, chosen in ((who_wraps, wrapped), (who_recomputes, recomputed)):
        if outside := [path for path in chosen if not _inside(f"{path}.", trainable)]:
            raise PlanError(
                f"{outside[0]!r} is not part of a trained module",
                where=key,
                accepted=f"paths below {', '.join(trainable)}",
            )
        check_callable(task, chosen, key)
    forward, backward, who_prefetches = _prefetched(
        wrapped, plans.values(), who_wraps != _WRAP, forward_prefetch, backward_prefetch
    )
    decided_by = {"wrapped": who_wraps, "recomputed": who_recomputes, "prefetched": who_prefetches}
    return Layout(
        wrapped=wrapped,
        recomputed=recomputed,
        ignored=ignored,
        forward_prefetch=forward,
        backward_prefetch=backward,
        decided_by=decided_by if plans else {},
    )


def _paths(task: TaskModule) -> list[str]:
    return [name for name, _ in task.named_modules() if name]


def _check_ignored(task: TaskModule, trainable: Sequence[str], ignored: Sequence[str]) -> None:
    for path in ignored:
        inside = task.get_submodule(path).named_parameters(prefix=path)
        if trained := [name for name, p in inside if p.requires_grad and _inside(f"{name}.", trainable)]:
            raise PlanError(
                f"{path!r} contains {plural(len(trained), 'trained parameter')}, such as {trained[0]!r}; "
                "if ignored, their gradients would not be averaged over ranks",
                where="engine.ignored_modules",
                accepted="frozen modules, or modules without parameters",
                hint="remove it from engine.ignored_modules",
            )


def _wrapped(
    task: TaskModule, trainable: Sequence[str], wrap: Patterns, plans: Mapping[str, ModelPlan]
) -> tuple[tuple[str, ...], str]:
    """The wrapped modules, and who decided."""
    planned = {root: p.matches("wrap", p.plan.wrap) for root, p in plans.items() if p.plan.wrap is not None}
    sources = [f"{plans[root].source}.wrap" for root in planned]
    if wrap == "auto":
        found = [planned.get(root) or _blocks(task, root, planned) for root in trainable]
        wrapped = tuple(path for paths in found for path in paths)
        origin = ", ".join([*sources, *(["auto"] if len(planned) < len(trainable) else [])])
    else:
        wrapped, origin = tuple(match(list(wrap), _paths(task), _WRAP)), _WRAP
    wrapped = tuple(path for path in wrapped if path not in trainable)
    tied = shared_outside(task, wrapped)
    chosen = tied if wrap != "auto" else [p for paths in planned.values() for p in paths if p in tied]
    for path in chosen:
        own, other = tied[path]
        raise PlanError(
            f"{path!r} shares {own!r} with {other!r} outside of it, so it cannot be sharded on its own",
            where=origin,
            accepted="auto, which leaves such modules out; or the path of a module that contains both",
        )
    return tuple(path for path in wrapped if path not in tied), origin


def _blocks(task: TaskModule, root: str, planned: Collection[str]) -> list[str]:
    return [] if root in planned else like_blocks(task.get_submodule(root), root)


def _recomputed(
    task: TaskModule, trainable: Sequence[str], recompute: Patterns | None, plans: Mapping[str, ModelPlan]
) -> tuple[tuple[str, ...], str]:
    """The recomputed modules, and who decided."""
    if recompute is not None and recompute != "auto":
        return tuple(match(list(recompute), _paths(task), _RECOMPUTE)), _RECOMPUTE
    planned = {
        root: p.matches("recompute", p.plan.recompute) for root, p in plans.items() if p.plan.recompute
    }
    sources = [f"{plans[root].source}.recompute" for root in planned]
    if recompute is None:
        return tuple(path for paths in planned.values() for path in paths), ", ".join(sources) or "no plan"
    found = [path for root in trainable for path in planned.get(root) or _blocks(task, root, planned)]
    if not found:
        raise PlanError(
            f"'auto' finds no repeated blocks in {', '.join(trainable)}",
            where=_RECOMPUTE,
            accepted="path patterns; or a model with _no_split_modules or a list of equal modules",
            hint="list the blocks to recompute, for example ['predictor.blocks.*'], or set it to []",
        )
    return tuple(found), ", ".join([*sources, *(["auto"] if len(planned) < len(trainable) else [])])


def _prefetched(
    wrapped: Sequence[str],
    plans: Collection[ModelPlan],
    strict: bool,
    forward: int | None,
    backward: int | None,
) -> tuple[Prefetch, Prefetch, str]:
    """The prefetching of the forward and of the backward, and who decided."""
    planned = {path: ahead for plan in plans for path, ahead in plan.prefetch(wrapped, strict).items()}
    sources = [plan.source for plan in plans if plan.plan.prefetch and None in (forward, backward)]
    sources += ["engine.num_to_forward_prefetch"] if forward is not None else []
    sources += ["engine.num_to_backward_prefetch"] if backward is not None else []
    return (
        planned if forward is None else in_order(wrapped, forward),
        backwards(planned, wrapped) if backward is None else in_order(wrapped[::-1], backward),
        ", ".join(sources),
    )


def resharded(task: TaskModule, layout: Layout, wanted: bool | Sequence[str]) -> tuple[str, ...]:
    """The modules that drop gathered parameters after their forward, of the roots and the wrapped ones.

    Args:
        task: the task.
        layout: its sharding layout.
        wanted: all or none, or patterns.

    Raises:
        PlanError: a pattern matches nothing, or a module that is not sharded as a unit.
    """
    units = (*task.trainable, *layout.wrapped)
    if isinstance(wanted, bool):
        return units if wanted else ()
    found = match(list(wanted), _paths(task), _RESHARD)
    if other := [path for path in found if path not in units]:
        raise PlanError(
            f"{other[0]!r} is not sharded as a unit",
            where=_RESHARD,
            accepted=f"trained components and wrapped modules, such as {', '.join(units[:3])}",
        )
    return tuple(found)


def gathered_bytes(
    task: TaskModule,
    layout: Layout,
    dtype: torch.dtype | None,
    resharded: Collection[str],
    streamed: Collection[nn.Parameter] = (),
) -> int:
    """The peak bytes of gathered (unsharded) parameters in a task's sharding layout.

    These are the parameters outside wrapped modules, and those of the computing wrapped module and of those
    that are gathered ahead, with the modules that contain them. Even without configured prefetching,
    fully_shard gathers the next module of the backward.

    Args:
        task: the task.
        layout: its sharding layout.
        dtype: dtype of gathered parameters; None for their own.
        resharded: the modules that drop gathered parameters after their forward; others stay gathered until
            their backward.
        streamed: parameters that are not sharded.
    """
    own = dict.fromkeys((*task.trainable, *layout.wrapped), 0)
    seen = {id(parameter) for parameter in streamed}
    for root in task.trainable:
        for name, parameter in task.get_submodule(root).named_parameters(prefix=root):
            if id(parameter) in seen or _inside(name, layout.ignored):
                continue
            seen.add(id(parameter))
            size = dtype.itemsize if dtype and parameter.is_floating_point() else parameter.element_size()
            own[max(_inside(name, own), key=len)] += parameter.numel() * size
    kept = {path for path in layout.wrapped if path not in resharded}
    whole = sum(own[path] for path in (*task.trainable, *kept))
    own |= dict.fromkeys(kept, 0)
    windows = [layout.wrapped[i : i + 2] for i in range(len(layout.wrapped))]
    for prefetch in (layout.forward_prefetch, layout.backward_prefetch):
        windows += [(path, *ahead) for path, ahead in prefetch.items()]
    held = [{path for w in window for path in _inside(f"{w}.", layout.wrapped)} for window in windows]
    return whole + max((sum(own[path] for path in paths) for paths in held), default=0)


def parameter_bytes(
    task: TaskModule, layout: Layout, shards: int, streamed: Collection[nn.Parameter] = ()
) -> tuple[int, int, int]:
    """Bytes of the parameters on the rank with the largest shards: all, those that train, and whole ones.

    Args:
        task: the task.
        layout: its sharding layout.
        shards: ranks in a shard group.
        streamed: parameters to leave out.
    """
    own = trained = left_alone = 0
    for root in task.trainable:
        for name, parameter in task.get_submodule(root).named_parameters(prefix=root):
            if parameter in streamed:
                continue
            whole = parameter.dim() == 0 or bool(_inside(name, layout.ignored))
            rows, *others = parameter.shape or (1,)
            size = (rows if whole else -(-rows // shards)) * prod(others) * parameter.element_size()
            own += size
            left_alone += size if whole else 0
            trained += size if parameter.requires_grad else 0
    return own, trained, left_alone


def _inside(name: str, modules: Iterable[str]) -> list[str]:
    """The modules that contain a dotted name; end a module's own name in a dot to include itself."""
    return [path for path in modules if name.startswith(f"{path}.")]


def shared_outside(task: TaskModule, paths: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The modules that share a parameter with modules outside them (tied weights), which sharding must avoid.

    Returns:
        Path of the module -> (name of the parameter inside, name outside).
    """
    names: dict[int, list[str]] = {}
    for name, parameter in task.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found: dict[str, tuple[str, str]] = {}
    for several in (group for group in names.values() if len(group) > 1):
        for path in paths:
            inside = [name for name in several if name.startswith(f"{path}.")]
            outside = [name for name in several if not name.startswith(f"{path}.")]
            if inside and outside:
                found.setdefault(path, (inside[0], outside[0]))
    return found


def check_callable(task: TaskModule, paths: Sequence[str], key: str) -> None:
    """Refuses containers as modules to wrap or recompute: a list is never called, so nothing would happen.

    Raises:
        PlanError: a path is a ModuleList or ModuleDict.
    """
    for path in paths:
        if isinstance(task.get_submodule(path), (nn.ModuleList, nn.ModuleDict)):
            raise PlanError(
                f"{path!r} is a container, which the forward never calls",
                where=key,
                accepted=f"the modules in it: {path}.{{*}}",
            )


def like_blocks(module: nn.Module, prefix: str, least: int = 2) -> list[str]:
    """The paths of a module's repeated blocks, its units for sharding and recomputation.

    These are the modules in `_no_split_modules`, or the list items that they are in (some name a block's
    attention); else lists of at least `least` modules of one class; of lists within lists, the outer ones.
    """
    # Models in this field have the list by convention; it is not an attribute of nn.Module.
    names: set[str] = set(getattr(module, "_no_split_modules", None) or ())
    if names:
        named = [n for n, m in module.named_modules() if n and type(m).__name__ in names]
        return [f"{prefix}.{n}" for n in dict.fromkeys(re.sub(r"(.+\.\d+)\..+", r"\1", n) for n in named)]
    lists: dict[str, int] = {}
    for name, child in module.named_modules():  # a module before what is in it
        if any(name.startswith(f"{outer}.") for outer in lists):
            continue
        if isinstance(child, nn.ModuleList) and len(child) >= least and len({type(m) for m in child}) == 1:
            lists[name] = len(child)
    return [f"{prefix}.{name}.{index}" for name, length in lists.items() for index in range(length)]


def mesh_shape(world: int, sharding_size: Size, context: int = 1, preset: bool = False) -> tuple[int, int]:
    """The device mesh (replicas, shards) for `world` ranks: shard groups of `sharding_size` ranks each.

    Args:
        world: number of ranks.
        sharding_size: ranks of a shard group.
        context: ranks that share a sample, in one shard group.
        preset: whether `sharding_size` is that of the preset.

    Raises:
        PlanError: `sharding_size` does not divide `world`, or `context` does not divide it.
    """
    shards = world if sharding_size == "auto" else sharding_size
    if world % shards or shards % context:
        sizes = [str(n) for n in range(context, world + 1, context) if world % n == 0]
        what = "preset ddp has shard groups of 1, which" if preset else f"sharding_size {shards}"
        divides = f"does not divide {plural(world, 'rank')}"
        raise PlanError(
            f"{what} {divides if world % shards else f'is no multiple of context_parallel.size, {context}'}",
            where="engine.preset" if preset else "engine.sharding_size",
            accepted="zero2, zero3" if preset else ", ".join(["auto", *sizes]),
        )
    return world // shards, shards
