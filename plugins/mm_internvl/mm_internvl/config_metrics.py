"""Configs of InternVL's metrics: torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mm_core.plugin import Range


@dataclass(frozen=True)
class RelaxedAccuracyConfig:
    """ChartQA's accuracy: numbers may differ from the reference by a tolerance."""

    tolerance: Annotated[float, Range(ge=0)] = 0.05  # largest error of a number, as a share of the reference


@dataclass(frozen=True)
class MultipleChoiceConfig:
    """Accuracy of questions with lettered choices, as in AI2D and MMMU."""

    choices: Annotated[int, Range(ge=2, le=26)] = 8  # number of letters, from A, that count as answers
