"""Public names of a package that are imported when they are first used: `import mm_core` stays fast."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


def lazy_names(package: str) -> Callable[[str], Any]:
    """A package's `__getattr__`: its names are those that its source imports under `if TYPE_CHECKING:`.

    Args:
        package: the package's `__name__`.
    """

    @cache
    def homes() -> dict[str, tuple[str, str]]:
        found: dict[str, tuple[str, str]] = {}
        source = Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                found |= {one.asname or one.name: (str(node.module), one.name) for one in node.names}
        return found

    def find(name: str) -> Any:
        if name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, own = homes()[name]
        return getattr(__import__(home, fromlist=[own]), own)  # a module of the package `home`, too

    return find
