"""Config of the adapters of a run, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from mm_core.schema.fields import InputPath, Range


@dataclass(frozen=True)
class AdapterConfig:
    """Config section of one item of `train.adapters`: a low-rank change (LoRA) of linear layers.

    It is trained instead of the weights, which stay unchanged (https://arxiv.org/abs/2106.09685).
    """

    targets: Literal["auto"] | tuple[str, ...] = (  # auto: attention and feed-forward of the repeated blocks;
        ()  # or module patterns, or ends of paths (`to_q`); a parent module: all in it
    )
    kind: Literal["lora", "lokr", "loha"] = "lora"  # a product, a Kronecker or a Hadamard product
    exclude: tuple[str, ...] = ()  # as targets: modules that get no adapter
    rank: Annotated[int, Range(ge=1)] = 16  # rank of the change
    alpha: Annotated[float, Range(gt=0)] | None = None  # the change is scaled by alpha / rank; null: by 1
    ranks: Mapping[str, Annotated[int, Range(ge=1)]] = field(
        default_factory=dict  # other ranks: module, as in targets -> rank; the last that matches applies
    )
    alphas: Mapping[str, Annotated[float, Range(gt=0)]] = field(
        default_factory=dict  # other alphas: module, as in targets -> alpha; the last that matches applies
    )
    decompose_factor: Annotated[int, Range(ge=1)] | None = (
        None  # of LoKr: one of the two sizes that rows and columns are split into; null: the nearest two
    )
    b_lr_scale: Annotated[float, Range(ge=0)] = (
        1.0  # factor of the learning rate of the second factor (LoRA+, https://arxiv.org/abs/2402.12354)
    )
    dropout: Annotated[float, Range(ge=0, lt=1)] = 0.0  # dropout of the adapter's inputs
    init: Literal["kaiming", "gaussian", "pissa", "pissa_niter_16"] = (
        "kaiming"  # of the first factor, with a second of zero; pissa: principal part of the weight
    )
    dora: bool = False  # also train a length per row (DoRA, https://arxiv.org/abs/2402.09353)
    rslora: bool = False  # scale by alpha / sqrt(rank) (https://arxiv.org/abs/2312.03732)
    name: str = "default"  # name of the adapter, unique in the run
    train: bool = True  # false: applied but not trained
    from_: InputPath | None = None  # adapter to start from: folder or file, sets targets, rank and alpha

    def __post_init__(self) -> None:
        if not self.name.replace("_", "").replace("-", "").isalnum() or len(self.name) > 64:
            raise ValueError(f"name {self.name[:80]!r} must be at most 64 letters, digits, '_' and '-'")
        if not self.targets and self.from_ is None:
            raise ValueError("targets is empty: set targets to the modules to adapt, or from to an adapter")
        if self.targets and self.from_ is not None:
            raise ValueError(
                "targets and from are both set: remove targets, which the adapter's files contain"
            )
        if self.kind != "lora" and (self.dora or self.rslora or self.dropout or self.init != "kaiming"):
            raise ValueError(
                f"dora, rslora, dropout and init do not work with kind: {self.kind}; remove them"
            )
        if self.kind != "lokr" and self.decompose_factor is not None:
            raise ValueError("decompose_factor works only with kind: lokr; remove it")
        if self.init.startswith("pissa") and (self.dora or self.from_ is not None):
            raise ValueError(f"init: {self.init} does not work with dora or from; remove one of them")
        if self.from_ is not None and (self.exclude or self.ranks or self.alphas or self.decompose_factor):
            raise ValueError(
                "exclude, ranks, alphas and decompose_factor do not work with from: the adapter's files"
                " contain the modules"
            )
        if not self.train and self.from_ is None:
            raise ValueError(
                "train is false and from is not set: an untrained adapter does nothing; set from"
            )
