"""Arithmetic of a shell on whole numbers. Nothing of it is run."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from operator import add, mod, mul, sub

_LARGEST = 2**63


def calculated(text: str, variable: Callable[[str], str]) -> int:
    """The value of what `$(( ))` holds.

    Args:
        text: what it holds.
        variable: the text of a variable, by its name; a KeyError for one that is not set.

    Raises:
        ValueError: it is none of whole numbers, or is too large.
    """
    text = re.sub(r"\$\{?(\w+)\}?", r"\1", text).strip().replace("\n", " ")
    try:
        return _number(ast.parse(text, mode="eval").body, variable)
    except (SyntaxError, ArithmeticError, KeyError, MemoryError) as error:
        raise ValueError from error


def _number(node: ast.expr, variable: Callable[[str], str]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.Name):
        value = int(variable(node.id))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_number(node.operand, variable)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _number(node.left, variable), _number(node.right, variable)
        value = _OPERATORS[type(node.op)](left, right)
    else:
        raise ValueError
    if abs(value) >= _LARGEST:
        raise ValueError
    return value


def _quotient(left: int, right: int) -> int:
    """As a shell divides: towards 0."""
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: _quotient,
    ast.Mod: mod,
}
