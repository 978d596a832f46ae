"""Full tensors in place of sharded parameters, for code that is written for one device.

torch's operations on a sharded parameter differ from those on a plain tensor: several are not implemented,
and a slice of a sharded dimension is a copy, so what is written into it is lost. Here such a function gets
the full tensor instead, which all ranks gather, and each rank copies its part of what the function wrote back
into its shard. Views of a full tensor stay views: the parameter follows what is written into them later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from mm_core.device.torch_private import FakeTensor
from mm_core.modules.torch_calls import Args, Function, Kwargs

_OWNER = "_mm_full_tensor"
"""Attribute of a view: the full tensor that it is a part of, which lives as long as one of its views."""
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_TO_NUMPY: tuple[Function, ...] = (Tensor.numpy, Tensor.__array__)


def keep_local_part(target: Tensor, full: Tensor) -> None:
    """Copies this rank's shard of a full tensor into a module's tensor (all of it into a plain tensor)."""
    if isinstance(target, DTensor):
        part = distribute_tensor(
            full.to(target.device), target.device_mesh, target.placements, src_data_rank=None
        )
        target.to_local().copy_(part.to_local())
    else:
        target.copy_(full)


class _Full:
    """The full tensor of a sharded parameter; what is written into it is known by its version."""

    def __init__(self, parameter: DTensor, spared: bool) -> None:
        self.parameter = parameter
        self.spared = spared
        if spared:  # filled later, so nothing is gathered and nothing is kept
            self.tensor = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        else:
            gathered = parameter.full_tensor().detach()
            own = storage_of(gathered) != storage_of(parameter.to_local())
            self.tensor = gathered if own else gathered.clone()
        self.version = self.tensor._version

    def write_back(self) -> None:
        if self.version != self.tensor._version:
            self.version = self.tensor._version
            if not self.spared:
                keep_local_part(self.parameter, self.tensor)


class FullTensors:
    """Calls functions with full tensors in place of sharded parameters.

    Args:
        names: id of a tensor -> its name.
        spared: names of tensors whose values nobody keeps.
    """

    def __init__(self, names: Mapping[int, str], spared: Collection[str]) -> None:
        self._names = names
        self._spared = spared
        self._open: WeakValueDictionary[int, _Full] = WeakValueDictionary()
        self._arrays: list[_Full] = []

    def call(self, func: Function, args: Args, kwargs: Kwargs) -> object:
        """Calls a function that may read or write sharded parameters, or views of full tensors."""
        used: list[_Full] = []  # they live until the results are known

        def full(value: object) -> object:
            if isinstance(value, DTensor) and id(value) in self._names:
                used.append(self._opened(value))
                return used[-1].tensor
            return value

        args, kwargs = tree_map(full, (args, kwargs))
        if not self._open:
            return func(*args, **kwargs)
        if func == _DATA:
            func = Tensor.detach  # the same view, but it shares the version that counts writes
        if func in _TO_NUMPY:
            # Writes into an array are not seen: it counts as written at the end.
            self._arrays += [self._open[key] for key in self._open if self._in(self._open[key], args)]
        result = func(*args, **kwargs)
        for opened in list(self._open.values()):
            opened.write_back()
        if isinstance(result, Iterator):
            return iter([self._handed_out(item) for item in result])
        return tree_map(self._handed_out, result)

    def keep(self, target: Tensor, full: Tensor) -> None:
        """Fills a module's tensor from a full one, and the full tensor that views of it belong to."""
        if opened := self._open.get(id(target)):
            opened.tensor.copy_(full)
            opened.write_back()
        else:
            keep_local_part(target, full)

    def is_open(self, target: object) -> bool:
        """Whether views of a parameter's full tensor are in use."""
        return id(target) in self._open

    def close(self) -> None:
        """Writes back what numpy has written."""
        for opened in self._arrays:
            opened.version = -1
            opened.write_back()

    def _opened(self, parameter: DTensor) -> _Full:
        opened = self._open.get(id(parameter))
        if opened is None:
            opened = _Full(parameter, self._names[id(parameter)] in self._spared)
            self._open[id(parameter)] = opened
        return opened

    def _handed_out(self, result: object) -> object:
        """A function's result: a parameter for its own full tensor; a view keeps the full tensor alive."""
        if not isinstance(result, Tensor) or isinstance(result, DTensor) or not self._open:
            return result
        for opened in self._open.values():
            if result is opened.tensor:
                return opened.parameter
            if self._in(opened, (result,)):
                setattr(result, _OWNER, opened)
        return result

    @staticmethod
    def _in(opened: _Full, tensors: Args) -> bool:
        """Whether one of the tensors is a view of a full tensor."""
        home = storage_of(opened.tensor)
        return any(isinstance(tensor, Tensor) and storage_of(tensor) == home for tensor in tensors)


def storage_of(tensor: Tensor) -> int | None:
    """The address of a plain tensor's memory; None for tensors without elements or plain memory."""
    if isinstance(tensor, DTensor | FakeTensor) or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage().data_ptr() or None
