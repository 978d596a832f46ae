"""What an adapter of a run is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mm_core.schema.fields import Range


@dataclass(frozen=True)
class AdapterConfig:
    """Low-rank changes of linear layers (LoRA, https://arxiv.org/abs/2106.09685), trained in the place of
    the weights, which stay as they are."""

    targets: tuple[str, ...] = ()  # module patterns, or ends of paths (`to_q`); a module above: all in it
    rank: Annotated[int, Range(ge=1)] = 16  # width of the change
    alpha: Annotated[float, Range(gt=0)] | None = None  # the change counts alpha / rank times; none: as rank
    dropout: Annotated[float, Range(ge=0, lt=1)] = 0.0  # share of the inputs that the change does not see
    init: Literal["kaiming", "gaussian"] = "kaiming"  # of the first factor; the second begins at zero
    dora: bool = False  # a trained length for each row as well (DoRA, https://arxiv.org/abs/2402.09353)
    rslora: bool = False  # counts alpha / sqrt(rank) times (https://arxiv.org/abs/2312.03732)
    name: str = "default"  # what tells several adapters apart
    train: bool = True  # false: only applied, below those that are trained
    from_: str | None = None  # adapter to begin with: a folder or file; it brings targets, rank and alpha

    def __post_init__(self) -> None:
        if not self.name.replace("_", "").replace("-", "").isalnum() or len(self.name) > 64:
            raise ValueError(f"name {self.name[:80]!r} must be letters, digits, '_' and '-', 64 at most")
        if not self.targets and self.from_ is None:
            raise ValueError("targets is empty: name modules to adapt, or an adapter to begin with (from)")
        if self.targets and self.from_ is not None:
            raise ValueError("targets and from are both set: a file brings its own targets")
        if not self.train and self.from_ is None:
            raise ValueError(
                "train is false and from is not set: an adapter that nobody trained does nothing"
            )
