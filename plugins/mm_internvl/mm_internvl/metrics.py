"""Metrics of answers about charts, and of questions with choices."""

from __future__ import annotations

import math
import re
from string import ascii_uppercase

from mm_core.evaluation import TextMetric

_STRIPPED = " \n\t,.!?;:'"


def relaxed_accuracy(tolerance: float) -> TextMetric:
    """The share of rows that are right by ChartQA's measure (relaxed accuracy of Masry et al. 2022,
    https://arxiv.org/abs/2203.10244), held against any of the references.

    Args:
        tolerance: of a number, as a share of the right one; the paper's is 0.05.
    """
    return TextMetric(
        "relaxed_accuracy",
        lambda text, references: float(any(relaxed_match(text, each, tolerance) for each in references)),
    )


def relaxed_match(text: str, reference: str, tolerance: float = 0.05) -> bool:
    """Numbers (a percentage is its hundredth) that differ by no more than that share of the reference; other
    answers, and those to a reference of 0, are the same but for case and white space at the ends."""
    said, right = _number(text), _number(reference)
    if said is None or not right:
        return text.strip().lower() == reference.strip().lower()
    return abs(said - right) <= tolerance * abs(right)


def _number(text: str) -> float | None:
    bare = text.strip()
    try:
        found = float(bare[:-1]) / 100 if bare.endswith("%") else float(bare)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def multiple_choice(choices: int) -> TextMetric:
    """The share of rows whose chosen letter is a reference's: AI2D (Kembhavi et al. 2016,
    https://arxiv.org/abs/1603.07396), MMMU (Yue et al. 2023, https://arxiv.org/abs/2311.16502).

    Unlike MMMU's own script, an answer that repeats the reference, or that begins with `B.`, `B)` or `B:`,
    chooses that, and one without a letter is wrong: the script looks for the words of the choices in it,
    which rows do not hold, and else draws a letter at random.

    Args:
        choices: letters from A on that may be an answer.
    """
    return TextMetric(
        "multiple_choice",
        lambda text, references: float(any(_chosen_alike(text, each, choices) for each in references)),
    )


def chosen_letter(text: str, choices: int = 8) -> str | None:
    """The letter that an answer chooses: the last in brackets, `(B)`; where there is none the one that it
    begins with, `B.`; then, as MMMU's script goes on, the last alone, `B`, or before a stop; or None."""
    known = f"[{ascii_uppercase[:choices]}]"
    said = f" {text.strip(_STRIPPED)} "
    alone, stopped = rf"(?<=\s)({known})(?=\s)", rf"(?<=\s)({known})(?=[.:),])"
    for pattern in (rf"\(({known})\)", rf"^\s({known})[.:)]+\s", alone, stopped):
        if found := re.findall(pattern, said):
            return str(found[-1])
    return None


def letter_of_reference(reference: str, choices: int = 8) -> str | None:
    """The letter that a reference is, or begins with: `B`, `(B)`, `B. the sun`; None for the words of a
    choice, among them `A sun`, which begins with an article."""
    known = f"[{ascii_uppercase[:choices]}]"
    found = re.fullmatch(rf"\(?({known})(?:[.:)]*|[.:)]+\s.*)", reference.strip(), re.DOTALL)
    return None if found is None else found[1]


def _chosen_alike(text: str, reference: str, choices: int) -> bool:
    """A reference without a letter is the words of a choice."""
    if text.strip(_STRIPPED).lower() == reference.strip(_STRIPPED).lower():
        return True
    right = letter_of_reference(reference, choices)
    return right is not None and chosen_letter(text, choices) == right
