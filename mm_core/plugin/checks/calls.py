"""Whether a function or method can be called as the core calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence

from mm_core.plugin.checks.places import line_of


def call_fault(
    target: Callable[..., object], args: Sequence[object], fields: Mapping[str, object]
) -> tuple[str, TypeError] | None:
    """The signature of a target or method that a call does not match, and why; None if it matches."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return None  # some built-in callables have no signature
    try:
        signature.bind(*args, **fields)
    except TypeError as error:
        return str(signature), error
    return None


def method_fault(
    name: str,
    method: Callable[..., object],
    called: inspect.Signature,
    by_name: bool,
    bound: bool,
    beside: str | None,
) -> str | None:
    """Why a method cannot be called as its contract requires; None if it can.

    Args:
        name: the method's name.
        method: the method.
        called: the signature that the contract requires.
        by_name: arguments are passed by name.
        bound: the method takes no `self`.
        beside: the file of its class.
    """
    words: list[None] = [] if bound else [None]
    named: dict[str, None] = {}
    for parameter in called.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if by_name or parameter.kind is parameter.KEYWORD_ONLY:
            named[parameter.name] = None
        elif parameter.default is parameter.empty:
            words.append(None)
    fault = call_fault(method, words, named)
    if fault and any(each.kind is each.VAR_KEYWORD for each in called.parameters.values()):
        # Conditions are parameters that each author names; the plan checks that something gives them.
        own = [*inspect.signature(method).parameters.values()][len(words) :]
        conditions = {each.name: None for each in own if each.default is each.empty}
        if call_fault(method, words, {**conditions, **named}) is None:
            return None
    if fault is None:
        return None
    takes = [*inspect.signature(method).parameters.values()][0 if bound else 1 :]
    return call_text(name, takes, [*called.parameters.values()], by_name, line_of(method, beside))


def call_text(
    name: str,
    takes: Iterable[inspect.Parameter],
    given: Iterable[inspect.Parameter],
    by_name: bool,
    line: str,
) -> str:
    """The fault of a method that takes other arguments than the core gives."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    passed = [
        f"{each.name}=" if by_name or each.kind is each.KEYWORD_ONLY else each.name
        for each in given
        if each.kind not in variable
    ]
    plain = [str(each.replace(annotation=each.empty)) for each in takes]
    where = f" ({line})" if line else ""
    return (
        f"its method {name}({', '.join(plain)}){where} cannot be called as {name}({', '.join(passed)}),"
        " as the core calls it"
    )
