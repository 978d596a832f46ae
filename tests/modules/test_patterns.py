"""Module patterns: what they match, and the errors for wrong ones."""

from __future__ import annotations

import re

import pytest

from mm_core.errors import PlanError
from mm_core.modules.patterns import match

PATHS = ["predictor", "predictor.blocks", *(f"predictor.blocks.{i}" for i in range(30))]
PATHS += [f"predictor.blocks.{i}.attn{n}" for i in range(30) for n in (1, 2)]
PATHS += ["predictor.head", "autoencoder", "text_encoder"]


def blocks(*numbers: int) -> list[str]:
    return [f"predictor.blocks.{n}" for n in numbers]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("predictor.blocks.{*}", blocks(*range(30))),
        ("predictor.blocks.{0-3}", blocks(0, 1, 2, 3)),
        ("predictor.blocks.{1,3,5}", blocks(1, 3, 5)),
        ("predictor.blocks.{0-2,27-29}", blocks(0, 1, 2, 27, 28, 29)),
        ("predictor.blocks.{ 1, 4-5 }", blocks(1, 4, 5)),
        ("predictor.blocks.7", blocks(7)),
        ("predictor.blocks.{0-1}.attn{*}", [f"predictor.blocks.{i}.attn{n}" for i in (0, 1) for n in (1, 2)]),
        ("predictor.blocks.{0,2}.{attn1}", ["predictor.blocks.0.attn1", "predictor.blocks.2.attn1"]),
        ("{*}", ["predictor", "autoencoder", "text_encoder"]),
        ("autoencoder", ["autoencoder"]),
    ],
)
def test_a_pattern_matches(pattern, expected):
    assert match([pattern], PATHS, "engine.sub_modules_to_wrap") == expected


def test_patterns_join_in_module_order_without_repeats():
    assert match(["predictor.blocks.{3-4}", "predictor.blocks.{1,3}"], PATHS, "k") == blocks(1, 3, 4)


def test_a_pattern_that_matches_nothing_shows_real_paths():
    with pytest.raises(PlanError) as fault:
        match(["predictor.layers.{*}"], PATHS, "engine.sub_modules_to_wrap")
    assert str(fault.value).startswith(
        "engine.sub_modules_to_wrap: pattern 'predictor.layers.{*}' matches no module"
    )
    assert "'predictor.blocks.{*}'" in str(fault.value)


@pytest.mark.parametrize(
    ("pattern", "shown"),
    [
        ("ae", "'predictor', 'autoencoder', 'text_encoder'"),
        ("vae", "'predictor', 'autoencoder', 'text_encoder'"),
        ("autoencodr", "'autoencoder', 'text_encoder'"),
        ("block", "'predictor.blocks'"),
    ],
)
def test_a_name_that_matches_nothing_shows_the_components_or_where_its_like_stands(pattern, shown):
    with pytest.raises(PlanError) as fault:
        match([pattern], PATHS, "engine.ignored_modules")
    assert fault.value.accepted == f"a path such as {shown}"


@pytest.mark.parametrize(("numbers", "missing"), [("0-39", "30-39"), ("0-30", "30"), ("3,31", "31")])
def test_a_number_beyond_the_blocks_is_named(numbers, missing):
    pattern = f"predictor.blocks.{{{numbers}}}"
    with pytest.raises(PlanError, match=re.escape(f"{pattern!r}: no module has {missing} in this place")):
        match([pattern], PATHS, "k")


@pytest.mark.parametrize("pattern", ["a.{", "a.}", "a.{3-1}", "a.{}", "a.{1,,2}", "a.{x-y}"])
def test_broken_grammar_is_named(pattern):
    with pytest.raises(PlanError, match="is not a module pattern"):
        match([pattern], PATHS, "k")
