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
_SAME: Mapping[type[ast.cmpop], bool] = {ast.Eq: True, ast.Is: True, ast.NotEq: False, ast.IsNot: False}
_ORDERS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    **{ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge},
}
_UNKNOWN = object()
"""In a list of a condition, in the place of a column without a value."""
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
        self._evaluator = EvalWithCompoundTypes(functions={})
        operators = self._evaluator.operators = {**self._evaluator.operators, **_ARITHMETIC}
        nodes = list(ast.walk(self._parsed))
        for node in nodes:
            if not isinstance(node, _NODES):
                raise self._fault(_WORDS.get(type(node), f"contains {ast.unparse(node)[:60]!r}"))
            if isinstance(node, ast.Constant) and not isinstance(node.value, (int, float, str, type(None))):
                raise self._fault(f"contains {ast.unparse(node)[:60]!r}")
            if isinstance(node, (ast.BinOp, ast.UnaryOp)) and type(node.op) not in operators:
                raise self._fault(f"contains {ast.unparse(node)[:60]!r}")
        self.names = tuple(dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name)))
        if not self.names:
            raise self._fault("names no column")
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
        if isinstance(node, ast.Compare):
            return self._compared(node)
        operand = self._operand(node)
        return lambda values: None if (found := operand(values)) is None else _is_true(found)

    def _compared(self, node: ast.Compare) -> Callable[[Mapping[str, object]], bool | None]:
        sides = [node.left, *node.comparators]
        operands = [self._operand(each) for each in sides]
        nothing = [isinstance(each, ast.Constant) and each.value is None for each in sides]
        steps = [(type(op), nothing[n] or nothing[n + 1]) for n, op in enumerate(node.ops)]

        def compared(values: Mapping[str, object]) -> bool | None:
            found = [operand(values) for operand in operands]
            pairs = zip(steps, found, found[1:], strict=False)
            results = [_holds(kind, one, other, asked) for (kind, asked), one, other in pairs]
            return False if False in results else None if None in results else True

        return compared

    def _operand(self, node: ast.expr) -> Callable[[Mapping[str, object]], Any]:
        """A function that finds the value of a side of a comparison; None: there is none."""
        if isinstance(node, (ast.BoolOp, ast.Compare)) or (
            isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        ):
            return self._compiled(node)
        if isinstance(node, ast.Constant):
            return lambda values: node.value
        if isinstance(node, (ast.List, ast.Tuple)):
            items = [self._operand(each) for each in node.elts]
            unknown = [not isinstance(each, ast.Constant) for each in node.elts]

            def listed(values: Mapping[str, object]) -> Any:
                found = [item(values) for item in items]
                return [
                    _UNKNOWN if each is None and open_ else each
                    for each, open_ in zip(found, unknown, strict=True)
                ]

            return listed
        names = _names(node)

        def valued(values: Mapping[str, object]) -> Any:
            if any(values[name] is None for name in names):
                return None
            try:
                value = self._value(node)
            except LookupError:  # no such key or place
                return None
            return None if value != value else value

        return valued

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


def _holds(kind: type[ast.cmpop], one: Any, other: Any, asked: bool) -> bool | None:
    """Whether a comparison is true; None: a value is unknown. `asked`: whether there is a value at all."""
    if kind in _SAME:
        if asked:
            return (one is other) is _SAME[kind]
        return None if one is None or other is None else _equal(one, other) is _SAME[kind]
    if kind in (ast.In, ast.NotIn):
        found = _contains(other, one)
        return None if found is None else found is (kind is ast.In)
    return None if one is None or other is None else bool(_ORDERS[kind](one, other))


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are equal; a text beside True or False means what it means alone."""
    if isinstance(one, bool) and isinstance(other, str):
        one, other = other, one
    if isinstance(other, bool) and isinstance(one, str):
        one = _TRUTH.get(one.strip().lower(), one)
    return bool(one == other)


def _contains(items: Any, one: Any) -> bool | None:
    if items is None or (one is None and not (isinstance(items, list) and None in items)):
        return None
    if isinstance(items, list):
        if any(one is each is None or _equal(one, each) for each in items):
            return True
        return None if any(each is _UNKNOWN for each in items) else False
    return bool(one in items)


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
