"""The sharding layout: which modules are wrapped, ignored and recomputed, decided on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from mm_core.contracts import TaskModule
from mm_core.errors import PlanError, plural
from mm_core.modules.patterns import match


@dataclass(frozen=True)
class Layout:
    """The sharding layout of a task: module paths in the task, in module order.

    Attributes:
        roots: trained components.
        wrapped: modules sharded as units of their own.
        recomputed: modules whose activations are recomputed in the backward.
        ignored: modules that are not sharded.
    """

    roots: tuple[str, ...]
    wrapped: tuple[str, ...]
    recomputed: tuple[str, ...]
    ignored: tuple[str, ...]


Patterns = Literal["auto"] | Sequence[str]


def decide_layout(
    task: TaskModule, trainable: Sequence[str], *, wrap: Patterns, recompute: Patterns, ignore: Sequence[str]
) -> Layout:
    """Decides a task's sharding layout: resolves the engine's module patterns against the task's modules.

    Args:
        task: the task, on the meta device or not.
        trainable: names of the trained components.
        wrap: patterns of modules to shard as units.
        recompute: patterns of modules to recompute.
        ignore: patterns of modules not to shard.

    Raises:
        PlanError: a pattern matches nothing, or would exclude trained parameters from sharding.
    """
    paths = [name for name, _ in task.named_modules() if name]
    blocks = [path for root in trainable for path in like_blocks(task.get_submodule(root), root)]

    def resolve(patterns: Patterns, key: str) -> tuple[str, ...]:
        return tuple(blocks) if patterns == "auto" else tuple(match(list(patterns), paths, key))

    if recompute == "auto" and not blocks:
        raise PlanError(
            f"'auto' finds no repeated blocks in {', '.join(trainable)}",
            where="engine.recompute_modules",
            accepted="path patterns; or a model with _no_split_modules or a list of equal modules",
        )
    ignored = resolve(ignore, "engine.ignored_modules")
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
    wrapped = tuple(p for p in resolve(wrap, "engine.sub_modules_to_wrap") if p not in trainable)
    if tied := shared_outside(task, wrapped):
        if wrap != "auto":
            path, (own, other) = next(iter(tied.items()))
            raise PlanError(
                f"{path!r} shares {own!r} with {other!r} outside of it: both must be gathered together",
                where="engine.sub_modules_to_wrap",
                accepted="auto, which leaves such modules out; or a module that contains both",
            )
        wrapped = tuple(path for path in wrapped if path not in tied)
    recomputed = resolve(recompute, "engine.recompute_modules")
    for key, chosen in (("sub_modules_to_wrap", wrapped), ("recompute_modules", recomputed)):
        if outside := [path for path in chosen if not _inside(f"{path}.", trainable)]:
            raise PlanError(
                f"{outside[0]!r} is not part of a trained module",
                where=f"engine.{key}",
                accepted=f"paths below {', '.join(trainable)}",
            )
        check_callable(task, chosen, f"engine.{key}")
    return Layout(tuple(trainable), wrapped, recomputed, ignored)


def gathered_bytes(task: TaskModule, layout: Layout, dtype: torch.dtype | None, ahead: int | None) -> int:
    """The peak bytes of gathered (unsharded) parameters in a task's sharding layout.

    These are the parameters outside wrapped modules, and those of the computing wrapped module and `ahead`
    further ones, with the modules that contain them.

    Args:
        task: the task.
        layout: its sharding layout.
        dtype: dtype of gathered parameters; None for their own.
        ahead: number of prefetched modules; None if every wrapped module stays gathered until its backward.
    """
    own = dict.fromkeys((*layout.roots, *layout.wrapped), 0)
    seen: set[int] = set()
    for root in layout.roots:
        for name, parameter in task.get_submodule(root).named_parameters(prefix=root):
            if id(parameter) in seen or _inside(name, layout.ignored):
                continue
            seen.add(id(parameter))
            size = dtype.itemsize if dtype and parameter.is_floating_point() else parameter.element_size()
            own[max(_inside(name, own), key=len)] += parameter.numel() * size
    whole = sum(own[root] for root in layout.roots)
    if ahead is None:
        return sum(own.values())
    windows = [layout.wrapped[i : i + 1 + ahead] for i in range(len(layout.wrapped))]
    held = [{path for w in window for path in _inside(f"{w}.", layout.wrapped)} for window in windows]
    return whole + max((sum(own[path] for path in paths) for paths in held), default=0)


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


def like_blocks(module: nn.Module, prefix: str) -> list[str]:
    """The paths of a module's repeated blocks, its units for sharding and recomputation.

    These are the modules in `_no_split_modules`, else lists of modules of one class; for lists within lists
    (a block's experts), the outer ones.
    """
    # Models in this field have the list by convention; it is not an attribute of nn.Module.
    names: set[str] = set(getattr(module, "_no_split_modules", None) or ())
    if names:
        return [f"{prefix}.{n}" for n, m in module.named_modules() if n and type(m).__name__ in names]
    lists: dict[str, int] = {}
    for name, child in module.named_modules():  # a module before what is in it
        if any(name.startswith(f"{outer}.") for outer in lists):
            continue
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len({type(m) for m in child}) == 1:
            lists[name] = len(child)
    return [f"{prefix}.{name}.{index}" for name, length in lists.items() for index in range(length)]


def mesh_shape(world: int, sharding_size: int | Literal["auto"]) -> tuple[int, int]:
    """The device mesh (replicas, shards) for a number of ranks: shard groups of `sharding_size` ranks each.

    Raises:
        PlanError: `sharding_size` does not divide the number of ranks.
    """
    shards = world if sharding_size == "auto" else sharding_size
    if world % shards:
        sizes = [str(n) for n in range(1, world + 1) if world % n == 0]
        raise PlanError(
            f"sharding_size {shards} does not divide {plural(world, 'rank')}",
            where="engine.sharding_size",
            accepted=f"auto, {', '.join(sizes)}",
        )
    return world // shards, shards
