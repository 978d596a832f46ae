"""Configs of the built-in metrics: torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mm_core.schema.fields import Range


@dataclass(frozen=True)
class F1Config:
    """The F1 score of rows."""

    average: Literal["macro", "micro", "weighted"] = "macro"  # over classes; the figure is f1_macro, ...


@dataclass(frozen=True)
class ExactMatchConfig:
    """Texts that are one of their references."""

    normalize: Literal["none", "case", "squad"] = "none"  # before they are compared; squad: as that data set


@dataclass(frozen=True)
class ANLSConfig:
    """How near texts come to their references."""

    threshold: Annotated[float, Range(gt=0, le=1)] = 0.5  # normalized distance that is worth nothing
