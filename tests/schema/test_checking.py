"""Values against annotations, at the edges where one more or one less changes the answer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any

import pytest

from mm_core.errors import ConfigError
from mm_core.plugin.registry import get_registry
from mm_core.schema.checking import MAX_FAULTS, Checker
from mm_core.schema.describe import describe_nested
from mm_core.schema.fields import ComponentConfig, Kind, Range
from mm_core.schema.nodes import FAILED, Node, from_python, show


def found(annotation: object, value: object) -> tuple[object, list[str]]:
    """The checked value and what is wrong with it."""
    checker = Checker(get_registry())
    node = from_python(value, "", "key")
    checked = checker.checked(lambda: checker.value(annotation, node))
    return checked, [fault.render() for fault in checker.faults]


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        (Range(ge=0), 0, -1e-9),
        (Range(gt=0), 1e-9, 0),
        (Range(le=1), 1, 1 + 1e-9),
        (Range(lt=1), 1 - 1e-9, 1),
    ],
)
def test_a_bound_is_inside_where_the_range_includes_it(bounds: Range, inside: float, outside: float) -> None:
    assert bounds.admits(inside) and not bounds.admits(outside)
    assert found(Annotated[float, bounds], inside) == (inside, [])
    assert found(Annotated[float, bounds], outside)[0] is FAILED


@pytest.mark.parametrize(
    ("length", "shown"),
    [
        (58, f"'{'a' * 58}', a string"),
        (59, f"'{'a' * 56}..., a string"),
    ],
)
def test_sixty_characters_are_quoted_and_longer_values_are_cut(length: int, shown: str) -> None:
    assert show(Node("a" * length, "x:1", "key")) == shown


def test_a_number_that_is_not_finite_is_reported_in_a_union_too() -> None:
    annotation = float | tuple[str, ...] | None
    _, (fault,) = found(annotation, math.inf)
    assert "found inf, a number, which is not finite" in fault
    assert "too large for a float also counts as infinite" in fault
    _, (fault,) = found(annotation, True)
    assert "found true" in fault.lower() and "not finite" not in fault


def test_infinity_is_a_value_where_the_range_or_the_default_is_infinite() -> None:
    @dataclass(frozen=True)
    class Limits:
        ranged: Annotated[float, Range(ge=0, infinite=True)] = 1.0
        default: float = math.inf
        finite: float = 1.0

    checked, faults = found(Limits, {"ranged": math.inf, "default": math.inf})
    assert faults == [] and checked == Limits(math.inf, math.inf)
    _, (fault,) = found(Limits, {"finite": math.inf})
    assert "finite" in fault


def test_all_errors_of_a_class_are_reported_and_a_single_one_as_well() -> None:
    @dataclass(frozen=True)
    class Several:
        count: int = 2

        def __post_init__(self) -> None:
            raise ConfigError([ConfigError(f"part {number} is wrong") for number in range(self.count)])

    @dataclass(frozen=True)
    class One:
        def __post_init__(self) -> None:
            raise ConfigError("it is wrong")

    assert ["part 0 is wrong" in fault or "part 1 is wrong" in fault for fault in found(Several, {})[1]] == [
        True,
        True,
    ]
    (fault,) = found(One, {})[1]
    assert "it is wrong" in fault


def test_a_hundred_errors_are_listed_and_the_next_ends_the_list() -> None:
    kinds: Any = make_dataclass("Many", [(f"n{i}", int, field(default=0)) for i in range(MAX_FAULTS + 2)])
    values = {f"n{i}": "x" for i in range(MAX_FAULTS + 2)}
    assert len(found(kinds, dict(list(values.items())[:MAX_FAULTS]))[1]) == MAX_FAULTS
    checker = Checker(get_registry())
    after = []

    def check() -> object:
        checker.value(kinds, from_python(dict(list(values.items())[:MAX_FAULTS]), "", "key"))
        after.append("the rest is checked")
        return None

    checker.checked(check)
    assert after, "a hundred errors end nothing"
    assert len(found(kinds, values)[1]) == MAX_FAULTS + 1


def test_paths_of_children() -> None:
    assert Node({}, "x:1", "").child_path("steps") == "steps"
    assert Node({}, "x:1", "train").child_path("steps") == "train.steps"


def test_a_class_without_source_has_fields_without_comments() -> None:
    (described,) = describe_nested(make_dataclass("Made", [("width", int)]))
    assert (described.name, described.comment) == ("width", "")


@dataclass(frozen=True)
class Wants:
    """A default that refers, in a tuple, to a component with a fault."""

    optimizers: tuple[Annotated[ComponentConfig, Kind("optimizer")], ...] = (
        ComponentConfig("optimizer", "core/adamw", {"lr": "x"}),
    )


def test_a_default_with_a_fault_is_no_value() -> None:
    checker = Checker(get_registry())
    assert checker.checked(lambda: checker.dataclass(Wants, from_python({}, "", "key"))) is FAILED
    assert "lr" in checker.faults[0].render()


def test_fields_of_a_class_inside_a_function_have_their_comments() -> None:
    @dataclass
    class Inside:
        steps: int = 1  # how many

    (field_info,) = describe_nested(Inside)
    assert (field_info.name, field_info.comment) == ("steps", "how many")
