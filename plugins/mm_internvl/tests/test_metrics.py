"""Relaxed accuracy and multiple choice, against examples worked by hand from what they cite."""

from __future__ import annotations

import pytest
import torch
from mm_internvl.metrics import chosen_letter, letter_of_reference, relaxed_match

from mm_core.contracts import Batch, Evaluation, SampleKey
from mm_core.errors import ConfigError
from mm_core.plugin.registry import build


def figure(kind: dict, rows: list[tuple[str, tuple[str, ...]]]) -> dict:
    texts, references = map(list, zip(*rows, strict=True))
    metric, weights = build("metric", kind), torch.ones(len(rows))
    batch = Batch([SampleKey(0, row) for row in range(len(rows))], weights, texts)
    metric.batch(batch, Evaluation({}, weights, texts=texts, references=references))
    return metric.result(metric.sums())


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [
        ("105", "100", True),  # exactly 5 %
        ("105.1", "100", False),
        ("95", "100", True),
        ("100", "105.3", False),  # of the right number, not of the answer: 5.3 / 105.3 is more than 5 %
        ("-19.5", "-20", True),
        ("19.5", "-20", False),
        ("0.42", "42%", True),  # a percentage is its hundredth
        ("43%", "42%", True),
        ("42", "42%", False),
        ("2019", "2018", True),  # years are numbers to the measure
        ("0", "0", True),
        ("0.001", "0", False),
        (" Yes ", "yes", True),
        ("yes.", "yes", False),  # other answers have to be the same
        ("1,000", "1000", False),
        ("nan", "nan", True),
        ("inf", "3", False),
        ("", "3", False),
    ],
)
def test_relaxed_match_by_hand(text, reference, right):
    assert relaxed_match(text, reference) is right


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("B.", "B"),
        ("(B)", "B"),
        ("B. the sun", "B"),
        ("B: the sun", "B"),
        ("B) the sun", "B"),
        ("The answer is C.", "C"),
        ("Answer: D", "D"),
        ("(A) is wrong, so (C)", "C"),  # the last
        ("A or (B)", "B"),  # brackets first
        ("A dog. Answer: B", "B"),
        ("B. A sun", "B"),  # what it begins with before what stands alone
        ("B) A plant", "B"),
        ("C. Vitamin A and D", "C"),
        ("C. No, (D)", "D"),
        ("CAT", None),
        ("b", None),
        ("I do not know", None),  # not among the letters
        ("", None),
    ],
)
def test_the_letter_that_is_chosen(text, letter):
    assert chosen_letter(text) == letter


@pytest.mark.parametrize(
    ("reference", "letter"),
    [
        *(
            (text, "B")
            for text in ("B", "(B)", "B.", " B ", "B. the sun", "(B) the sun", "B) sun", "B:\nsun")
        ),
        *((text, None) for text in ("A sun", "a", "I", "", "C3PO", "the sun (B)", "A.M.", "BC")),
    ],
)
def test_the_letter_of_a_reference(reference, letter):
    assert letter_of_reference(reference) == letter


def test_words_of_a_choice_that_begin_with_an_article_are_no_letter():
    rows = [("A cat", ("A dog",)), ("a dog.", ("A dog",)), ("A", ("A dog",)), ("A dog", ("A",))]
    # The last is what MMMU's script finds: a letter that stands alone.
    assert figure({"type": "internvl/multiple_choice"}, rows) == {"multiple_choice": 0.5}


def test_an_answer_that_repeats_the_reference_is_right():
    rows = [(text, (text,)) for text in ("B. A sun", "A sun", "the sun (B)", "b")]
    assert figure({"type": "internvl/multiple_choice"}, rows) == {"multiple_choice": 1}


def test_they_are_metrics_with_several_references():
    rows = [("105", ("7", "100")), ("no", ("yes",)), ("Blue", ("green", "blue")), ("8", ("7.5",))]
    assert figure({"type": "internvl/relaxed_accuracy"}, rows) == {"relaxed_accuracy": 0.5}
    wide = figure({"type": "internvl/relaxed_accuracy", "tolerance": 0.1}, rows)
    assert wide == {"relaxed_accuracy": 0.75}
    rows = [("(B)", ("B",)), ("B. a sun", ("A", "B")), ("C", ("B",)), ("the Moon", ("the moon",))]
    assert figure({"type": "internvl/multiple_choice"}, rows) == {"multiple_choice": 0.75}
    assert figure({"type": "multiple_choice", "choices": 2}, [("C", ("C",)), ("C", ("B",))]) == {
        "multiple_choice": 0.5  # two choices: C is then no letter, but the words of one
    }


def test_a_choice_of_one_is_a_readable_error():
    with pytest.raises(ConfigError, match="choices"):
        build("metric", {"type": "internvl/multiple_choice", "choices": 1})
