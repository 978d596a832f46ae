"""Rows of a dataset as bytes in shared tensors."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Generic, TypeVar, overload

import torch

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")


class PackedRows(Sequence[R], Generic[R]):
    """Rows of a dataset packed as bytes in two tensors, whose memory data workers share; a list of objects
    would be pickled for each worker.

    Args:
        rows: dataclass instances of one class; read once.
        kind: the class, called with the fields of a row.
    """

    def __init__(self, rows: Iterable[R], kind: Callable[..., R]) -> None:
        packed, ends = bytearray(), array("q", [0])
        for row in rows:
            values = tuple(getattr(row, field.name) for field in fields(row))
            packed += pickle.dumps(values)
            ends.append(len(packed))
        self._kind = kind
        self._ends = torch.frombuffer(ends, dtype=torch.int64)
        self._bytes = torch.frombuffer(packed or bytearray(1), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> list[R]: ...
    def __getitem__(self, index: int | slice) -> R | list[R]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]  # negative ones too; IndexError outside
        start, end = self._ends[place : place + 2].tolist()
        values: tuple[object, ...] = pickle.loads(self._bytes[start:end].numpy().tobytes())
        return self._kind(*values)
