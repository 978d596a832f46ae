"""Public names of a package that are imported when they are first used: `import mm_core` stays fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`.

    Args:
        package: the package's `__name__`.
        homes: name -> the module that defines it; a module that ends in ":" is itself what the name means.
    """

    def find(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(home.removesuffix(":"))
        return module if home.endswith(":") else getattr(module, name)

    return find
