"""Conditions on the columns of a row: `width >= 480 and source == "web"`, evaluated by simpleeval."""

from __future__ import annotations

import ast
from collections.abc import Mapping

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
        nodes = list(ast.walk(self._parsed))
        for node in nodes:
            if not isinstance(node, _NODES):
                raise self._fault(_WORDS.get(type(node), f"contains {ast.unparse(node)[:60]!r}"))
        self.names = tuple(dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name)))
        if not self.names:
            raise self._fault("names no column")
        self._evaluator = EvalWithCompoundTypes(functions={})

    def __call__(self, values: Mapping[str, object]) -> bool:
        """Whether a row fulfils the condition.

        Args:
            values: value of each column; None if the row lacks it.

        Raises:
            TypeError: the condition has no value for this row, such as a missing width above 480.
        """
        self._evaluator.names = values
        try:
            return bool(self._evaluator.eval(self.text, previously_parsed=self._parsed))
        except (TypeError, ArithmeticError, LookupError, ValueError, InvalidExpression) as error:
            raise TypeError(str(error)) from None

    def _fault(self, what: str) -> DataError:
        return DataError(f"`where: {self.text[:200]}` {what}", accepted=ACCEPTED)
