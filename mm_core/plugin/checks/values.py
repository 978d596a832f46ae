"""Whether a value is of the type that a contract declares, and what a component returned instead."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mm_core.errors import ContractError
from mm_core.plugin.checks.places import place_of_method

T = TypeVar("T")

_SHOWN = 60
"""How many characters of a wrong value a message shows."""


def returned(member: Callable[..., T], value: object, owner: object) -> T:
    """Returns what a component's method returned unchanged if it is of the type that the contract declares.

    Args:
        member: the method of the contract: `LRSchedule.factor`.
        value: what the component's method returned.
        owner: the component.

    Raises:
        ContractError: the value is of another type; the error has the file and line of the method.
    """
    wanted = _return_type(member)
    if not fits(value, wanted):
        name = member.__name__
        raise ContractError(
            f"{name} of {type(owner).__name__} returned {_shown(value)}",
            where=place_of_method(owner, name),
            accepted=type_text(wanted),
            hint=f"`python -m pydoc {member.__module__}` explains what it returns",
        )
    return value  # type: ignore[return-value]


@cache
def _return_type(member: Callable[..., object]) -> Any:
    """What a method of a contract returns. Its other annotations may name types that only mypy imports."""
    alone = SimpleNamespace(__annotations__={"return": member.__annotations__["return"]})
    return get_type_hints(alone, vars(sys.modules[member.__module__]))["return"]


def _shown(value: object) -> str:
    text = f"{value!r}"
    plain = isinstance(value, int | float | str | tuple | list | dict | None) and len(text) <= _SHOWN
    return text if plain else f"a {type(value).__name__}"


def fits(value: object, wanted: Any) -> bool:
    """Whether a value is of an annotated type, checked for plain types, tuples and unions."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in inner)
    if origin is Literal:
        return value in inner
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(inner) == 2 and inner[1] is Ellipsis:
            return all(fits(each, inner[0]) for each in value)
        return len(value) == len(inner) and all(map(fits, value, inner))
    if isinstance(origin, type):  # what a mapping or an iterator contains is not read
        return isinstance(value, origin) and not (isinstance(value, str) and origin is not str)
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    plain = isinstance(wanted, type) and wanted is not Any and not getattr(wanted, "_is_protocol", False)
    return not plain or isinstance(value, wanted)


def type_text(wanted: Any) -> str:
    """An annotated type as an author writes it."""
    if isinstance(wanted, str):
        return wanted
    if get_origin(wanted) in (Union, UnionType):
        return " | ".join(map(type_text, get_args(wanted)))
    return inspect.formatannotation(wanted).replace("typing.", "").replace("collections.abc.", "")
