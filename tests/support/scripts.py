"""Scripts of the repository as modules, and its files as syntax trees."""

from __future__ import annotations

import ast
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def script(path: str) -> ModuleType:
    """Imports a script that is not on the path as a module with its own name.

    Args:
        path: the script, relative to the repository.
    """
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    """Every node of a Python file, the module first. Several tests read the same hundreds of files."""
    return tuple(ast.walk(ast.parse(file.read_bytes())))
