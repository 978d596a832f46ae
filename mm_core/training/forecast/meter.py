"""Counts the memory and the work of a computation on fake tensors: live storages, and operators by kind."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mm_core.device.torch_private import (
    DTensor,
    FakeTensor,
    TorchDispatchMode,
    in_backward,
    unset_fake_temporarily,
)
from mm_core.telemetry.flop_counter import formulas
from mm_core.telemetry.operators import run_operator

Kind = Literal["matmul", "attention", "elementwise", "communication"]

_NO_WORK = (torch.ops.aten.detach, torch.ops.aten.alias)
_UNSET = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)


class Work(NamedTuple):
    """What an operator does: its kind, the name of its dtype, FLOPs, and bytes that it reads and writes (or
    that a rank sends, of a collective)."""

    kind: Kind
    dtype: str
    flops: int
    bytes: int
    name: str


@dataclass(slots=True)
class _Storage:
    size: int
    part: str
    born: int
    gone: int | None = None


@dataclass
class Phase:
    """One phase of a run.

    Attributes:
        peak: largest number of bytes that were live at once.
        at: the operator at which they were.
        work: how often each operator ran.
    """

    peak: int = 0
    at: int = 0
    work: Counter[Work] = field(default_factory=Counter)


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts what runs in it.

    Storages are counted from their first operator to their release, or until their owner takes their memory
    (`resize_`), as fully_shard does. Tensors without memory (meta) count nothing.

    Attributes:
        phases: by name, in the order in which they began.
        part: the name of what storages belong to that are made now, outside of modules.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phases: dict[str, Phase] = {}
        self.part = "other"
        self._phase = Phase()
        self._paths: list[str] = []
        self._known: dict[int, _Storage] = {}
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._log: list[_Storage] = []
        self._live = 0
        self._clock = 0
        self._formulas = formulas([])

    # -- phases and parts ----------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str, part: str) -> Iterator[None]:
        """A context whose peak and work are counted under a name; what it makes outside of modules is
        `part`."""
        before, self._phase = self._phase, self.phases.setdefault(name, Phase())
        outer, self.part = self.part, part
        self._mark()
        try:
            yield
        finally:
            self._phase, self.part = before, outer
            self._mark()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """The context that counts storages which are emptied and filled in place."""
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            self._resized(storage)
            return found

        with patch.object(torch.UntypedStorage, "resize_", counted), self:
            yield

    def watch(self, module: nn.Module, name: str) -> None:
        """Names what is made within a module's forward, by its path without numbers."""
        for path, inner in module.named_modules(prefix=name):
            label = ".".join("*" if part.isdecimal() else part for part in path.split("."))
            inner.register_forward_pre_hook(lambda *_, label=label: self._paths.append(label))
            inner.register_forward_hook(lambda *_: self._paths.pop() and None, always_call=True)

    def call(self, tensors: Sequence[Tensor], part: str) -> None:
        """Names the storages of tensors, also for the past."""
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            if local.is_meta and not isinstance(local, FakeTensor):
                continue
            self._add(local)
            if (found := self._known.get(local.untyped_storage()._cdata)) is not None:
                found.part = part

    def parts(self, phase: Phase) -> dict[str, int]:
        """The bytes of each part at the peak of a phase, the largest first."""
        found: Counter[str] = Counter()
        for each in self._log:
            if each.born <= phase.at and (each.gone is None or each.gone > phase.at):
                found[each.part] += each.size
        return dict(found.most_common())

    # -- storages ------------------------------------------------------------------------------

    def _mark(self) -> None:
        if self._live > self._phase.peak:
            self._phase.peak, self._phase.at = self._live, self._clock

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        part = self.part
        if self._paths:
            part = f"activations of {self._paths[-1]}"
        elif in_backward():
            part = "backward"
        self._known[key] = self._enter(storage.nbytes(), part)
        self._refs[key] = weakref.ref(storage, lambda _, key=key: self._gone(key))

    def _enter(self, size: int, part: str) -> _Storage:
        self._clock += 1
        found = _Storage(size, part, self._clock)
        self._log.append(found)
        self._live += size
        self._mark()
        return found

    def _leave(self, found: _Storage) -> None:
        self._clock += 1
        found.gone = self._clock
        self._live -= found.size

    def _gone(self, key: int) -> None:
        self._refs.pop(key, None)
        if (found := self._known.pop(key, None)) is not None:
            self._leave(found)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if (found := self._known.get(storage._cdata)) is not None:
            self._leave(found)
            self._known[storage._cdata] = self._enter(storage.nbytes(), found.part)

    # -- operators -----------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        out = self._run(func, args, kwargs, given)
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        for tensor in made:
            if not tensor.is_meta or isinstance(tensor, FakeTensor):
                self._add(tensor)
        if getattr(func, "namespace", "prim") != "prim" and func.overloadpacket not in _NO_WORK:
            self._count(func, args, kwargs, given, made, out)
        return out

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(given[0], FakeTensor):
            if given[0].is_floating_point():
                return 1.0  # a norm or a loss: the host reads it and goes on
        if func in _UNSET and kwargs.get("dtype", torch.get_default_dtype()).is_floating_point:
            return func(*args, **kwargs)
        if any(each.is_meta for each in given):
            return func(*args, **kwargs)
        return run_operator(func, args, kwargs, given)

    def _count(
        self, func: Any, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor], out: Any
    ) -> None:
        if func.is_view:
            return
        name = func.overloadpacket.__name__
        tensors = {id(each): each for each in (*given, *made)}.values()
        size = sum(each.numel() * each.element_size() for each in tensors)
        dtype = str(given[0].dtype if given else made[0].dtype if made else "").removeprefix("torch.")
        kind: Kind = "elementwise"
        flops = 0
        if func.namespace in ("c10d", "_c10d_functional"):
            kind = "communication"
        elif (formula := self._formulas.get(func.overloadpacket)) is not None:
            kind = "attention" if "attention" in name else "matmul"
            flops = formula(*args, **kwargs, out_val=out)
        self._phase.work[Work(kind, dtype, flops, size, name)] += 1
