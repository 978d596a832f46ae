"""Tensors of which each rank holds a range of the elements, in row-major order, wherever rows begin.

Engines that lay parameters into one flat buffer and split that buffer over the ranks hold such ranges. A
range is at most 2n-1 boxes of an n-dimensional tensor, and a checkpoint stores and reads boxes: so what such
an engine writes fits any number of ranks and any other engine, without a copy and without communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from mm_core.errors import plural
from mm_core.runtime.ranks import sum_over_ranks

Ints = tuple[int, ...]
_ATEN = torch.ops.aten
_BY_SHARE = {_ATEN.detach.default, _ATEN.clone.default, _ATEN.copy_.default, _ATEN._to_copy.default}
"""What is done to each rank's elements alone."""


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Ints, Ints]]:
    """The boxes (offsets, sizes) that the elements `start` to `stop` of a tensor form, in row-major order."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    rest = tuple(shape[1:])
    row = prod(rest)
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    inside = [(first, head, tail)] if first == last else [(first, head, row)] * bool(head)
    for index, begin, end in inside:
        yield from (((index, *o), (1, *s)) for o, s in boxes(rest, begin, end))
    if first == last:
        return
    if (whole := first + bool(head)) < last:
        yield (whole, *(0 for _ in rest)), (last - whole, *rest)
    yield from (((last, *o), (1, *s)) for o, s in boxes(rest, 0, tail))


class FlatShard(Tensor):
    """A tensor of which this rank holds a range of the elements, to store, load and copy, not to compute.

    Args:
        share: [n] the elements of this rank, plain memory that a load fills.
        shape: shape of the whole tensor.
        start: index of the first of them in the whole tensor, in row-major order.
    """

    share: Tensor
    start: int

    @staticmethod
    def __new__(cls, share: Tensor, shape: Sequence[int], start: int) -> FlatShard:
        assert 0 <= start <= start + share.numel() <= prod(shape), (start, share.shape, shape)
        made: FlatShard = Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=share.dtype, device=share.device
        )
        made.share, made.start = share.detach(), start
        return made

    def __init__(self, *_: object) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> FlatShard:
        tensors = [a for a in args if isinstance(a, Tensor)]
        shards = [a for a in tensors if isinstance(a, FlatShard)]
        alike = len(shards) == len(tensors) and len({shard._range for shard in shards}) == 1
        if func not in _BY_SHARE or not alike:
            raise NotImplementedError(f"{func} of a tensor whose elements lie on several ranks")
        share = func(*[a.share if isinstance(a, FlatShard) else a for a in args], **(kwargs or {}))
        held = shards[0]
        return held if share is held.share else held.like(share)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"FlatShard({tuple(self.shape)}, from {self.start}, {plural(self.share.numel(), 'element')})"

    @property
    def _range(self) -> tuple[torch.Size, int, int]:
        return self.shape, self.start, self.share.numel()

    def like(self, share: Tensor) -> FlatShard:
        """The same range of a tensor of the same shape, with other elements."""
        return FlatShard(share, self.shape, self.start)

    def gathered(self) -> Tensor:
        """The whole tensor on this rank's device. Collective: the ranges of the ranks must cover it once."""
        whole = torch.zeros(self.shape.numel(), dtype=self.dtype, device=self.device)
        whole[self.start : self.start + self.share.numel()] = self.share
        return sum_over_ranks(whole).view(self.shape)

    # -- boxes, by the names that torch.distributed.checkpoint asks for ---------------------------

    def pieces(self) -> dict[Ints, Tensor]:
        """The boxes of this rank by their offsets in the whole tensor: views of `share`."""
        found, at = {}, 0
        for offsets, sizes in boxes(self.shape, self.start, self.start + self.share.numel()):
            found[offsets] = self.share[at : at + prod(sizes)].view(sizes)
            at += prod(sizes)
        return found

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), piece.shape) for at, piece in self.pieces().items()]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.pieces()[tuple(index.offset)]
