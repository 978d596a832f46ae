"""Torch-free vocabulary of config dataclasses: component references, ranges, dtype names."""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal


def yaml_key(name: str) -> str:
    """The key of a config field: `async_` is written `async`, which Python keeps for itself."""
    return name[:-1] if name.endswith("_") and keyword.iskeyword(name[:-1]) else name


DType = Literal["fp32", "bf16", "fp16"]
"""Names of floating dtypes as a YAML writes them."""

_DTYPES = {
    "bf16": ("bf16", "bfloat16", "brain"),
    "fp16": ("fp16", "float16", "half", "f16", "16"),
    "fp32": ("fp32", "float32", "float", "single", "full", "f32", "32"),
}
"""Our name of a dtype -> how it is called elsewhere."""


def dtype_hint(word: str, choices: Sequence[str]) -> str | None:
    """What to write instead of a dtype that is not among `choices`; None where neither is about dtypes.

    Names of dtypes look alike, so the nearest one is often another dtype.
    """
    if not set(choices) & _DTYPES.keys():
        return None
    plain = word.strip().lower().removeprefix("torch.")
    meant = next((name for name, others in _DTYPES.items() if plain in others), None)
    if meant in choices:
        return f"did you mean {meant!r}?"
    if meant == "fp16":
        return (
            "fp16 is not supported here: its small range needs a loss scale, which no engine keeps; write"
            " bf16, which has the range of fp32 and takes as little memory"
        )
    return f"{meant} is not supported here" if meant is not None else None


@dataclass(frozen=True)
class Kind:
    """Marks a config field as a component of a kind: `Annotated[ComponentConfig, Kind("predictor")]`."""

    name: str


@dataclass(frozen=True)
class Range:
    """Bounds of a number in a config field: `Annotated[int, Range(ge=1)]`. Unset bounds are open.

    A float field takes finite numbers only, except where `infinite` is true or its default is infinite.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    infinite: bool = False

    def __str__(self) -> str:
        signs = ((">=", self.ge), (">", self.gt), ("<=", self.le), ("<", self.lt))
        words = " and ".join(f"{sign} {bound:g}" for sign, bound in signs if bound is not None)
        return f"{words} or infinite".strip() if self.infinite else words

    def admits(self, value: float) -> bool:
        """Whether `value` lies within the bounds."""
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )


Scale = Annotated[float, Range(ge=0)]
Guidance = Scale | tuple[Scale, ...]
"""A scale of classifier-free guidance, or one for each expert of the predictor, from noise to clean."""


@dataclass(frozen=True)
class ComponentConfig:
    """A checked reference to a component: what a YAML mapping with `type:` becomes.

    `type` is the qualified name (`core/adamw`); `options` holds one value for each field of the
    component's config, defaults filled, nested components being ComponentConfig themselves.
    """

    kind: str
    type: str
    options: Mapping[str, Any] = field(default_factory=dict)
