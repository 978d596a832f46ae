"""The differences in names and shapes between stored tensors and a model's tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mm_core.errors import some


@dataclass(frozen=True)
class Mismatch:
    """Tensors by which a checkpoint or weights file differs from a model, as texts.

    Attributes:
        missing: in the model only.
        unexpected: in the file only.
        misshapen: in both, with different shapes.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshapen)

    def __str__(self) -> str:
        kinds = (("missing", self.missing), ("unexpected", self.unexpected), ("misshapen", self.misshapen))
        return "; ".join(f"{len(names)} {kind}: {some(names, 10)}" for kind, names in kinds if names)


def size_text(shape: Iterable[int]) -> str:
    """The shape of a tensor as text for a mismatch message: `3x4`."""
    return "x".join(map(str, shape)) or "scalar"
