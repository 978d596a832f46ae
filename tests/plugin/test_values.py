"""What a component returned is held against the type that its contract declares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import pytest
import torch

from mm_core.contracts import Autoencoder, Engine, Frozen, LRSchedule, Metric, SupportsNotes, Task
from mm_core.errors import ContractError
from mm_core.plugin.checks.values import fits, returned


@pytest.mark.parametrize(
    ("value", "wanted", "expected"),
    [
        (1, float, True),
        (True, float, False),
        (True, int, False),
        (None, float | None, True),
        ((1, 2), tuple[int, int], True),
        ([1, 2], tuple[int, int], False),
        ((1, 2.0), tuple[int, int], False),
        ((1, 2, 3), tuple[int, ...], True),
        (["a"], Sequence[str], True),
        ("a", Sequence[str], False),
        ("a", str, True),
        ({"a": 1}, Mapping[str, float], True),
        (1.0, Mapping[str, float], False),
        (iter(()), Iterator[int], True),
        (len, Callable[[Any], int], True),
        (None, Callable[[Any], int], False),
        ("masked", Literal["masked"] | tuple[Literal["fixed"], int], True),
        ("mask", Literal["masked"] | tuple[Literal["fixed"], int], False),
        (("fixed", 8), Literal["masked"] | tuple[Literal["fixed"], int], True),
    ],
)
def test_values_of_a_type(value: object, wanted: Any, expected: bool) -> None:
    assert fits(value, wanted) is expected


class Mine:
    def factor(self, step):
        pass


def test_a_wrong_value_is_named_with_the_method_s_line() -> None:
    with pytest.raises(ContractError) as caught:
        returned(LRSchedule.factor, Mine().factor(1), Mine())
    assert str(caught.value) == (
        f"{__file__}, line {Mine.factor.__code__.co_firstlineno}: factor of Mine returned None\n"
        "  accepted: float\n"
        "  hint: `python -m pydoc mm_core.contracts.running` explains what it returns"
    )


def test_long_values_and_tensors_are_named_by_their_type() -> None:
    for value, words in ((torch.zeros(3), "a Tensor"), ([0.5] * 100, "a list"), ((1, 2, 3), "(1, 2, 3)")):
        with pytest.raises(ContractError, match="returned") as caught:
            returned(Autoencoder.latent_shape, value, Mine())
        assert caught.value.what == f"latent_shape of Mine returned {words}"


def test_right_values_are_returned_unchanged() -> None:
    missing: list[str] = []
    assert returned(Frozen.missing_files, missing, Mine()) is missing
    assert returned(SupportsNotes.notes, ("a note",), Mine()) == ("a note",)
    assert returned(Metric.sums, sums := torch.zeros(2), Mine()) is sums
    assert returned(Task.weight, 3, Mine()) == 3
    with pytest.raises(ContractError, match="plan of Mine returned 7"):
        returned(Engine.plan, 7, Mine())
