"""Config dataclasses of components that have none, created from the signatures of their targets."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, get_type_hints

from mm_core.plugin.hookspecs import COMPONENT_KINDS
from mm_core.schema.describe import parameter_docs

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def signature_config(target: Callable[..., object], kind: str) -> type[DataclassInstance]:
    """Creates the config dataclass of a component's target from its signature: one field per parameter.

    An annotation that cannot be resolved counts as Any: the target must check the value itself.

    Raises:
        TypeError: a parameter that cannot be passed by keyword.
        ValueError: the target has no signature, or one of its parameters no field's name.
    """
    return _from_signature(target, COMPONENT_KINDS[kind].leading)


@cache
def _from_signature(target: Callable[..., object], leading: int) -> type[DataclassInstance]:
    hints, docs = _hints(target), parameter_docs(target)
    fields: list[tuple[str, object, object]] = []
    for parameter in list(inspect.signature(target).parameters.values())[leading:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(f"parameter {parameter.name!r} cannot be passed by keyword")
        field = _field(parameter.default, docs.get(parameter.name, ""))
        fields.append((parameter.name, hints.get(parameter.name, Any), field))
    name = f"{target.__name__}Config" if isinstance(target, type) else "SignatureConfig"
    return dataclasses.make_dataclass(name, fields, frozen=True, kw_only=True)


def _field(default: object, doc: str) -> object:
    metadata = {"doc": doc}
    if default is inspect.Parameter.empty:
        return dataclasses.field(metadata=metadata)
    if type(default).__hash__ is None:  # dataclasses do not accept mutable defaults
        return dataclasses.field(default_factory=partial(copy.deepcopy, default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _hints(target: Callable[..., object]) -> dict[str, object]:
    owner = getattr(target, "__init__") if isinstance(target, type) else target  # noqa: B009
    try:
        return get_type_hints(owner, include_extras=True)
    except (NameError, AttributeError):  # names that exist only for type checkers
        raw = inspect.get_annotations(owner)
        return {name: value for name, value in raw.items() if not isinstance(value, str)}
