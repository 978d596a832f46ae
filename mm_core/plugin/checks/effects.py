"""What importing a module would do to the process, and the devices that it names, judging by its source."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping

_SHARED: tuple[str, ...] = ("torch", "os", "random", "numpy", "builtins", "transformers", "diffusers")
"""Packages of which importing a plugin changes nothing."""

_CHANGING: tuple[str, ...] = (
    *("torch.manual_seed", "torch.set_default_dtype", "torch.set_default_device", "torch.set_num_threads"),
    *("torch.set_grad_enabled", "torch.use_deterministic_algorithms", "random.seed", "numpy.random.seed"),
    *("os.environ.update", "os.environ.setdefault", "os.environ.pop", "os.putenv", "os.chdir"),
)
"""Functions that change the process."""


def effects_of_import(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Statements that run when a module is imported and change the process: line and code."""
    known: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            known |= {each.asname or each.name.partition(".")[0]: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            known |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    waiting: list[ast.AST] = [*tree.body]
    while waiting:
        each = waiting.pop()
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        waiting += ast.iter_child_nodes(each)
        if isinstance(each, ast.Attribute | ast.Subscript) and not isinstance(each.ctx, ast.Load):
            name, changing = _full_name(each.value, known).partition(".")[0], _SHARED
        elif isinstance(each, ast.Call):
            name, changing = _full_name(each.func, known), _CHANGING
        else:
            continue
        if name in changing:
            yield each.lineno, ast.unparse(each)


def _full_name(node: ast.expr, known: Mapping[str, str]) -> str:
    """`numpy.random.seed` of `np.random.seed`, from what a module imports under which names."""
    first, _, rest = ast.unparse(node).partition(".")
    return f"{known.get(first, '')}.{rest}".strip(".")


def named_devices(tree: ast.AST, known: Collection[str]) -> Iterator[tuple[int, str]]:
    """Names of devices in code: line and name of strings such as "cuda:0", and of members as `tensor.cuda`.

    Args:
        tree: of a module.
        known: the names of devices.
    """
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in known:
            yield node.lineno, node.attr
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docs:
            continue
        if node.value.partition(":")[0] in known:
            yield node.lineno, node.value
