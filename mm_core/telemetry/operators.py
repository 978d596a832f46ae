"""The operators of a computation: how often each runs, on which shapes, with how many FLOPs and bytes.

Float tensors that depend on a model's weights are fake, so that nothing of its size is allocated or computed;
all others are computed, since a model may decide by them (how many tokens are images).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mm_core.device.operators import kernel_on
from mm_core.device.torch_private import FakeTensor, TorchDispatchMode, unset_fake_temporarily
from mm_core.telemetry.flop_counter import formulas

Signature = tuple[str, tuple[tuple[int, ...], ...], tuple[str, ...]]
"""Name of an operator, such as `aten::add.Tensor`, and the shapes and dtypes of its tensors."""


_ONLY_PYTHON = (torch.ops.aten.detach, torch.ops.aten.alias)
"""Operators that compute nothing, which watching from Python adds."""


@dataclass
class Calls:
    """The calls of an operator with the same shapes and dtypes.

    Attributes:
        count: how many.
        flops: of all of them; only matrix products, convolutions and attention have any.
        bytes: of the tensors that they read and write; none for views.
    """

    count: int = 0
    flops: int = 0
    bytes: int = 0


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts the operators which run in it, forward and backward.

    Args:
        calls: receives the counts.
    """

    def __init__(self, calls: dict[Signature, Calls]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = calls
        self._formulas = formulas([])

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        out = run_operator(func, args, kwargs, given)
        if getattr(func, "namespace", "prim") != "prim" and func.overloadpacket not in _ONLY_PYTHON:
            self._count(func, args, kwargs, given, out)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, given: Iterable[Tensor], out: Any) -> None:
        tensors = [*given, *(each for each in tree_leaves(out) if isinstance(each, Tensor))]
        shapes = tuple(tuple(tensor.shape) for tensor in given)
        dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in given)
        calls = self.calls.setdefault((func.name(), shapes, dtypes), Calls())
        calls.count += 1
        if (formula := self._formulas.get(func.overloadpacket)) is not None:
            calls.flops += formula(*args, **kwargs, out_val=out)
        if not func.is_view:
            calls.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def run_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Iterable[Tensor]) -> Any:
    """Runs an operator: computes it if none of its tensors is fake."""
    if not any(isinstance(each, FakeTensor) for each in given):
        with unset_fake_temporarily():
            return func(*args, **kwargs)
    if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
        with unset_fake_temporarily():  # the sizes of what real masks choose are known
            args = (args[0], [part for each in args[1] for part in _places(each)], *args[2:])
    return func(*args, **kwargs)


def _places(index: Tensor | None) -> Iterable[Tensor | None]:
    masks = index is not None and index.dtype == torch.bool and not isinstance(index, FakeTensor)
    return index.nonzero().unbind(1) if masks and index is not None else [index]


def make_fake(module: nn.Module, dtype: Callable[[str, Tensor], torch.dtype]) -> None:
    """Replaces parameters and buffers by fake ones on the CPU; tied ones stay tied.

    Args:
        module: on the meta device.
        dtype: called with a tensor's path and the tensor.
    """
    known: dict[int, Tensor] = {}
    for path, owner in module.named_modules():
        for held in (owner._parameters, owner._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in known:
                    fake = torch.empty(tensor.shape, dtype=dtype(f"{path}.{name}", tensor), device="cpu")
                    known[id(tensor)] = (
                        nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
                    )
                held[name] = known[id(tensor)]


@dataclass(frozen=True)
class Operator:
    """One line of the inventory.

    Attributes:
        name: of the operator, with its overload.
        shapes: of the tensors that it gets.
        dtypes: of these.
        calls: how often, with how much work.
        kernel: how the named device runs it (see `device.operators.kernel_on`); None without a device.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    calls: Calls
    kernel: str | None


def listed(calls: Mapping[Signature, Calls], device: str | None) -> list[Operator]:
    """The operators with the most work first.

    Args:
        calls: what was counted.
        device: a kind of device whose kernels are looked up.
    """
    found = [
        Operator(name, shapes, dtypes, count, kernel_on(name, device) if device else None)
        for (name, shapes, dtypes), count in calls.items()
    ]
    return sorted(found, key=lambda each: (-each.calls.flops, -each.calls.bytes, each.name))


def table(operators: Sequence[Operator]) -> list[tuple[str, ...]]:
    """Lines about operators, one for each name and dtypes, with the shapes of the largest call."""
    lines: dict[tuple[str, str], list[Operator]] = {}
    for each in operators:
        lines.setdefault((each.name, ", ".join(dict.fromkeys(each.dtypes))), []).append(each)
    rows: list[tuple[str, ...]] = [("operator", "dtypes", "calls", "GFLOP", "MB", "kernel", "largest")]
    for (name, dtypes), parts in lines.items():
        calls, flops, size = (
            sum(getattr(p.calls, key) for p in parts) for key in ("count", "flops", "bytes")
        )
        shapes = " ".join(f"[{','.join(map(str, shape))}]" for shape in parts[0].shapes)
        work = f"{flops / 1e9:,.3f}" if flops else ""
        rows.append((name, dtypes, f"{calls:,}", work, f"{size / 1e6:,.1f}", parts[0].kernel or "", shapes))
    return rows
