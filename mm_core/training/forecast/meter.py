"""Counts the memory and the work of a computation on fake tensors: live storages, and operators by kind."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from mm_core.device.torch_private import FakeTensor, TorchDispatchMode, in_backward, layouts_unseen
from mm_core.runtime.groups import ranks_of
from mm_core.telemetry.flop_counter import attention_flops, formulas
from mm_core.telemetry.operators import run_operator

Kind = Literal["matmul", "attention", "elementwise", "communication"]

GATHERED, BACKWARD = "gathered weights", "backward"

_NO_WORK = (torch.ops.aten.detach, torch.ops.aten.alias)
_UNSET = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)


class Work(NamedTuple):
    """What one call of an operator does; bytes are those that it reads and writes, or of a collective those
    of its whole tensor. Its ranks are `group`, and `span` ranks lie between the first and the last."""

    kind: Kind
    name: str
    dtype: str
    flops: int
    bytes: int
    group: int = 1
    span: int = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor among the arguments of an operator. Not a tuple, which pytree would take apart."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class _Storage:
    size: int
    part: str
    born: int
    gone: int | None = None


@dataclass
class Segment:
    """A part of a phase: its largest number of live bytes, the moment of it, and how often operators ran."""

    peak: int = 0
    at: int = 0
    work: Counter[Work] = field(default_factory=Counter)


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts what runs in it.

    A storage counts from the operator that makes it to its release; fully_shard empties storages instead.
    Tensors without memory (meta) count nothing. A float that the host reads of a fake tensor is 1.

    Attributes:
        phases: the segments of each phase, by name.
        part: the name of what storages belong to that are made now, outside of modules.
        calls: of each operator and work its arguments, with `Shape` for tensors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phases: dict[str, dict[str, Segment]] = {}
        self.part = "other"
        self.calls: dict[Work, tuple[Any, Any, Any]] = {}
        self._segment = Segment()
        self._segments: dict[str, Segment] = {}
        self._paths: list[str] = []
        self._known: dict[int, tuple[_Storage, object]] = {}
        self._log: list[_Storage] = []
        self._live = 0
        self._clock = 0
        self._formulas = formulas([])

    # -- phases and parts ----------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context in which peaks and work are those of a phase."""
        self._segments = self.phases.setdefault(name, {})
        self.enter("begin")
        yield
        self._segments = {}
        self.enter("")

    def enter(self, segment: str) -> None:
        """Begins a segment of the phase, or goes on with it."""
        self._segment = self._segments.setdefault(segment, Segment())
        self._mark()

    @contextmanager
    def making(self, part: str) -> Iterator[None]:
        """A context in which storages made outside of modules belong to a part."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    @contextmanager
    def counting(self) -> Iterator[None]:
        """The context that counts, also storages that are emptied and filled in place."""
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            if (known := self._known.get(storage._cdata)) is not None:
                self._leave(known[0])
                self._known[storage._cdata] = (self._enter(storage.nbytes(), known[0].part), known[1])
            return found

        with patch.object(torch.UntypedStorage, "resize_", counted), layouts_unseen(), self:
            yield

    def watch(self, module: nn.Module, label: str) -> None:
        """Names what is made within a module's forward."""
        module.register_forward_pre_hook(lambda *_: self._paths.append(label))
        module.register_forward_hook(lambda *_: self._paths.remove(label), always_call=True)

    def call(self, tensors: Iterable[Tensor], part: str) -> None:
        """Names the storages of tensors, for the past too."""
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            if local.device.type != "meta":
                self._add(local)
                self._known[local.untyped_storage()._cdata][0].part = part

    def rename(self, part: str, to: str) -> None:
        """Gives what is live of a part another name."""
        for storage, _ in self._known.values():
            if storage.part == part:
                storage.part = to

    def parts(self, at: int) -> dict[str, int]:
        """The bytes of each part at a moment."""
        found: Counter[str] = Counter()
        for each in self._log:
            if each.born <= at and (each.gone is None or each.gone > at):
                found[each.part] += each.size
        return dict(found)

    # -- storages ------------------------------------------------------------------------------

    def _mark(self) -> None:
        if self._live > self._segment.peak:
            self._segment.peak, self._segment.at = self._live, self._clock

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        part = self.part
        if self._paths:
            part = f"activations of {self._paths[-1]}"
        elif in_backward():
            part = BACKWARD
        released = weakref.ref(storage, lambda _: self._leave(self._known.pop(key)[0]))
        self._known[key] = (self._enter(storage.nbytes(), part), released)

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

    # -- operators -----------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # most calls: C++ code asks fakes for their device
            return args[0].device
        if DTensor in types:
            return NotImplemented
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        out = self._run(func, args, kwargs, given)
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        for tensor in made:
            if tensor.device.type != "meta":
                self._add(tensor)
        packet = getattr(func, "overloadpacket", None)
        if packet is not None and func.namespace != "prim" and packet not in _NO_WORK and not func.is_view:
            self._count(func, args, kwargs, given, made, out)
        return out

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> Any:
        reads = func is torch.ops.aten._local_scalar_dense.default and isinstance(given[0], FakeTensor)
        if reads and given[0].is_floating_point():
            return 1.0
        if any(each.device.type == "meta" for each in given):
            return func(*args, **kwargs)
        kind = kwargs.get("dtype") or torch.get_default_dtype()
        if func in _UNSET and kind.is_floating_point:
            return func(*args, **kwargs)
        return run_operator(func, args, kwargs, given)

    def _count(
        self, func: Any, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor], out: Any
    ) -> None:
        name = func.overloadpacket.__name__
        tensors = {id(each): each for each in (*given, *made)}.values()
        size = sum(each.numel() * each.element_size() for each in tensors)
        dtype = next((str(t.dtype) for t in tensors), "").removeprefix("torch.")
        kind: Kind = "elementwise"
        flops = 0
        if func.namespace in ("c10d", "_c10d_functional"):
            if "allgather" in name or "all_gather" in name:
                self.call(given, GATHERED)
            self._segment.work[_collective(name, dtype, args, tensors)] += 1
            return
        elif "attention" in name and "backward" in name:
            kind = "attention"
            flops = 5 * attention_flops(*args[1:4]) // 2
        elif (formula := self._formulas.get(func.overloadpacket)) is not None:
            kind = "attention" if "attention" in name else "matmul"
            flops = formula(*args, **kwargs, out_val=out)
        elif func.namespace == "fsdp" and name != "chunk_cat":  # which copies gradients
            self.call(made or given[1:], GATHERED)
        work = Work(kind, name, dtype, flops, size)
        self._segment.work[work] += 1
        if work not in self.calls:
            self.calls[work] = (func, *tree_map_only(Tensor, _shape_of, (args, kwargs)))


def _shape_of(tensor: Tensor) -> Shape:
    return Shape(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _collective(name: str, dtype: str, args: Iterable[Any], tensors: Iterable[Tensor]) -> Work:
    ranks = ranks_of(args)
    largest = max((each.nbytes for each in tensors), default=0)
    return Work("communication", name, dtype, 0, largest, len(ranks), ranks[-1] - ranks[0] + 1)
