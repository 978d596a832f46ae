"""The type annotations of typed dataclasses."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, get_type_hints

from mm_core.errors import PluginError, foreign_code

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

UNRESOLVED_HINT = "annotate with names that exist when the module is imported"


def annotations_of(cls: type[DataclassInstance]) -> dict[str, Any]:
    """The type annotations of a typed dataclass, by field.

    Raises:
        PluginError: one cannot be resolved; names the dataclass, with the author's file and line.
    """
    try:
        with foreign_code():
            return get_type_hints(cls, include_extras=True)
    except Exception as error:  # annotations are plugin code: they may raise anything
        what = f"the annotations of {cls.__module__}.{cls.__qualname__} cannot be resolved: {error}"
        raise PluginError(what + _place(cls), hint=UNRESOLVED_HINT) from error


def _place(cls: type) -> str:
    try:
        return f" ({inspect.getsourcefile(cls)}, line {inspect.getsourcelines(cls)[1]})"
    except (OSError, TypeError):  # without source
        return ""
