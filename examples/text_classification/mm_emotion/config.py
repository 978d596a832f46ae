"""What a YAML may say of this package's components: torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RecallByClassConfig:
    """Recall, class by class."""

    classes: tuple[str, ...]  # their names, in the order of their numbers
