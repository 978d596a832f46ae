"""Patterns for module paths, and the parameters they select. Used for wrap, ignore, recompute, freeze, LoRA.

`predictor.blocks.{*}` matches any one name; `{0-23}` a range, ends included; `{1,3,5}` a list;
`{0-20,22-40}` both. A path may have several braces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from mm_core.contracts import TaskModule
from mm_core.errors import PlanError, nearest

_BRACE = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)-(\d+)\Z")


def match(patterns: Sequence[str], paths: Iterable[str], key: str) -> list[str]:
    """The module paths that match any of the patterns, in the order of `paths`.

    Args:
        patterns: patterns in the grammar above.
        paths: all module paths.
        key: config key of the patterns, for errors.

    Raises:
        PlanError: a pattern, or a number listed in one, matches nothing.
    """
    known = list(paths)
    chosen: set[str] = set()
    for pattern in patterns:
        chosen |= _match_one(pattern, known, key)
    return [path for path in known if path in chosen]


def freeze(task: TaskModule, patterns: Sequence[str]) -> list[str]:
    """Freezes the parameters that match module patterns; returns their paths in the task.

    Call it before the engine plans.

    Raises:
        PlanError: a pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(task.named_parameters())
    names = select_parameters(patterns, parameters, "train.freeze")
    for name in names:
        parameters[name].requires_grad_(False)
    if names and not any(parameter.requires_grad for parameter in parameters.values()):
        raise PlanError(
            "every parameter is frozen, so there is nothing to train",
            where="train.freeze",
            hint="leave some modules out of train.freeze",
        )
    return names


def select_parameters(patterns: Sequence[str], names: Iterable[str], key: str) -> list[str]:
    """The parameters that match any module pattern, by their own name or by a module that contains them.

    Args:
        patterns: patterns in the grammar above.
        names: names of all parameters.
        key: config key of the patterns, for errors.

    Raises:
        PlanError: a pattern matches nothing.
    """
    names = list(names)
    paths = dict.fromkeys(path for name in names for path in (*above(name), name))
    found = set(match(patterns, paths, key)) if patterns else set()
    return [name for name in names if name in found or not found.isdisjoint(above(name))]


def above(name: str) -> list[str]:
    """The paths of the modules that contain a parameter: `a` and `a.b` for `a.b.weight`."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _match_one(pattern: str, paths: list[str], key: str) -> set[str]:
    braces = [_parse(text, pattern, key) for text in _BRACE.findall(pattern)]
    outside = _BRACE.split(pattern)[::2]
    if any(brace in part for part in outside for brace in "{}"):
        raise _bad_grammar(pattern, key)
    expression = re.compile("([^.]+)".join(map(re.escape, outside)) + r"\Z")
    hits = {path: hit.groups() for path in paths if (hit := expression.match(path))}
    found = {path: values for path, values in hits.items() if all(map(_admits, braces, values))}
    if not found:
        near = _examples(pattern, paths)
        raise PlanError(
            f"pattern {pattern!r} matches no module",
            where=key,
            accepted=f"a path such as {', '.join(near)}" if near else "no pattern: there are no modules",
        )
    for brace, values in zip(braces, map(set, zip(*found.values(), strict=True)), strict=True):
        absent = [item for item in brace or () if not any(_admits([item], value) for value in values)]
        over = [item for item in brace or () if isinstance(item, tuple) and str(item[1]) not in values]
        if absent or over:
            names = ", ".join(_missing(item, values) for item in absent or over)
            raise PlanError(
                f"pattern {pattern!r}: no module has {names} in this place",
                where=key,
                accepted=f"{', '.join(sorted(values, key=_natural))}",
                hint="write {*} for all of them",
            )
    return set(found)


Item = str | tuple[int, int]


def _parse(text: str, pattern: str, key: str) -> list[Item] | None:
    """The items of one pair of braces; None for `*`."""
    if text.strip() == "*":
        return None
    items: list[Item] = []
    for part in (part.strip() for part in text.split(",")):
        bounds = _RANGE.match(part)
        if bounds and int(bounds[1]) <= int(bounds[2]):
            items.append((int(bounds[1]), int(bounds[2])))
        elif re.match(r"\w+\Z", part):
            items.append(part)
        else:
            raise _bad_grammar(pattern, key)
    return items


def _bad_grammar(pattern: str, key: str) -> PlanError:
    return PlanError(
        f"{pattern!r} is not a module pattern",
        where=key,
        accepted="names joined by dots, with {*}, {0-23}, {1,3,5} or {0-20,22-40} in place of a name",
    )


def _admits(items: list[Item] | None, value: str) -> bool:
    if items is None:
        return True
    return any(
        item == value
        if isinstance(item, str)
        else value.isdigit() and str(int(value)) == value and item[0] <= int(value) <= item[1]
        for item in items
    )


def _missing(item: Item, values: set[str]) -> str:
    """The part of an item that no module has: 4-7 of 0-7, if there are four blocks."""
    if isinstance(item, str):
        return item
    missing = [number for number in range(item[0], item[1] + 1) if str(number) not in values]
    return f"{missing[0]}-{missing[-1]}" if len(missing) > 1 else f"{missing[0]}"


def _natural(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdigit() else (-1, name)


def _examples(pattern: str, paths: list[str]) -> list[str]:
    """Existing paths near a pattern, with numbered siblings folded to `{*}`: similar ones, else ones with a
    similar last name, else ones of the same depth (for a name without dots: the task's components)."""
    folded = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|\Z)", "{*}", path) for path in paths if path))
    plain = _BRACE.sub("{*}", pattern)
    if found := nearest(plain, folded, 3):
        return [repr(path) for path in found]
    ends: dict[str, str] = {}
    for path in folded:
        ends.setdefault(path.rpartition(".")[2], path)
    if found := [ends[end] for end in nearest(plain.rpartition(".")[2], ends, 3) if end != "{*}"]:
        return [repr(path) for path in found]
    as_deep = [path for path in folded if path.count(".") == plain.count(".")]
    return [repr(path) for path in (as_deep or folded)[:5]]
