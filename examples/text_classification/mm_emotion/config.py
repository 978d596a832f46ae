"""Config of the metric `recall_by_class`: torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RecallByClassConfig:
    """Recall of each class."""

    classes: tuple[str, ...]  # names of the classes, in the order of their numbers
