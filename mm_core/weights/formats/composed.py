"""Two key maps in a row: a format built on another one declares only the differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mm_core.errors import ContractError
from mm_core.weights.formats.key_map import WHERE, Copy, KeyMap, Rename, Template, box_of
from mm_core.weights.streaming import overlap


def composed(first: KeyMap, second: KeyMap) -> KeyMap:
    """The key map that applies `first` to a component's names and then `second`, down to a file's names.

    It works in both directions, like each of the two. A stored name that `first` ignores is ignored if
    `second` only renames it or leaves it unchanged.

    Raises:
        ContractError: when its copies are computed, if `first` reshapes a tensor that `second` permutes or
            splits along a dimension different from the first: no box of that is a box in the file.
    """
    after = composed(first.after, second) if isinstance(first, ComposedKeyMap) else second
    return ComposedKeyMap(first.rules, first.prefix, first.ignored, first.placed, after)


@dataclass(frozen=True)
class ComposedKeyMap(KeyMap):
    """A key map whose stored names are the component names of a second key map: see `composed`."""

    after: KeyMap = field(default_factory=KeyMap)

    def ignores(self, stored: str) -> bool:
        """Whether either key map does not need a tensor of this stored name."""
        return self.after.ignores(stored) or any(
            KeyMap.ignores(self, name) for name in _names_before(self.after, stored)
        )

    def renamed(self, name: str) -> str | None:
        """The stored name of a component's tensor that both key maps only rename; None for any other."""
        between = super().renamed(name)
        return None if between is None else self.after.renamed(between)

    def copies(self, shapes: Mapping[str, Sequence[int]]) -> list[Copy]:
        """The copies between a component's tensors and those of a weights file, through both key maps."""
        first = super().copies(shapes)
        second: dict[str, list[Copy]] = {}
        for copy in self.after.copies({copy.stored: copy.stored_shape for copy in first}):
            second.setdefault(copy.component, []).append(copy)
        joined = (_joined(one, other) for one in first for other in second[one.stored])
        return [copy for copy in joined if copy is not None]


def _names_before(keys: KeyMap, stored: str) -> list[str]:
    """The names that a map only renames to `stored`."""
    found = [keys.prefix + stored]
    for rule in keys.rules:
        if isinstance(rule, Rename) and (values := Template(rule.stored).match(stored)) is not None:
            found.append(keys.prefix + Template(rule.component).fill(values))
    return [name for name in found if keys.renamed(name) == stored]


def _joined(first: Copy, second: Copy) -> Copy | None:
    """The copy from the component to the file, for the numbers that two copies share; None for none.

    Args:
        first: copy between the component and an intermediate tensor.
        second: copy between the intermediate tensor and the file.
    """
    other = _turned(_seen(second, first), first.dims)
    common = overlap(other, box_of(first.stored_start, first.size))
    if common is None:
        return None
    ours = zip(common, first.start, first.stored_start, strict=True)
    theirs = zip(common, other.stored_start, other.start, strict=True)
    return replace(
        other,
        component=first.component,
        start=tuple(part.start + begin - offset for part, begin, offset in ours),
        size=tuple(part.stop - part.start for part in common),
        stored_start=tuple(part.start + begin - offset for part, begin, offset in theirs),
    )


def _seen(second: Copy, first: Copy) -> Copy:
    """`second` with the intermediate tensor viewed as `first.view`."""
    view, shape = first.view, first.stored_shape
    if view is None:
        return second
    seen = second.view or second.stored_shape
    if (added := len(view) - len(shape)) > 0 and view == (1,) * added + shape:
        zeros, dims = (0,) * added, second.dims
        return replace(
            second,
            start=zeros + second.start,
            size=(1,) * added + second.size,
            stored_start=zeros + second.stored_start,
            view=(1,) * added + seen,
            dims=None if dims is None else (*range(added), *(dim + added for dim in dims)),
        )
    rows = second.dims is None and second.size[1:] == seen[1:] == shape[1:]
    if not rows or (second.view is not None and second.view[0] != second.stored_shape[0]):
        work = "splits" if second.dims is None else "permutes the dimensions of"
        along = " along a dimension other than its first" if second.dims is None else ""
        raise ContractError(
            f"two key maps cannot be composed: the first reshapes {first.component!r} to {first.stored!r},"
            f" which the second {work}{along}",
            where=WHERE,
            hint="remove the reshape from the first key map, or convert the weights with your own script",
        )
    zeros = (0,) * (len(view) - 1)
    return replace(
        second,
        start=(second.start[0], *zeros),
        size=(second.size[0], *view[1:]),
        stored_start=(second.stored_start[0], *zeros),
        view=(seen[0], *view[1:]),
    )


def _turned(second: Copy, dims: Sequence[int] | None) -> Copy:
    """`second` with the dimensions of the intermediate tensor permuted."""
    if dims is None:
        return second
    before = second.dims or tuple(range(len(dims)))
    return replace(
        second,
        start=tuple(second.start[dim] for dim in dims),
        size=tuple(second.size[dim] for dim in dims),
        stored_start=tuple(second.stored_start[dim] for dim in dims),
        dims=tuple(before[dim] for dim in dims),
    )
