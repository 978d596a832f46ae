"""The sharding plans that models bring: resolved to module paths in the task."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mm_core.contracts import ShardPlan, SupportsShardPlan, TaskModule
from mm_core.errors import ContractError, PlanError, nearest
from mm_core.modules.patterns import match
from mm_core.plugin.checks.places import place_of_method

Prefetch = dict[str, tuple[str, ...]]
"""Path of a wrapped module -> wrapped modules that are gathered while it computes."""


@dataclass(frozen=True)
class ModelPlan:
    """The sharding plan of a trained component; paths are relative to it.

    Attributes:
        root: path of the component in the task.
        plan: what the component wants.
        paths: all of the component's modules.
    """

    root: str
    plan: ShardPlan
    paths: tuple[str, ...]

    @property
    def source(self) -> str:
        """Where the plan is from, for errors and for the plan of a run."""
        return f"{self.root}.shard_plan()"

    def matches(self, key: str, patterns: Sequence[str]) -> list[str]:
        """The module paths in the task that match patterns of the plan.

        Raises:
            PlanError: a pattern matches nothing.
        """
        found = match(patterns, self.paths, f"{self.source}.{key}")
        return [f"{self.root}.{path}" for path in found]

    def prefetch(self, wrapped: Sequence[str], strict: bool) -> Prefetch:
        """The modules to gather in the forward of each wrapped module of the component.

        Args:
            wrapped: all wrapped modules, by path in the task.
            strict: whether modules that are not wrapped are an error; where the config has chosen the wrapped
                modules, they are left out.

        Raises:
            PlanError: the plan names a module that is not wrapped.
        """
        own = [path for path in wrapped if path.startswith(f"{self.root}.")]
        ahead = self.plan.prefetch
        if not isinstance(ahead, Mapping):
            return in_order(own, ahead)
        if strict:
            self._check_wrapped([*ahead, *(path for paths in ahead.values() for path in paths)], own)
        full = {f"{self.root}.{path}": [f"{self.root}.{p}" for p in paths] for path, paths in ahead.items()}
        return {path: tuple(p for p in paths if p in own) for path, paths in full.items() if path in own}

    def _check_wrapped(self, named: Sequence[str], own: Sequence[str]) -> None:
        known = [path.removeprefix(f"{self.root}.") for path in own]
        for path in named:
            if path not in known:
                near = nearest(path, known, 3) or known[:3]
                raise PlanError(
                    f"{path!r} is not a wrapped module",
                    where=f"{self.source}.prefetch",
                    accepted=f"paths of wrapped modules, such as {', '.join(map(repr, near))}"
                    if near
                    else "nothing: no module is wrapped",
                )


def model_plans(task: TaskModule, trainable: Sequence[str]) -> dict[str, ModelPlan]:
    """The sharding plans of trained components that bring one, by path of the component.

    Raises:
        ContractError: a component returns something else than a `ShardPlan`.
    """
    found = {}
    for root in trainable:
        component = task.get_submodule(root)
        if not isinstance(component, SupportsShardPlan):
            continue
        plan = component.shard_plan()
        if not isinstance(plan, ShardPlan):
            raise ContractError(
                f"shard_plan of {type(component).__name__} returned {plan!r}",
                where=f"{root}, {place_of_method(component, 'shard_plan')}",
                accepted="a mm_core.contracts.ShardPlan",
                hint='return ShardPlan(wrap=("blocks.{*}",))',
            )
        paths = tuple(name for name, _ in component.named_modules() if name)
        found[root] = ModelPlan(root, plan, paths)
    return found


def in_order(wrapped: Sequence[str], ahead: int) -> Prefetch:
    """Prefetching of wrapped modules that run in their order: each gathers the `ahead` modules after it."""
    return {path: tuple(wrapped[i + 1 : i + 1 + ahead]) for i, path in enumerate(wrapped)} if ahead else {}


def backwards(forward: Mapping[str, Collection[str]], wrapped: Sequence[str]) -> Prefetch:
    """The prefetching of a backward, which gathers modules in the opposite order of the forward.

    Args:
        forward: the prefetching of the forward, in the order in which modules run.
        wrapped: all wrapped modules.
    """
    opposite = list(forward)[::-1]
    return {path: before for path in wrapped if (before := tuple(p for p in opposite if path in forward[p]))}
