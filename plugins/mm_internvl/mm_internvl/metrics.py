"""Metrics for answers about charts and for multiple-choice questions."""

from __future__ import annotations

import math
import re
from string import ascii_uppercase

from mm_core.evaluation import TextMetric

_STRIPPED = " \n\t,.!?;:'"


def relaxed_accuracy(tolerance: float) -> TextMetric:
    """The metric `relaxed_accuracy`: share of answers that are right in ChartQA's sense (Masry et al. 2022,
    https://arxiv.org/abs/2203.10244). An answer may match any of its references.

    Args:
        tolerance: largest error of a number, as a share of the reference; 0.05 in the paper.
    """
    return TextMetric(
        "relaxed_accuracy",
        lambda text, references: float(any(relaxed_match(text, each, tolerance) for each in references)),
    )


def relaxed_match(text: str, reference: str, tolerance: float = 0.05) -> bool:
    """Whether an answer matches a reference in ChartQA's sense.

    Numbers (a percentage is divided by 100) may differ by a share of the reference. Other answers, and
    answers to a reference of 0, must be equal except for case and surrounding white space.

    Args:
        text: the answer.
        reference: the right answer.
        tolerance: largest error of a number, as a share of the reference.
    """
    given, right = _number(text), _number(reference)
    if given is None or not right:
        return text.strip().lower() == reference.strip().lower()
    return abs(given - right) <= tolerance * abs(right)


def _number(text: str) -> float | None:
    bare = text.strip()
    try:
        found = float(bare[:-1]) / 100 if bare.endswith("%") else float(bare)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def multiple_choice(choices: int) -> TextMetric:
    """The metric `multiple_choice`: share of answers whose letter is that of a reference, for AI2D
    (Kembhavi et al. 2016, https://arxiv.org/abs/1603.07396) and MMMU (Yue et al. 2023,
    https://arxiv.org/abs/2311.16502).

    Two differences from MMMU's own script: an answer that repeats the reference, or starts with `B.`, `B)` or
    `B:`, chooses it; and an answer without a letter is wrong. The script searches such an answer for the
    words of the choices, which rows do not contain, and otherwise draws a random letter.

    Args:
        choices: number of letters, from A, that count as answers.
    """
    return TextMetric(
        "multiple_choice",
        lambda text, references: float(any(_chosen_alike(text, each, choices) for each in references)),
    )


def chosen_letter(text: str, choices: int = 8) -> str | None:
    """The letter that an answer to a multiple-choice question chooses, or None.

    In this order: the last letter in brackets, `(B)`; the letter at the start, `B.`; then, as in MMMU's
    script, the last separate letter, `B`, or the last letter before a punctuation mark.
    """
    known = f"[{ascii_uppercase[:choices]}]"
    padded = f" {text.strip(_STRIPPED)} "
    alone, stopped = rf"(?<=\s)({known})(?=\s)", rf"(?<=\s)({known})(?=[.:),])"
    for pattern in (rf"\(({known})\)", rf"^\s({known})[.:)]+\s", alone, stopped):
        if found := re.findall(pattern, padded):
            return str(found[-1])
    return None


def letter_of_reference(reference: str, choices: int = 8) -> str | None:
    """The letter of a reference answer to a multiple-choice question: `B`, `(B)`, `B. the sun`. None for the
    words of a choice, such as `A sun`, which starts with an article."""
    known = f"[{ascii_uppercase[:choices]}]"
    found = re.fullmatch(rf"\(?({known})(?:[.:)]*|[.:)]+\s.*)", reference.strip(), re.DOTALL)
    return None if found is None else found[1]


def _chosen_alike(text: str, reference: str, choices: int) -> bool:
    """Whether an answer chooses the reference. A reference without a letter is the words of a choice."""
    if text.strip(_STRIPPED).lower() == reference.strip(_STRIPPED).lower():
        return True
    right = letter_of_reference(reference, choices)
    return right is not None and chosen_letter(text, choices) == right
