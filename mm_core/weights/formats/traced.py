"""Tracing a library's own weight conversion with tensors without numbers, to derive a key map.

A `Probe` has a shape and accepts the calls that slice, join and permute tensors. After the conversion it
lists the boxes it is made of: a key map follows from them, independent of the library's own rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NoReturn

from mm_core.weights.formats.key_map import Copy, Shape

_METHODS = ("narrow", "split", "chunk", "unbind", "squeeze", "unsqueeze", "transpose", "permute")


class Untraceable(AttributeError):
    """A weight conversion does more than slice, join and permute tensors. Its text is the call."""


@dataclass(frozen=True)
class Piece:
    """A box of a source tensor, and its place in the result of a weight conversion.

    Attributes:
        source: name of the source tensor.
        start: first index of the box in the source.
        size: shape of the box in the source.
        axes: for each dimension of the result, the dimension of the source; None for an added one, along
            which the piece has length 1.
        at: first index of the piece in the result.
    """

    source: str
    start: Shape
    size: Shape
    axes: tuple[int | None, ...]
    at: Shape

    def extent(self, dim: int) -> int:
        """Length of the piece along a dimension of the converted tensor."""
        axis = self.axes[dim]
        return 1 if axis is None else self.size[axis]

    def cut(self, dim: int, start: int, stop: int) -> Piece | None:
        """The part of the piece between two indices of a converted tensor's dimension; None for no part.

        Its place is counted from `start`.
        """
        low = max(start, self.at[dim])
        high = min(stop, self.at[dim] + self.extent(dim))
        if low >= high:
            return None
        at = (*self.at[:dim], low - start, *self.at[dim + 1 :])
        axis = self.axes[dim]
        if axis is None:
            return replace(self, at=at)
        first = self.start[axis] + low - self.at[dim]
        return replace(
            self,
            start=(*self.start[:axis], first, *self.start[axis + 1 :]),
            size=(*self.size[:axis], high - low, *self.size[axis + 1 :]),
            at=at,
        )


class Probe:
    """A tensor without numbers, to trace a library's weight conversion.

    It has the methods of `torch.Tensor` that slice, join and permute, and works with the same functions of
    torch; anything else raises `Untraceable`. Methods do what torch's methods of the same name do.
    """

    def __init__(self, shape: Sequence[int], pieces: Sequence[Piece]) -> None:
        self.shape = tuple(shape)
        self.pieces = tuple(pieces)

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> Probe:
        """The probe of a stored tensor that was not converted yet."""
        zeros = (0,) * len(shape)
        return cls(shape, [Piece(name, zeros, tuple(shape), tuple(range(len(shape))), zeros)])

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        known = _FUNCTIONS.get(func.__name__)
        if known is None:
            raise Untraceable(func.__name__)
        return known(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> NoReturn:
        raise Untraceable(name)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Shape | int:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Probe:
        return self  # a probe has no memory layout

    def narrow(self, dim: int, start: int, length: int) -> Probe:
        dim = self._dim(dim)
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise Untraceable(f"narrow of {length} from {start} of {self.shape[dim]}")
        cut = [piece.cut(dim, start, start + length) for piece in self.pieces]
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return Probe(shape, [piece for piece in cut if piece is not None])

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[Probe, ...]:
        length = self.shape[self._dim(dim)]
        if isinstance(sizes, int):
            sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(self.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Probe, ...]:
        return self.split(max(1, -(-self.shape[self._dim(dim)] // chunks)), dim)

    def unbind(self, dim: int = 0) -> tuple[Probe, ...]:
        return tuple(part.squeeze(dim) for part in self.split(1, dim))

    def squeeze(self, dim: int | None = None) -> Probe:
        gone = range(self.ndim) if dim is None else (self._dim(dim),)
        return self._along([d for d in range(self.ndim) if d not in gone or self.shape[d] != 1])

    def unsqueeze(self, dim: int) -> Probe:
        dim %= self.ndim + 1
        pieces = [
            replace(p, axes=(*p.axes[:dim], None, *p.axes[dim:]), at=(*p.at[:dim], 0, *p.at[dim:]))
            for p in self.pieces
        ]
        return Probe((*self.shape[:dim], 1, *self.shape[dim:]), pieces)

    def transpose(self, dim0: int, dim1: int) -> Probe:
        order = list(range(self.ndim))
        dim0, dim1 = self._dim(dim0), self._dim(dim1)
        order[dim0], order[dim1] = dim1, dim0
        return self._along(order)

    def permute(self, *dims: int) -> Probe:
        order = [self._dim(dim) for dim in dims]
        if sorted(order) != list(range(self.ndim)):
            raise Untraceable(f"permute of {list(self.shape)} by {dims}")
        return self._along(order)

    def __getitem__(self, key: object) -> Probe:
        # Supported: integers, slices without steps, and `...`.
        keys = list(key) if isinstance(key, tuple) else [key]
        if Ellipsis in keys:
            place = keys.index(Ellipsis)
            keys[place : place + 1] = [slice(None)] * (self.ndim - len(keys) + 1)
        found, dim = self, 0
        for one in keys:
            if isinstance(one, int):
                place = one + found.shape[found._dim(dim)] * (one < 0)
                found = found.narrow(dim, place, 1).squeeze(dim)
            elif isinstance(one, slice) and one.step in (None, 1):
                start, stop, _ = one.indices(found.shape[found._dim(dim)])
                found, dim = found.narrow(dim, start, max(0, stop - start)), dim + 1
            else:
                raise Untraceable(f"indexing by {one!r}")
        return found

    def _dim(self, dim: int) -> int:
        if not -self.ndim <= dim < self.ndim:
            raise Untraceable(f"dimension {dim} of {list(self.shape)}")
        return dim % self.ndim

    def _along(self, order: Sequence[int]) -> Probe:
        pieces = [
            replace(p, axes=tuple(p.axes[d] for d in order), at=tuple(p.at[d] for d in order))
            for p in self.pieces
        ]
        return Probe([self.shape[d] for d in order], pieces)


def _cat(probes: Sequence[Probe], dim: int = 0) -> Probe:
    dim = probes[0]._dim(dim)
    rests = {(*p.shape[:dim], *p.shape[dim + 1 :]) for p in probes}
    if len(rests) > 1:
        raise Untraceable(f"cat of {', '.join(str(list(p.shape)) for p in probes)} along {dim}")
    pieces, length = [], 0
    for probe in probes:
        pieces += [replace(p, at=(*p.at[:dim], p.at[dim] + length, *p.at[dim + 1 :])) for p in probe.pieces]
        length += probe.shape[dim]
    return Probe((*probes[0].shape[:dim], length, *probes[0].shape[dim + 1 :]), pieces)


def _stack(tensors: Sequence[Probe], dim: int = 0) -> Probe:
    return _cat([probe.unsqueeze(dim) for probe in tensors], dim % (tensors[0].ndim + 1))


_FUNCTIONS: Mapping[str, Callable[..., object]] = {name: getattr(Probe, name) for name in _METHODS} | {
    "cat": _cat,
    "concat": _cat,
    "stack": _stack,
}


def stored_from(name: str, probe: Probe) -> list[Copy]:
    """The key-map copies of one stored tensor, traced from a conversion of a component's tensors."""
    copies = []
    for piece in probe.pieces:
        if None in piece.axes:
            raise Untraceable("stack")
        dims = {axis: dim for dim, axis in enumerate(piece.axes)}
        places = [(dims[a], piece.at[dims[a]]) if a in dims else None for a in range(len(piece.size))]
        copy = Copy(piece.source, piece.start, piece.size, name, probe.shape, ())
        copies.append(_placed(copy, places))
    return copies


def component_from(name: str, probe: Probe, shapes: Mapping[str, Shape]) -> list[Copy]:
    """The key-map copies of one component's tensor, traced from a conversion of stored tensors.

    Args:
        name: name of the component's tensor.
        probe: result of the conversion.
        shapes: shapes of the stored tensors.
    """
    copies = []
    for piece in probe.pieces:
        if len([axis for axis in piece.axes if axis is not None]) < len(piece.size):
            raise Untraceable("unbind")
        places = [None if axis is None else (axis, piece.start[axis]) for axis in piece.axes]
        size = tuple(piece.extent(dim) for dim in range(len(piece.axes)))
        copy = Copy(name, piece.at, size, piece.source, shapes[piece.source], ())
        copies.append(_placed(copy, places))
    return copies


def _placed(copy: Copy, places: Sequence[tuple[int, int] | None]) -> Copy:
    """A copy with its place in the stored tensor.

    Args:
        copy: the copy without `stored_start`.
        places: for each dimension of the component's tensor, the stored tensor's dimension and the first
            index along it; None for one that the stored tensor lacks: it is viewed with as many dimensions of
            length 1 before its own.
    """
    ones, added = places.count(None), count()
    seen = [(next(added), 0) if place is None else (ones + place[0], place[1]) for place in places]
    dims = tuple(dim for dim, _ in seen)
    return replace(
        copy,
        stored_start=tuple(begin for _, begin in seen),
        dims=None if dims == tuple(range(len(dims))) else dims,
        view=(1,) * ones + copy.stored_shape if ones else None,
    )
