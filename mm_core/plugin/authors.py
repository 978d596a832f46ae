"""Exceptions from the code of a plugin's author, as errors that name the author's own line."""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Iterator
from importlib.metadata import entry_points
from traceback import walk_tb
from types import FrameType

from mm_core.errors import MMError
from mm_core.plugin.checks.contract import contract_of
from mm_core.plugin.checks.places import place_of_method
from mm_core.plugin.manager import GROUP
from mm_core.plugin.trust.beside import LOCAL_PREFIX


def author_error(error: BaseException, log: object = None) -> MMError | None:
    """The error that the author of a plugin reads for an exception; None if no plugin's code is involved.

    An exception that passed no plugin's code may come from what a component has returned. The error then
    names the component's method that was called last before.

    Args:
        error: any exception but an MMError.
        log: the file that contains its traceback, if there is one.
    """
    shows = f"{log or 'MM_DEBUG=1'} shows the whole traceback"
    if (found := _innermost(error)) is not None:
        cause, frame, line = found
        file = frame.f_code.co_filename
        return MMError(
            _text(cause, linecache.getline(file, line)),
            where=f"{file}, line {line}, in {frame.f_code.co_name}",
            hint=f"correct this line; {shows}",
        )
    if (call := _last_call(error)) is not None:
        owner, name = call
        member = contract_of(owner, name)
        return MMError(
            _text(error, f"after {name} was called"),
            where=f"{place_of_method(owner, name)}, {name} of {type(owner).__name__}",
            accepted=member,
            hint=f"{name} returned something else, or mm_core has a bug: {shows}",
        )
    return None


def author_line(error: BaseException) -> str | None:
    """File and line of the innermost code of a plugin that an exception passed; None if it passed none.

    For an exception that passed none, it is the method of a component that was called last before.
    """
    if (found := _innermost(error)) is not None:
        return f"{found[1].f_code.co_filename}, line {found[2]}"
    return None if (call := _last_call(error)) is None else place_of_method(*call)


def _text(error: BaseException, otherwise: str) -> str:
    text = " ".join(str(error).split()) or otherwise.strip()
    return f"{type(error).__name__}{f': {text}' if text else ''}"


def _packages() -> set[str]:
    modules = (point.value.partition(":")[0] for point in entry_points(group=GROUP))
    return {module.partition(".")[0] for module in modules} - {"mm_core"}


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _innermost(error: BaseException) -> tuple[BaseException, FrameType, int] | None:
    """The innermost frame of a plugin's code that an exception or a cause of it passed, with its line."""
    packages = _packages()
    for cause in _causes(error):
        for frame, line in reversed([*walk_tb(cause.__traceback__)]):
            if _is_of(str(frame.f_globals.get("__name__", "")), packages):
                return cause, frame, line
    return None


def _last_call(error: BaseException) -> tuple[object, str] | None:
    """The component whose method the core called last before an exception, and the method's name.

    They are read from the source of the functions that the exception passed, the innermost first.
    """
    packages = _packages()
    for cause in _causes(error):
        for frame, line in reversed([*walk_tb(cause.__traceback__)]):
            for call in _calls(frame, line):
                parts = call.func
                name = parts.attr if isinstance(parts, ast.Attribute) else "__call__"
                owner = _value(parts.value if isinstance(parts, ast.Attribute) else parts, frame)
                method = _attribute(owner, name)
                module = getattr(inspect.unwrap(method), "__module__", None) if callable(method) else None
                if _is_of(str(module), packages):
                    return owner, name
    return None


def _calls(frame: FrameType, line: int) -> Iterator[ast.Call]:
    """The calls in the source of a frame's function up to the statement at a line, the last one first."""
    try:
        lines, first = inspect.getsourcelines(frame.f_code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):  # no source, or a part of an expression
        return
    at = line - max(first, 1) + 1
    around = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno <= at <= (n.end_lineno or 0)]
    inner = max(around, key=lambda node: node.lineno, default=None)
    last = at if inner is None or hasattr(inner, "body") else inner.end_lineno or at
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.lineno <= last]
    yield from sorted(calls, key=lambda call: (call.lineno, call.col_offset), reverse=True)


def _value(node: ast.expr, frame: FrameType) -> object:
    """What a name or `name.attribute` is in a frame; None for other expressions."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return _attribute(_value(node.value, frame), node.attr)
    return None


def _attribute(owner: object, name: str) -> object:
    try:
        return getattr(owner, name, None)
    except Exception:  # a property that has no value at this moment
        return None


def _is_of(module: str, packages: set[str]) -> bool:
    """Whether a module belongs to a plugin: to an installed package, or to a one-file plugin."""
    return module.startswith(LOCAL_PREFIX) or module.partition(".")[0] in packages
