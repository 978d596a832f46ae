"""Names and shapes by which stored tensors differ from a model's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mm_core.checkpoint.files.layout import listed


@dataclass(frozen=True)
class Mismatch:
    """What a model has alone, what is stored alone, and what has another shape, each tensor in words."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshapen)

    def __str__(self) -> str:
        kinds = (("missing", self.missing), ("unexpected", self.unexpected), ("misshapen", self.misshapen))
        return "; ".join(f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds if names)


def size_text(shape: Iterable[int]) -> str:
    """Of a tensor: `3x4`."""
    return "x".join(map(str, shape)) or "scalar"
