"""Key maps: how a component's tensors are named, split and transposed in a file, in both directions.

A `KeyMap` is a list of rules over name templates. `{i}` in a template stands for one part of a dotted
name, `{rest...}` for one or more; text matched by a brace on one side is inserted on the other side. The
first rule that matches a name applies; a name without a rule is stored unchanged. From the component's
shapes alone a map derives which box of a stored tensor is which box of a component's tensor. So a shard is
read without the full tensor, and a file is written without a model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from mm_core.errors import ContractError, plural

Shape = tuple[int, ...]
Box = tuple[slice, ...]

WHERE = "key map of the weight format"
"""The place in error messages about key maps."""

_BRACE = re.compile(r"\{(\w+)(\.\.\.)?\}")


@dataclass(frozen=True)
class Copy:
    """A box of a component's tensor, and the box of a stored tensor with the same numbers.

    The stored tensor is first viewed as `view` (if given: with ones before its dimensions, or with the same
    first dimension and others after it), then its dimensions are put in the order `dims`. The numbers from
    `stored_start` on are then those from `start` on in the component's tensor.

    Attributes:
        component: name of the component's tensor.
        start: first index of the box in the component's tensor.
        size: shape of the box in the component's tensor.
        stored: name of the stored tensor.
        stored_shape: shape of the full stored tensor, as in the file.
        stored_start: first index of the box in the stored tensor, after `view` and `dims`.
        dims: order of the stored tensor's dimensions; None leaves them as they are.
        view: shape to view the stored tensor in; None for its own.
    """

    component: str
    start: Shape
    size: Shape
    stored: str
    stored_shape: Shape
    stored_start: Shape
    dims: Shape | None = None
    view: Shape | None = None


@dataclass(frozen=True)
class Rename:
    """Key-map rule: one tensor is stored under a different name."""

    component: str
    stored: str


@dataclass(frozen=True)
class Transpose:
    """Key-map rule: one tensor is stored permuted; stored.permute(dims) is the component's tensor."""

    component: str
    stored: str
    dims: tuple[int, ...] = (1, 0)


@dataclass(frozen=True)
class Reshape:
    """Key-map rule: one tensor is stored in a different shape with the same first dimension.

    An example is a convolution that is computed as a matrix.

    Attributes:
        component: template of the component's name.
        stored: template of the stored name.
        shape: the stored shape without the first dimension.
    """

    component: str
    stored: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Fuse:
    """Key-map rule: several tensors of the component are stored as one, side by side along `dim`."""

    components: tuple[str, ...]
    stored: str
    dim: int = 0


@dataclass(frozen=True)
class Split:
    """Key-map rule: one tensor of the component is stored as several, split along `dim`.

    The parts are equal, or have the lengths `sizes`.
    """

    component: str
    stored: tuple[str, ...]
    dim: int = 0
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Stack:
    """Key-map rule: the slices of one tensor's first dimension are stored one by one, as for experts.

    `{index}` in the stored names counts the slices from 0. With several stored names, each slice is split
    along `dim` of the slice; in equal parts, or in the lengths `sizes`.
    """

    component: str
    stored: tuple[str, ...]
    dim: int = 0
    sizes: tuple[int, ...] | None = None
    index: str = "e"


Rule = Rename | Transpose | Reshape | Fuse | Split | Stack


class Template:
    """A template of a key map's tensor names: `{i}` is one part of a name, `{rest...}` one or more."""

    def __init__(self, text: str) -> None:
        self.text = text
        start, *rest = _BRACE.split(text)
        self.names = rest[::3]
        expression = re.escape(start)
        for name, dots, literal in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
            expression += f"(?P<{name}>{'.+' if dots else '[^.]+'}){re.escape(literal)}"
        self._expression = re.compile(expression + r"\Z")

    def match(self, name: str) -> dict[str, str] | None:
        """The texts that a tensor name has in place of the template's braces; None if it does not match."""
        found = self._expression.match(name)
        return found.groupdict() if found else None

    def fill(self, values: Mapping[str, str]) -> str:
        """The tensor name with `values` inserted for the template's braces."""
        return _BRACE.sub(lambda found: values[found[1]], self.text)


@dataclass(frozen=True)
class KeyMap:
    """A key map: the rules between a component's tensor names and those in a weights file.

    Args:
        rules: the first rule that matches a name applies.
        prefix: start of every name of the component that stored names lack ("transformer." for a component
            that wraps a model under that name).
        ignored: templates of stored names that the component does not need (tables that it computes).
        placed: name in the component, without the prefix -> its copies, for places found by other means
            (`mm_core.weights.formats.traced`); they take precedence over the rules.

    Raises:
        ContractError: a rule whose sides do not have the same braces.
    """

    rules: tuple[Rule, ...] = ()
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    placed: Mapping[str, tuple[Copy, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rule in self.rules:
            ours, theirs = _component_sides(rule), _stored_sides(rule)
            counted = {rule.index} if isinstance(rule, Stack) else set()
            names = {frozenset(Template(side).names) | counted for side in ours}
            names |= {frozenset(Template(side).names) for side in theirs}
            if len(names) > 1 or len(set(ours)) < len(ours) or len(set(theirs)) < len(theirs):
                raise ContractError(
                    f"the sides of {rule} do not have the same braces, or contain a name twice",
                    accepted="the same {names} in the templates of all sides; a Stack's index in the stored",
                )

    @cached_property
    def _by_component(self) -> list[tuple[Rule, Template]]:
        return [(rule, Template(side)) for rule in self.rules for side in _component_sides(rule)]

    @cached_property
    def _ignored(self) -> list[Template]:
        return [Template(text) for text in self.ignored]

    def ignores(self, stored: str) -> bool:
        """Whether the component does not need a tensor of this stored name."""
        return any(template.match(stored) is not None for template in self._ignored)

    def renamed(self, name: str) -> str | None:
        """The stored name of a component's tensor that the key map only renames; None for any other."""
        bare = name.removeprefix(self.prefix)
        if bare in self.placed:
            found = self.placed[bare]
            return found[0].stored if found == (whole(bare, found[0].stored, found[0].size),) else None
        for rule, template in self._by_component:
            values = template.match(bare)
            if values is not None:
                return Template(rule.stored).fill(values) if isinstance(rule, Rename) else None
        return bare

    def copies(self, shapes: Mapping[str, Sequence[int]]) -> list[Copy]:
        """The copies between a component's tensors and those of a weights file, in the order of `shapes`.

        Every number of the component and of the stored tensors occurs once.

        Args:
            shapes: shapes of all the component's tensors, by name.

        Raises:
            ContractError: parts of a fused tensor are missing or do not fit, a name lacks the prefix, or two
                tensors would get one stored name.
        """
        found: list[Copy] = []
        done: set[str] = set()
        for name in shapes:
            if name not in done:
                copies = self._of(name, shapes)
                done |= {copy.component for copy in copies}
                found += copies
        volumes: Counter[str] = Counter()
        for copy in found:
            volumes[copy.stored] += prod(copy.size)
        for copy in found:
            if prod(copy.stored_shape) != volumes[copy.stored]:
                raise ContractError(
                    f"two tensors of the component would be stored as {copy.stored!r}",
                    where=WHERE,
                    hint="give each tensor its own stored name in the rules of the key map",
                )
        return found

    def stored_shapes(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, Shape]:
        """The shape of every tensor in a weights file, computed from the component's shapes."""
        return {copy.stored: copy.stored_shape for copy in self.copies(shapes)}

    def _of(self, name: str, shapes: Mapping[str, Sequence[int]]) -> list[Copy]:
        if not name.startswith(self.prefix):
            raise ContractError(
                f"the tensor {name!r} cannot be renamed: only names that begin with {self.prefix!r} can",
                where=WHERE,
                hint="correct the prefix of the key map",
            )
        if (bare := name[len(self.prefix) :]) in self.placed:
            return self._placed(bare, name, tuple(shapes[name]))
        for rule, template in self._by_component:
            values = template.match(bare)
            if values is not None:
                return self._copies_of(rule, values, name, shapes)
        return [whole(name, bare, tuple(shapes[name]))]

    def _placed(self, bare: str, name: str, shape: Shape) -> list[Copy]:
        copies = self.placed[bare]
        ends = [tuple(s + n for s, n in zip(copy.start, copy.size, strict=True)) for copy in copies]
        if shape != tuple(max(sizes) for sizes in zip(*ends, strict=True)):
            raise ContractError(
                f"this key map was made for a different shape of {name!r} than {list(shape)}",
                where=WHERE,
                hint="use the sizes of the model that the key map was made for, or make the key map again",
            )
        return [replace(copy, component=name) for copy in copies]

    def _copies_of(
        self, rule: Rule, values: Mapping[str, str], name: str, shapes: Mapping[str, Sequence[int]]
    ) -> list[Copy]:
        shape = tuple(shapes[name])
        if isinstance(rule, Fuse):
            return self._fuse(rule, values, shapes)
        if isinstance(rule, Split):
            return _split(rule, values, name, shape)
        if isinstance(rule, Stack):
            return _stack(rule, values, name, shape)
        entire = whole(name, Template(rule.stored).fill(values), shape)
        if isinstance(rule, Transpose):
            if sorted(rule.dims) != list(range(len(shape))):
                raise ContractError(
                    f"the rule {rule} does not fit {name!r} of {len(shape)} dimensions",
                    where=WHERE,
                    hint="correct dims of the rule: it must contain the number of each dimension once",
                )
            stored = tuple(shape[rule.dims.index(dim)] for dim in range(len(shape)))
            return [replace(entire, stored_shape=stored, dims=rule.dims)]
        if isinstance(rule, Reshape):
            if prod(shape[1:]) != prod(rule.shape):
                raise ContractError(
                    f"the rule {rule} does not fit {name!r} of shape {list(shape)}",
                    where=WHERE,
                    accepted=f"a shape of {plural(prod(shape[1:]), 'number')} in the rule",
                )
            return [replace(entire, stored_shape=(shape[0], *rule.shape), view=shape)]
        return [entire]

    def _fuse(self, rule: Fuse, values: Mapping[str, str], shapes: Mapping[str, Sequence[int]]) -> list[Copy]:
        names = [self.prefix + Template(text).fill(values) for text in rule.components]
        if absent := [name for name in names if name not in shapes]:
            raise ContractError(
                f"{absent[0]!r} is missing: it is stored together with {names[0]!r}",
                where=WHERE,
                hint="add the tensor to the component, or correct the Fuse rule of the key map",
            )
        parts = [tuple(shapes[name]) for name in names]
        rests = {part[: rule.dim] + part[rule.dim + 1 :] for part in parts}
        if len(rests) > 1 or not 0 <= rule.dim < len(parts[0]):
            shown = ", ".join(str(list(part)) for part in parts)
            raise ContractError(
                f"{', '.join(names)} do not fit side by side along dimension {rule.dim}: their shapes are"
                f" {shown}",
                where=WHERE,
                hint="correct dim of the Fuse rule: the shapes may differ only in that dimension",
            )
        entire = list(parts[0])
        entire[rule.dim] = sum(part[rule.dim] for part in parts)
        stored, begin, copies = Template(rule.stored).fill(values), 0, []
        for name, part in zip(names, parts, strict=True):
            start = tuple(begin if d == rule.dim else 0 for d in range(len(part)))
            copies.append(Copy(name, (0,) * len(part), part, stored, tuple(entire), start))
            begin += part[rule.dim]
        return copies


def _split(rule: Split | Stack, values: Mapping[str, str], name: str, shape: Shape) -> list[Copy]:
    count, length = len(rule.stored), shape[rule.dim] if 0 <= rule.dim < len(shape) else -1
    sizes = rule.sizes or (length // count,) * count
    if len(sizes) != count or sum(sizes) != length or min(sizes) < 1:
        raise ContractError(
            f"the rule {rule} does not fit {name!r} of shape {list(shape)}",
            where=WHERE,
            hint="correct dim or sizes of the rule: one size per stored name, with the sum of that dimension",
        )
    begin, copies = 0, []
    for text, size in zip(rule.stored, sizes, strict=True):
        start = tuple(begin if d == rule.dim else 0 for d in range(len(shape)))
        part = tuple(size if d == rule.dim else n for d, n in enumerate(shape))
        copies.append(Copy(name, start, part, Template(text).fill(values), part, (0,) * len(shape)))
        begin += size
    return copies


def _stack(rule: Stack, values: Mapping[str, str], name: str, shape: Shape) -> list[Copy]:
    if len(shape) < 2:
        raise ContractError(
            f"the rule {rule} does not fit {name!r} of shape {list(shape)}",
            where=WHERE,
            accepted="tensors of at least 2 dimensions",
            hint="narrow the rule's pattern, so that it does not match this tensor",
        )
    return [
        replace(
            copy,
            start=(number, *copy.start),
            size=(1, *copy.size),
            stored_start=(0, *copy.stored_start),
            view=(1, *copy.stored_shape),
        )
        for number in range(shape[0])
        for copy in _split(rule, {**values, rule.index: str(number)}, name, shape[1:])
    ]


def box_of(start: Shape, size: Shape) -> Box:
    """The box of a tensor, as slices, from its start and size."""
    return tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))


def whole(component: str, stored: str, shape: Shape) -> Copy:
    """The copy for a component's tensor that a weights file contains unchanged."""
    zeros = (0,) * len(shape)
    return Copy(component, zeros, shape, stored, shape, zeros)


def _component_sides(rule: Rule) -> tuple[str, ...]:
    return rule.components if isinstance(rule, Fuse) else (rule.component,)


def _stored_sides(rule: Rule) -> tuple[str, ...]:
    return rule.stored if isinstance(rule, Split | Stack) else (rule.stored,)
