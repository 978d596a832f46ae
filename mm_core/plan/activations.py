"""The activations that a forward keeps for its backward, from a forward that computes no numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from mm_core.contracts import EnginePlan, SupportsSampleForward, TaskModule, torch_dtype
from mm_core.device.torch_private import FakeTensorMode, TorchDispatchMode
from mm_core.parallel.context.exchange import Peers
from mm_core.parallel.context.spreading import Spreading
from mm_core.parallel.layout import ShardedPlan


@dataclass(frozen=True)
class Activations:
    """What a rank computes of a micro-batch.

    Attributes:
        tokens: tokens of a sample on the rank with most of them.
        all_tokens: tokens of a sample.
        kept_bytes: activations that are kept for the backward, with those of the largest recomputed module.
    """

    tokens: int
    all_tokens: int
    kept_bytes: int


def shared_activations(
    task: TaskModule, layout: EnginePlan, batch_spec: Mapping[str, Any], rows: int
) -> Activations | None:
    """The activations on a rank that shares its samples with others; None where it does not, or for unknown
    sizes. `task` cannot be used afterwards.

    Args:
        task: on the meta device.
        layout: the engine's plan.
        batch_spec: the config fields of the training dataset.
        rows: samples of a micro-batch.
    """
    if not isinstance(layout, ShardedPlan) or layout.context is None:
        return None
    found = task.sample_forward(batch_spec) if isinstance(task, SupportsSampleForward) else None
    if found is None:
        return None
    spreading = Spreading(layout.context, Peers(0, layout.context.size))
    spreading.apply(task)
    root, given = found
    component = task.get_submodule(root)
    dtype = torch_dtype(layout.compute_dtype) if layout.compute_dtype else None
    with FakeTensorMode(allow_non_fake_inputs=True):  # tables that are neither parameters nor buffers
        arguments = tree_map_only(Tensor, lambda t: _fake(t, None).expand(rows, *t.shape[1:]).clone(), given)
        state = {n: _fake(p, dtype) for n, p in component.named_parameters()}
        state |= {name: _fake(buffer, None) for name, buffer in component.named_buffers()}
        kept = _Kept(task, layout, state.values())
        with torch.autograd.graph.saved_tensors_hooks(kept.save, lambda tensor: tensor), kept:
            torch.func.functional_call(component, state, (), arguments)
    return Activations(max(spreading.tokens), sum(spreading.tokens), kept.bytes())


def _fake(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor of the shape without memory, on the CPU: attention on the meta device keeps all scores."""
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=kind, device="cpu").requires_grad_(tensor.requires_grad)


class _Kept(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The storages that a forward saves, and those that a recomputed module saves once more later."""

    def __init__(self, task: TaskModule, layout: ShardedPlan, state: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators = set(layout.kept)
        self._known = {_key(tensor) for tensor in state}
        self._alive: list[Tensor] = []  # so that no storage has the key of an earlier one
        self._outside: dict[int, int] = {}
        self._inside: list[dict[int, int]] = []
        self._open = False
        for path in layout.recomputed:
            module = task.get_submodule(path)
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(self._leave)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._open and str(getattr(func, "overloadpacket", func)) in self._operators:
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor):
                    self._add(self._outside, tensor)
        return out

    def _enter(self, _: object, args: Any, kwargs: Any) -> None:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._add(self._outside, tensor)
        self._inside.append({})
        self._open = True

    def _leave(self, *_: object) -> None:
        self._open = False

    def save(self, tensor: Tensor) -> Tensor:
        """Counts what autograd saves."""
        self._add(self._inside[-1] if self._open else self._outside, tensor)
        return tensor

    def _add(self, to: dict[int, int], tensor: Tensor) -> None:
        self._alive.append(tensor)
        if (key := _key(tensor)) not in self._known:
            to[key] = tensor.untyped_storage().nbytes()

    def bytes(self) -> int:
        """The bytes of what is kept, and of the largest recomputed module's own."""
        own = ({k: n for k, n in part.items() if k not in self._outside} for part in self._inside)
        return sum(self._outside.values()) + max((sum(part.values()) for part in own), default=0)


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
