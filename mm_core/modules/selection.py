"""Parameters by the path grammar: those that a pattern names, or that lie below a module it names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mm_core.contracts import TaskModule
from mm_core.errors import PlanError
from mm_core.modules.patterns import match


def freeze(task: TaskModule, patterns: Sequence[str]) -> list[str]:
    """Takes the parameters that `patterns` cover out of training; returns their paths in the task.

    To be called on the task before the engine plans.

    Raises:
        PlanError: a pattern that matches nothing, or nothing left to train.
    """
    parameters = dict(task.named_parameters())
    names = covered(patterns, parameters, "train.freeze")
    for name in names:
        parameters[name].requires_grad_(False)
    if names and not any(parameter.requires_grad for parameter in parameters.values()):
        raise PlanError(
            "every parameter is frozen, so there is nothing to train",
            where="train.freeze",
            hint="leave some modules out of train.freeze",
        )
    return names


def covered(patterns: Sequence[str], names: Iterable[str], key: str) -> list[str]:
    """The names of parameters that any pattern matches, by themselves or by a module above them.

    Raises PlanError, naming `key`, for a pattern that matches nothing.
    """
    names = list(names)
    paths = dict.fromkeys(path for name in names for path in (*above(name), name))
    found = set(match(patterns, paths, key)) if patterns else set()
    return [name for name in names if name in found or not found.isdisjoint(above(name))]


def above(name: str) -> list[str]:
    """The paths of the modules that hold `a.b.weight`: `a` and `a.b`."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
