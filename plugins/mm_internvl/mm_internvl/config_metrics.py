"""Configs of the plugin's metrics: torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mm_core.plugin import Range


@dataclass(frozen=True)
class RelaxedAccuracyConfig:
    """ChartQA's accuracy."""

    tolerance: Annotated[float, Range(ge=0)] = 0.05  # of a number, as a share of the right one


@dataclass(frozen=True)
class MultipleChoiceConfig:
    """Accuracy of questions with lettered choices, as AI2D and MMMU ask them."""

    choices: Annotated[int, Range(ge=2, le=26)] = 8  # letters from A on that may be an answer
