"""Conditions on the columns of a row: `width >= 480 and source == "web"`, evaluated by simpleeval.

The logic has three values: what a condition finds of a row without a value is unknown, and so is its `not`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from simpleeval import EvalWithCompoundTypes, InvalidExpression

from mm_core.errors import DataError

ACCEPTED = (
    "comparisons of columns, numbers, texts and lists with and, or, not, in and arithmetic, such as "
    'width >= 480 and source in ["web", "film"]'
)
_NODES = (
    *(ast.Name, ast.Constant, ast.List, ast.Tuple, ast.Subscript, ast.UnaryOp, ast.BinOp, ast.BoolOp),
    *(ast.Compare, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context),
)
_WORDS = {ast.Call: "calls a function", ast.Attribute: "uses an attribute"}
_DEEPEST = 60  # nested operators
_MOST_BITS = 10_000  # of a whole number
_TRUTH = {
    **dict.fromkeys(("false", "no", "off", "f", "n", "0", ""), False),
    **dict.fromkeys(("true", "yes", "on", "t", "y", "1"), True),
}
"""What texts mean where a condition takes a column as true or false, in any case."""
_ABOUT_A_CONSTANT: Mapping[type[ast.cmpop], bool] = {
    **{ast.Eq: True, ast.Is: True},
    **{ast.NotEq: False, ast.IsNot: False},
}
_FAULTS = (
    *(TypeError, ArithmeticError, LookupError, ValueError, RecursionError, MemoryError),
    InvalidExpression,
)


class Where:
    """A condition on the columns of a row.

    Args:
        text: the condition.

    Attributes:
        names: the columns that it names.

    Raises:
        DataError: the text is no condition, or contains anything that is not in `ACCEPTED`.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._parsed = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else "it is nested too deeply"
            raise self._fault(f"is not a condition: {reason}") from None
        self._check_depth()
        nodes = list(ast.walk(self._parsed))
        for node in nodes:
            if not isinstance(node, _NODES):
                raise self._fault(_WORDS.get(type(node), f"contains {ast.unparse(node)[:60]!r}"))
        self.names = tuple(dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name)))
        if not self.names:
            raise self._fault("names no column")
        self._evaluator = EvalWithCompoundTypes(functions={})
        self._evaluator.operators = {**self._evaluator.operators, **_ARITHMETIC}
        for node in nodes:
            if isinstance(node, ast.BinOp) and not _names(node):
                try:
                    self._value(node)
                except _FAULTS as error:
                    raise self._fault(f"has no value: {ast.unparse(node)[:60]}: {error}") from None
        self._truth = self._compiled(self._parsed)

    def __call__(self, values: Mapping[str, object]) -> bool:
        """Whether a row fulfils the condition.

        Args:
            values: value of each column; None if the row lacks it.

        Raises:
            TypeError: the condition has no value for this row, such as a missing width above 480.
        """
        # NaN is how tables of numbers write that there is none.
        given = {name: None if value != value else value for name, value in values.items()}
        self._evaluator.names = given
        try:
            found = self._truth(given)
        except _FAULTS as error:
            raise TypeError(str(error)) from None
        if found is None:
            raise TypeError("a value is unknown")
        return found

    # -- three values: True, False, and None for unknown ----------------------------------------

    def _compiled(self, node: ast.expr) -> Callable[[Mapping[str, object]], bool | None]:
        """A function that finds whether a part of the condition is true of a row."""
        if isinstance(node, ast.BoolOp):
            parts = [self._compiled(each) for each in node.values]
            ends = isinstance(node.op, ast.Or)  # one true part decides `or`, one false part `and`

            def several(values: Mapping[str, object]) -> bool | None:
                unknown = False
                for part in parts:
                    if (found := part(values)) is ends:
                        return ends
                    unknown |= found is None
                return None if unknown else not ends

            return several
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._compiled(node.operand)
            return lambda values: None if (found := inner(values)) is None else not found
        if (about := _about_a_constant(node)) is not None:
            return self._equal(*about)
        names = _names(node)

        def plain(values: Mapping[str, object]) -> bool | None:
            return None if any(values[name] is None for name in names) else _is_true(self._value(node))

        return plain

    def _equal(
        self, node: ast.expr, constant: bool | None, same: bool
    ) -> Callable[[Mapping[str, object]], bool | None]:
        """`x == None` asks whether there is a value; `x == True` reads a text as `x` alone does."""
        names = _names(node)

        def found(values: Mapping[str, object]) -> bool | None:
            unknown = any(values[name] is None for name in names)
            if constant is None or unknown:
                return unknown is same if constant is None else None
            value = self._value(node)
            if isinstance(value, str):
                value = _TRUTH.get(value.strip().lower(), value)
            return (value == constant) is same

        return found

    def _value(self, node: ast.expr) -> Any:
        return self._evaluator.eval(self.text, previously_parsed=node)

    def _check_depth(self) -> None:
        level: list[ast.AST] = [self._parsed]
        for _ in range(_DEEPEST):
            level = [inner for node in level for inner in ast.iter_child_nodes(node)]
        if level:
            raise self._fault(f"is not a condition: it is nested too deeply, over {_DEEPEST} operators")

    def _fault(self, what: str) -> DataError:
        return DataError(f"`where: {self.text[:200]}` {what}", accepted=ACCEPTED)


def _names(node: ast.AST) -> tuple[str, ...]:
    return tuple({each.id for each in ast.walk(node) if isinstance(each, ast.Name)})


def _is_true(value: object) -> bool:
    return _TRUTH.get(value.strip().lower(), True) if isinstance(value, str) else bool(value)


def _about_a_constant(node: ast.expr) -> tuple[ast.expr, bool | None, bool] | None:
    """The other side of a comparison with None, True or False, the constant, and whether `==` is asked."""
    if not isinstance(node, ast.Compare) or len(node.ops) > 1 or type(node.ops[0]) not in _ABOUT_A_CONSTANT:
        return None
    same = _ABOUT_A_CONSTANT[type(node.ops[0])]
    for one, other in ((node.left, node.comparators[0]), (node.comparators[0], node.left)):
        if isinstance(one, ast.Constant) and (one.value is None or isinstance(one.value, bool)):
            return other, one.value, same
    return None


def _bounded(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Arithmetic that takes no time: of no texts and lists, and with whole numbers of limited size."""

    def computed(one: Any, other: Any) -> Any:
        if any(isinstance(each, (str, bytes, list, tuple, dict)) for each in (one, other)):
            raise TypeError("arithmetic is of numbers")
        whole = isinstance(one, int) and isinstance(other, int)
        if compute is operator.pow and whole and one.bit_length() * other > _MOST_BITS:
            raise ArithmeticError("the number is too large")
        found = compute(one, other)
        if isinstance(found, int) and found.bit_length() > _MOST_BITS:
            raise ArithmeticError("the number is too large")
        return found

    return computed


_ARITHMETIC = {
    **{ast.Sub: _bounded(operator.sub), ast.Mult: _bounded(operator.mul), ast.Pow: _bounded(operator.pow)},
    **{ast.Div: _bounded(operator.truediv), ast.FloorDiv: _bounded(operator.floordiv)},
    **{ast.Mod: _bounded(operator.mod), ast.LShift: _bounded(lambda one, bits: one * 2 ** min(bits, 10**4))},
}
