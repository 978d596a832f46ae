"""Finds out from files whether a `module:Name` exists: importing it could import torch and take seconds."""

from __future__ import annotations

import ast
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from mm_core.errors import did_you_mean


def source_file(module: str) -> str | None:
    """The source file of a plugin's module; None if it has no file or does not exist."""
    spec = find_module(module)
    return spec.origin if spec is not None and spec.has_location else None


def find_module(name: str) -> ModuleSpec | None:
    """The import spec of a plugin's module, found without importing its parent packages."""
    if name in sys.modules:
        return sys.modules[name].__spec__
    top, *rest = name.split(".")
    spec = find_spec(top)
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        try:
            folders = list(spec.submodule_search_locations)
        except KeyError:  # a namespace package inside a package that is not imported cannot be listed
            return find_spec(name)
        spec = PathFinder.find_spec(f"{spec.name}.{part}", folders)
    return spec


def fault_of(module: str, attribute: str) -> str | None:
    """Why a component's target cannot be imported, judging by files alone; None if no reason is found.

    The sentence begins with `does not exist` or `cannot be imported`.
    """
    spec = find_module(module)
    if spec is None:
        return f"does not exist: {no_module(module)}"
    if not spec.origin or not spec.origin.endswith(".py"):
        return None  # compiled: only an import could find out
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except SyntaxError as error:
        return f"cannot be imported: SyntaxError: {error.msg} ({spec.origin}, line {error.lineno})"
    except ValueError as error:
        return f"cannot be imported: {spec.origin} does not parse: {error}"
    names = bound_names(tree)
    first = attribute.partition(".")[0]
    if first in names or "*" in names or "__getattr__" in names:
        return None
    hint = did_you_mean(first, names)
    return f"does not exist: {spec.origin} has no {first!r}" + (f": {hint}" if hint else "")


def no_module(module: str) -> str:
    """The sentence for a module that does not exist, with the folder of its package if there is one."""
    package, _, name = module.rpartition(".")
    try:
        spec = find_module(package) if package else None
    except (ImportError, ValueError):
        spec = None
    folders = [*(spec.submodule_search_locations or ())] if spec is not None else []
    near = did_you_mean(name, [file.stem for file in Path(folders[0]).glob("*.py")]) if folders else None
    place = f" in {folders[0]}" + (f": {near}" if near else "") if folders else ""
    return f"there is no module {module!r}{place}"


def bound_names(source: ast.Module | ast.stmt) -> set[str]:
    """Names that a plugin's module, or a statement in it, binds outside functions and classes; `*` for a star
    import."""
    names: set[str] = set()
    stack: list[ast.AST] = [source]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        stack.extend(ast.iter_child_nodes(node))
    return names
