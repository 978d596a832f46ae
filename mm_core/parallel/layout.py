"""Which modules are wrapped, ignored and recomputed, on what mesh: decided on meta modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from mm_core.contracts import TaskModule
from mm_core.errors import PlanError
from mm_core.modules.patterns import match


@dataclass(frozen=True)
class Layout:
    """Module paths relative to the task, in module order."""

    roots: tuple[str, ...]
    wrapped: tuple[str, ...]
    recomputed: tuple[str, ...]
    ignored: tuple[str, ...]


Patterns = Literal["auto"] | Sequence[str]


def decide_layout(
    task: TaskModule, trainable: Sequence[str], *, wrap: Patterns, recompute: Patterns, ignore: Sequence[str]
) -> Layout:
    """Resolves the patterns against the task's modules. PlanError for one that matches nothing, or
    that would leave trained parameters out of the sharding."""
    paths = [name for name, _ in task.named_modules() if name]
    blocks = [path for root in trainable for path in like_blocks(task.get_submodule(root), root)]

    def resolve(patterns: Patterns, key: str) -> tuple[str, ...]:
        return tuple(blocks) if patterns == "auto" else tuple(match(list(patterns), paths, key))

    if recompute == "auto" and not blocks:
        raise PlanError(
            f"'auto' finds no blocks in {', '.join(trainable)}",
            where="engine.recompute_modules",
            accepted="path patterns; or a model with _no_split_modules or a list of like modules",
        )
    ignored = resolve(ignore, "engine.ignored_modules")
    for path in ignored:
        inside = task.get_submodule(path).named_parameters(prefix=path)
        if trained := [name for name, p in inside if p.requires_grad and _inside(f"{name}.", trainable)]:
            raise PlanError(
                f"{path!r} holds {len(trained)} trained parameters, such as {trained[0]!r}; "
                "ignoring it would leave their gradients out of the reduction",
                where="engine.ignored_modules",
                accepted="frozen modules, or modules without parameters",
                hint="take it out of the list",
            )
    wrapped = tuple(p for p in resolve(wrap, "engine.sub_modules_to_wrap") if p not in trainable)
    if tied := shared_outside(task, wrapped):
        if wrap != "auto":
            path, (own, other) = next(iter(tied.items()))
            raise PlanError(
                f"{path!r} shares {own!r} with {other!r} outside of it: both must be gathered together",
                where="engine.sub_modules_to_wrap",
                accepted="auto, which leaves such modules out; or a module that holds both",
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
    """Most bytes of parameters that are whole at a time: what no wrapped module holds, and `ahead` wrapped
    modules beside the one that computes, with those that they lie in.

    Args:
        dtype: of gathered parameters; None: as stored.
        ahead: None: every wrapped module stays gathered until its backward.
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
    """The modules that a dotted name lies in; that of a module itself ends in a dot."""
    return [path for path in modules if name.startswith(f"{path}.")]


def shared_outside(task: TaskModule, paths: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Of the modules that share a parameter with what is not in them (tied weights), by path: (its name, the
    other name)."""
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
    """PlanError for containers: nobody calls a list, so nothing would be gathered or recomputed."""
    for path in paths:
        if isinstance(task.get_submodule(path), (nn.ModuleList, nn.ModuleDict)):
            raise PlanError(
                f"{path!r} is a container, which is never called itself",
                where=key,
                accepted=f"the modules in it: {path}.{{*}}",
            )


def like_blocks(module: nn.Module, prefix: str) -> list[str]:
    """Paths of the repeated blocks: what `_no_split_modules` names, else lists of like modules; of lists
    within lists (a block's experts) the outer ones, each of which is a unit by itself."""
    # The field's models carry this list by convention; it is no attribute of nn.Module.
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
    """(replicas, shards): a shard group of `sharding_size` ranks, replicated over the others."""
    shards = world if sharding_size == "auto" else sharding_size
    if world % shards:
        sizes = [str(n) for n in range(1, world + 1) if world % n == 0]
        raise PlanError(
            f"sharding_size {shards} does not divide {world} rank{'s' * (world != 1)}",
            where="engine.sharding_size",
            accepted=f"auto, {', '.join(sizes)}",
        )
    return world // shards, shards
