"""The type annotations of typed dataclasses, and which of them cannot be resolved."""

from __future__ import annotations

import ast
import inspect
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, get_type_hints

from mm_core.errors import PluginError, foreign_code

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

UNRESOLVED_HINT = "annotate with names that exist when the module is imported"


def annotations_of(cls: type[DataclassInstance]) -> dict[str, Any]:
    """The type annotations of a typed dataclass, by field.

    Raises:
        PluginError: one cannot be resolved; names it, with the author's file and line.
    """
    try:
        with foreign_code():
            return get_type_hints(cls, include_extras=True)
    except Exception as error:  # annotations are plugin code: they may raise anything
        what = f"the annotations of {cls.__module__}.{cls.__qualname__} cannot be resolved: {error}"
        raise PluginError(what + _culprit(cls), hint=UNRESOLVED_HINT) from error


def _culprit(cls: type[DataclassInstance]) -> str:
    """The first annotation that cannot be resolved, with its file and line; empty if they are not known."""
    for base in cls.__mro__:
        for name, text in vars(base).get("__annotations__", {}).items():
            if not isinstance(text, str):
                continue
            try:
                with foreign_code():
                    eval(text, vars(sys.modules[base.__module__]), dict(vars(base)))
            except Exception:
                return f" ({_place(base, name)}`{name}: {text}`)"
    return ""


def _place(cls: type, name: str) -> str:
    with suppress(OSError, TypeError, SyntaxError):  # without source
        lines, first = inspect.getsourcelines(cls)
        (definition,) = ast.parse(inspect.cleandoc("\n" + "".join(lines))).body
        for statement in getattr(definition, "body", ()):
            if isinstance(statement, ast.AnnAssign) and getattr(statement.target, "id", None) == name:
                return f"{inspect.getsourcefile(cls)}, line {first + statement.lineno - 1}: "
    return ""
