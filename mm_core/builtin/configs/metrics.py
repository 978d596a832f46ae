"""Configs of the built-in metrics, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mm_core.schema.fields import Range


@dataclass(frozen=True)
class F1Config:
    """Config of the metric `f1`."""

    average: Literal["macro", "micro", "weighted"] = "macro"  # over classes; reported as f1_macro, ...


@dataclass(frozen=True)
class ExactMatchConfig:
    """Config of the metric `exact_match`: the share of texts equal to one of their references."""

    normalize: Literal["none", "case", "squad"] = "none"  # normalisation before comparing; squad: as in SQuAD


@dataclass(frozen=True)
class ANLSConfig:
    """Config of the metric `anls`: the similarity of texts and their references."""

    threshold: Annotated[float, Range(gt=0, le=1)] = 0.5  # normalized distance from which the score is 0
