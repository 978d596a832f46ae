"""Memory and work of a run's phases, from a rank on fakes: of a long model, from two short ones.

All blocks of a list do the same, so what a phase needs grows by one block's share with each of them. A model
with long lists is computed with `SHORT` blocks of each, and once with one more of all lists of a length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mm_core.contracts import EnginePlan, TaskModule
from mm_core.parallel.layout import ShardedPlan
from mm_core.training.forecast.fake_rank import FakeRank, Group, groups_of
from mm_core.training.forecast.meter import Meter, Work

SHORT = 3


@dataclass
class Counted:
    """What one segment of a phase needs: bytes at its peak by part, and its operators."""

    parts: Counter[str] = field(default_factory=Counter)
    work: Counter[Work] = field(default_factory=Counter)

    @property
    def bytes(self) -> int:
        """All parts."""
        return self.parts.total()


Phases = dict[str, dict[str, Counted]]

Calls = dict[Work, tuple[Any, Any, Any]]
"""See `Meter.calls`."""


def counted(
    task: TaskModule,
    build: Callable[[], TaskModule],
    plan: EnginePlan,
    rank: Callable[[TaskModule], FakeRank],
    calls: Calls,
) -> Phases:
    """What the phases of a run need.

    Args:
        task: the run's, on the meta device; it cannot be used afterwards.
        build: makes another.
        plan: the engine's plan of it.
        rank: a rank of a task, with the engine's plan of it.
        calls: receives an example of each operator.
    """
    long = [group for group in groups_of(task) if len(group.paths) > SHORT + 1 and _alike(task, plan, group)]
    if not long:
        return _run(rank(task), calls)
    try:
        return _composed(build, rank, long, calls)
    except Exception:  # a model may count on the length of its lists
        return _run(rank(task), calls)


def _composed(
    build: Callable[[], TaskModule],
    rank: Callable[[TaskModule], FakeRank],
    long: Sequence[Group],
    calls: Calls,
) -> Phases:
    def of(lengths: Mapping[str, int]) -> Phases:
        short = build()
        for group in long:
            _shorten(short, group, lengths[group.label])
        return _run(rank(short), calls)

    least = {group.label: SHORT for group in long}
    base = of(least)
    found = {name: {key: Counted(+c.parts, +c.work) for key, c in own.items()} for name, own in base.items()}
    for length in {len(group.paths): None for group in long}:  # of lists of one length a block each together
        grown = {group.label: SHORT + 1 for group in long if len(group.paths) == length}
        _add(found, base, of({**least, **grown}), length - SHORT)
    return found


def _run(rank: FakeRank, calls: Calls) -> Phases:
    meter = Meter()
    rank.run(meter)
    calls.update(meter.calls)
    found = {
        name: {key: Counted(Counter(meter.parts(s.at)), s.work) for key, s in own.items()}
        for name, own in meter.phases.items()
    }
    # What the first step leaves, the optimizer's state, is there in all of the others.
    left = found.pop("between steps")["begin"].parts - found["step"]["begin"].parts
    del found["other steps"]
    for key, segment in found["step"].items():
        segment.parts = segment.parts | left if key == "update" else segment.parts + left
    return found


def _add(found: Phases, base: Phases, more: Phases, times: int) -> None:
    """Adds to what is found `times` the difference of two counts. A segment that only one of them has is of
    a block in the middle: its operators count, and its peak lies between those of others."""
    for name, own in more.items():
        for key in {**own, **base[name]}:
            one, other = own.get(key, Counted()), base[name].get(key, Counted())
            into = found[name].setdefault(key, Counted())
            if key in own and key in base[name]:
                _grow(into.parts, one.parts, other.parts, times)
            _grow(into.work, one.work, other.work, times)


def _grow(into: Counter[Any], one: Counter[Any], other: Counter[Any], times: int) -> None:
    for key in {**one, **other}:
        into[key] += times * (one[key] - other[key])


def _shorten(task: TaskModule, group: Group, length: int) -> None:
    """Drops the last blocks of a list."""
    blocks = task.get_submodule(group.label.removesuffix(".*"))
    assert isinstance(blocks, nn.ModuleList)
    del blocks[length:]


def _alike(task: TaskModule, plan: EnginePlan, group: Group) -> bool:
    """Whether all blocks of a list are the same to the run; the last may keep its weights gathered."""
    if not isinstance(task.get_submodule(group.label.removesuffix(".*")), nn.ModuleList):
        return False
    sets: dict[str, Sequence[str]] = {}
    if isinstance(plan, ShardedPlan):
        sets = {"wrapped": plan.wrapped, "recomputed": plan.recomputed, "compiled": plan.compiled}

    def facts(path: str) -> object:
        block = task.get_submodule(path)
        tensors = [(n, p.shape, p.dtype, p.requires_grad) for n, p in block.named_parameters()]
        held = {
            (key, p.removeprefix(path))
            for key, own in sets.items()
            for p in own
            if f"{p}.".startswith(f"{path}.")
        }
        return type(block), tensors, held

    first, *rest = map(facts, group.paths)
    return all(each == first for each in rest)
