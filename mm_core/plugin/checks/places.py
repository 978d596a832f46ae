"""File and line of what a plugin's author wrote."""

from __future__ import annotations

import inspect
from collections.abc import Callable


def place_of(cls: Callable[..., object], target: Callable[..., object]) -> str:
    """File and line of a component's class or method, or of what has made it if the class is a library's."""
    packages = [each.__module__.partition(".")[0] for each in (cls, target)]
    found = cls if packages[0] == packages[1] else target
    try:
        return f"{inspect.getsourcefile(found)}, line {inspect.getsourcelines(found)[1]}"
    except (OSError, TypeError):  # made by a program, or written in C
        return f"{found.__module__}.{getattr(found, '__qualname__', found)}"


def file_of(cls: type) -> str | None:
    """The file of a class; None if it has none."""
    try:
        return inspect.getsourcefile(cls)
    except TypeError:
        return None


def line_of(method: Callable[..., object], beside: str | None) -> str:
    """The line of a method, after its file if that is not the file `beside`; empty where it has no source."""
    code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
    if code is None:
        return ""
    line = f"line {code.co_firstlineno}"
    return line if code.co_filename == beside else f"{code.co_filename}, {line}"


def place_of_method(owner: object, name: str) -> str:
    """File and line of a method of a component, also of a module that an engine has sharded."""
    method = getattr(owner, "forward" if name == "__call__" and hasattr(owner, "forward") else name, None)
    return line_of(method, None) if callable(method) else place_of_object(owner)


def place_of_object(found: object) -> str:
    """File and line of a component's class, also of a module that an engine has sharded, or of a function."""
    if inspect.isfunction(found):
        return place_of(found, found)
    classes = [cls for cls in type(found).__mro__ if not cls.__module__.startswith("torch.")]
    own = classes[0] if classes[0] is not object else type(found)
    return place_of(own, own)
