"""Config fields in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from mm_core.config.sections import RunConfig
from mm_core.schema.describe import FieldInfo, describe_keys, describe_nested, type_text
from mm_core.schema.fields import ComponentConfig, DType, Kind, Range

REFERENCE = ComponentConfig("predictor", "a/b")


@dataclass(frozen=True)
class Base:
    width: int  # pixels


@dataclass(frozen=True)
class Example(Base):
    """A docstring is no field."""

    sizes: tuple[int, ...] = (1, 2)
    path: str = ""
    """Where it lies,
    as a folder."""
    part: Annotated[ComponentConfig, Kind("predictor")] = (  # the network
        REFERENCE
    )
    flag: bool = True  # "quoted # text"
    word: str | None = None
    names: list[str] = field(default_factory=lambda: ["x"])
    base: Base = field(default_factory=lambda: Base(3))


def test_fields_carry_type_default_and_comment() -> None:
    assert describe_nested(Example) == (
        FieldInfo("width", "int", None, "pixels"),
        FieldInfo("sizes", "list of int", "[1, 2]", ""),
        FieldInfo("path", "str", "''", "Where it lies, as a folder."),
        FieldInfo("part", "predictor", "{type: a/b}", "the network"),
        FieldInfo("flag", "bool", "true", '"quoted # text"'),
        FieldInfo("word", "str or null", "null", ""),
        FieldInfo("names", "list of str", "[x]", ""),
        FieldInfo("base", "Base", "{width: 3}", ""),
        FieldInfo("base.width", "int", None, "pixels"),
    )


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (Annotated[float, Range(ge=0, lt=1)], "float >= 0 and < 1"),
        (Annotated[int, Range(ge=1)] | None, "int >= 1 or null"),
        (Literal["a", 1], "'a' or 1"),
        (DType, "'fp32' or 'bf16' or 'fp16'"),
        (tuple[int, float], "[int, float]"),
        (list[tuple[str, ...]], "list of list of str"),
        (Any, "any"),
        (dict[str, int], "dict[str, int]"),
    ],
)
def test_types_in_words(hint: Any, text: str) -> None:
    assert type_text(hint) == text


def test_every_default_of_the_schema_is_documented_beside_it() -> None:
    from dataclasses import fields, is_dataclass
    from typing import get_type_hints

    for name, hint in get_type_hints(RunConfig).items():
        if not (is_dataclass(hint) and isinstance(hint, type)):
            continue
        described = {info.field.name: info.field for info in describe_keys(hint).values()}
        assert set(described) == {f.name for f in fields(hint)}
        for f in described.values():
            assert f.comment or f.default is None or f.default.startswith("{"), f"{name}.{f.name}"
