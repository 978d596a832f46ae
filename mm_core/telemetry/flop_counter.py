"""Operations of a step, counted once with torch.utils.flop_counter while a first micro-batch goes forward.

A multiplication and an addition are two operations; what is not a matrix product, a convolution or
attention counts for nothing, as is usual for MFU (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311,
appendix B). The backward of a trained module is taken as twice its forward; what is recomputed in
backward is no useful work and is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from mm_core.runtime.ranks import gather_rows
from mm_core.telemetry.window import Gather

_FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True)
class CountedFlops:
    """FLOPs of one step over all ranks. trained: forward and backward of what is trained. encode:
    what prepares its inputs (frozen encoders)."""

    trained: float
    encode: float


class ForwardFlops:
    """Counts the first micro-batch that runs within `counting()`, and nothing after it.

    The loop enters phases as always: what runs in `encode` is counted apart from what runs in
    `forward_backward`. Only the forward may run within; every rank counts its own micro-batch.
    """

    def __init__(self) -> None:
        self._mode: FlopCounterMode | None = None
        self._encode = 0
        self._faults: list[str] = []
        self._counted: tuple[int, int] | None = None

    @property
    def counted(self) -> bool:
        """Whether a micro-batch was counted."""
        return self._counted is not None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Around the encoding and the forward of a micro-batch; costs nothing but the first time."""
        if self.counted:
            yield
            return
        self._encode = 0
        try:
            with FlopCounterMode(display=False, custom_mapping=_formulas(self._faults.append)) as self._mode:
                yield
                total = self._mode.get_total_flops()
            self._counted = (self._encode, total - self._encode)
        finally:
            self._mode = None

    def enter(self, phase: str) -> None:
        """A phase begins: what was counted before `forward_backward` was encoding."""
        if self._mode is not None and phase == "forward_backward":
            self._encode = self._mode.get_total_flops()

    def of_step(self, accumulation: int, gather: Gather = gather_rows) -> CountedFlops | None:
        """The FLOPs of a step of `accumulation` micro-batches a rank, each as the one that was
        counted. Called by all ranks; None on all of them where one could not count."""
        encode, forward = self._counted or (0, 0)
        known = self.counted and not self._faults
        rows = torch.stack(list(gather(_row(encode, forward, known))))
        if not bool(rows[:, 2].all()):
            return None
        encode_all, forward_all = (float(value) * accumulation for value in rows[:, :2].sum(0))
        return CountedFlops(_FORWARD_AND_BACKWARD * forward_all, encode_all)

    @property
    def faults(self) -> Sequence[str]:
        """Why the FLOPs are not known: what torch's formulas said of the operators they failed on."""
        return tuple(self._faults)


def _row(encode: int, forward: int, known: bool) -> Tensor:
    return torch.tensor([encode, forward, known], dtype=torch.float64)


def _formulas(fault: Callable[[str], None]) -> dict[object, Callable[..., int]]:
    """torch's formulas and the missing ones, none of which ends the forward that it counts."""

    def soft(operator: object, formula: Callable[..., int]) -> Callable[..., int]:
        def count(*args: object, **kwargs: object) -> int:
            try:
                return formula(*args, **kwargs)
            except Exception as error:
                fault(f"{operator}: {type(error).__name__}: {error}")
                return 0

        count._get_raw = True  # type: ignore[attr-defined]  # the formula takes tensors, as those of torch
        return count

    ours = dict.fromkeys(_ATTENTION, _attention)
    return {operator: soft(operator, formula) for operator, formula in {**flop_registry, **ours}.items()}


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    """query[...,S,D], key[...,L,D], value[...,L,V]: scores and their product with the values."""
    queries, width = query.shape[-2:]
    return 2 * math.prod(query.shape[:-2]) * queries * key.shape[-2] * (width + value.shape[-1])


_ATTENTION = (  # scaled_dot_product_attention on CPU and on out-of-tree devices: torch has no formula
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
)
