"""FLOPs of a training step, counted once with the formulas of torch.utils.flop_counter in the first forward.

A multiplication and an addition are two FLOPs; only matrix products, convolutions and attention are
counted, as is usual for MFU (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B). The
backward of a trained module counts as twice its forward; what the backward recomputes is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from mm_core.device.torch_private import TorchDispatchMode, kernel_of
from mm_core.runtime.ranks import gather_rows
from mm_core.telemetry.window import Gather

_FORWARD_AND_BACKWARD = 3
"""FLOPs of forward and backward together, in forwards."""

_ATTENTION = (  # scaled_dot_product_attention on CPU and on out-of-tree devices: torch has no formula
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the FLOPs of operators, and runs each with the kernel that it has without this mode.

    torch's FlopCounterMode runs what an operator decomposes into, which rounds otherwise: the counted step
    would differ, and a resumed run counts another step than the run that was not stopped.
    """

    supports_higher_order_operators = True

    def __init__(self, formulas: Mapping[object, Callable[..., int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._formulas = formulas
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and self._is_composed(func, args):
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        out = func(*args, **kwargs)
        if (formula := self._formulas.get(getattr(func, "overloadpacket", None))) is not None:
            self.total += formula(*args, **kwargs, out_val=out)
        return out

    def _is_composed(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether an operator has no kernel of its own on the device (in inference mode they arrive here)."""
        if func.overloadpacket in self._formulas or func.namespace == "prim":
            return False
        tensor = next((each for each in args if isinstance(each, Tensor)), None)
        if tensor is None:
            return False
        return kernel_of(func.name(), tensor.device.type) != "native"


class ForwardFlops:
    """Counts the FLOPs of the first forward that runs within `counting()`, and of no later one.

    Every rank counts its own micro-batch.
    """

    def __init__(self) -> None:
        self._counted: int | None = None
        self._failed: list[object] = []

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A context that counts the FLOPs of a forward; it costs nothing after the first time."""
        if self._counted is not None:
            yield
            return
        with _Counter(formulas(self._failed)) as mode:
            yield
        self._counted = mode.total

    def of_step(self, accumulation: int, gather: Gather = gather_rows) -> float | None:
        """FLOPs of the trained modules in one step over all ranks; None if any rank could not count them.

        All ranks must call it.

        Args:
            accumulation: micro-batches per rank and step; each counts like the counted one.
            gather: the collective that exchanges the counts.
        """
        known = self._counted is not None and not self._failed
        rows = torch.stack(list(gather(torch.tensor([self._counted or 0, known], dtype=torch.float64))))
        if not bool(rows[:, 1].all()):
            return None
        return _FORWARD_AND_BACKWARD * accumulation * float(rows[:, 0].sum())


def formulas(failed: list[object]) -> dict[object, Callable[..., int]]:
    """FLOP formulas of torch and the missing ones; one that fails does not end the forward: its operator is
    added to `failed`."""

    def tolerant(operator: object, formula: Callable[..., int]) -> Callable[..., int]:
        def count(*args: object, **kwargs: object) -> int:
            try:
                return formula(*args, **kwargs)
            except Exception:
                failed.append(operator)
                return 0

        return count

    ours = dict.fromkeys(_ATTENTION, attention_flops)
    return {operator: tolerant(operator, formula) for operator, formula in {**flop_registry, **ours}.items()}


def attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    """FLOPs of attention: the scores and their product with the values.

    Args:
        query: [..., S, D].
        key: [..., L, D].
        value: [..., L, V].
    """
    queries, width = query.shape[-2:]
    return 2 * math.prod(query.shape[:-2]) * queries * key.shape[-2] * (width + value.shape[-1])
