"""Exact match and ANLS, against examples worked by hand from the definitions that they cite."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mm_core.contracts import Batch, Evaluation, SampleKey
from mm_core.evaluation import anls_score, edit_distance, squad_normalized
from mm_core.plugin.registry import build


def figure(metric, rows: list[tuple[str, tuple[str, ...]]], filling: int = 0) -> float:
    """Of a metric, or of what describes one; the last rows only fill up."""
    texts, references = map(list, zip(*rows, strict=True))
    weights = torch.tensor([1.0] * (len(rows) - filling) + [0.0] * filling)
    keys = [SampleKey(0, row) for row in range(len(rows))]
    built = build("metric", metric) if isinstance(metric, dict) else metric
    built.batch(Batch(keys, weights, texts), Evaluation({}, weights, texts=texts, references=references))
    (value,) = built.result(built.sums()).values()
    return value


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [("kitten", "sitting", 3), ("flaw", "lawn", 2), ("", "abc", 3), ("same", "same", 0), ("悲伤", "悲哀", 1)],
)
def test_the_edit_distance_of_known_words(one, other, distance):
    assert edit_distance(one, other) == edit_distance(other, one) == distance


@given(st.text("ab c", max_size=6), st.text("ab c", max_size=6))
def test_the_edit_distance_is_its_recursive_definition(one, other):
    @cache
    def of(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        return min(of(i - 1, j) + 1, of(i, j - 1) + 1, of(i - 1, j - 1) + (one[i - 1] != other[j - 1]))

    assert edit_distance(one, other) == of(len(one), len(other))


@pytest.mark.parametrize(
    ("text", "references", "score"),
    [
        ("coca cola", ("coca cola",), 1.0),
        ("cocacola", ("coca cola",), 1 - 1 / 9),  # one insertion into the longer one's nine characters
        ("Coca  COLA ", ("coca cola",), 1.0),  # case and spare white space are not an error
        ("pepsi", ("coca cola",), 0.0),
        ("ab", ("ac",), 0.0),  # a distance of exactly one half is worth nothing: NL < tau
        ("abc", ("abd",), 1 - 1 / 3),
        ("7 up", ("seven up", "7up"), 1 - 1 / 4),  # the best of several
        ("", ("stop",), 0.0),
        ("", ("",), 1.0),
        ("anything", (), 0.0),
    ],
)
def test_anls_of_answers_worked_by_hand(text, references, score):
    assert anls_score(text, references) == pytest.approx(score, abs=1e-12)


def test_anls_is_the_mean_over_rows_that_count():
    rows = [("cocacola", ("coca cola",)), ("abc", ("abd", "xyz")), ("no", ("yes",)), ("filled", ("up",))]
    assert figure({"type": "anls"}, rows, filling=1) == pytest.approx((8 / 9 + 2 / 3 + 0) / 3)
    assert figure({"type": "anls", "threshold": 0.2}, rows, filling=1) == pytest.approx(8 / 9 / 3)


@pytest.mark.parametrize(
    ("text", "bare"),
    [("The  Eiffel Tower!", "eiffel tower"), ("a U.S. theatre", "us theatre"), ("An answer, an", "answer")],
)
def test_squad_compares_without_articles_and_punctuation(text, bare):
    assert squad_normalized(text) == bare


@pytest.mark.parametrize(("normalize", "right"), [("none", 1), ("case", 2), ("squad", 3)])
def test_exact_match_takes_any_reference_after_its_normalization(normalize, right):
    rows = [
        (" joy\n", ("anger", "joy")),
        ("JOY", ("joy",)),
        ("the joy.", ("Joy",)),
        ("joyful", ("joy",)),
        ("filled", ("filled",)),
    ]
    found = figure({"type": "exact_match", "normalize": normalize}, rows, filling=1)
    assert found == right / 4


def test_the_metric_of_texts_of_the_documentation_works():
    page = (Path(__file__).parents[3] / "docs/validation.md").read_text(encoding="utf-8")
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "TextMetric" in code)
    names: dict = {}
    exec(code, names)
    assert figure(names["begins_right"](), [("joy!", ("anger", "joy")), ("no", ("yes",))]) == 0.5


@pytest.mark.parametrize("metric", [{"type": "exact_match"}, {"type": "anls"}])
def test_thoughts_are_not_held_against_anything(metric):
    thinking = "<think>\nfour or seven?\n</think>\n\n7"
    assert figure(metric, [(thinking, ("7",))]) == 1
    assert figure(metric, [("7", ("<think>\nit is 7\n</think>\n\n7",))]) == 1
    assert figure(metric, [("it is 7</think>7", ("7",))]) == 1  # where the prompt began the thought
    assert figure(metric, [("<think>\n7", ("7",))]) == 0  # cut off before the answer
    assert figure(metric, [("a <think> tag", ("a <think> tag",))]) == 1
