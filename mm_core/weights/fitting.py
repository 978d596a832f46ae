"""Which format files are in, and where each tensor of a component lies in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from mm_core.errors import CheckpointError, ContractError, MMError
from mm_core.modules.adapter_layers import without_adapters
from mm_core.plugin.registry import Registry
from mm_core.weights.formats.format import Layout, StoredTensors, WeightFormat, divided, of_component
from mm_core.weights.formats.key_map import Copy, KeyMap, Shape, box_of
from mm_core.weights.stored import open_stored
from mm_core.weights.streaming import chunks, overlap, read_box

Formats = Mapping[str, WeightFormat]

Piece = tuple[Copy, StoredTensors]
"""A box of a component's tensor, and what it is read from."""


def formats_of(registry: Registry, only: str | None = None) -> dict[str, WeightFormat]:
    """The weight formats of all plugins by qualified name, those of other plugins before the core's; or
    one of them.

    Raises PluginError for a name that no format has, or a plugin whose format cannot be imported.
    """
    if only is not None:
        found = registry.resolve("weight_format", only)
        return {found.qualified: found.load_target()()}
    known = sorted(registry.components("weight_format"), key=lambda entry: entry.namespace == "core")
    return {entry.qualified: entry.load_target()() for entry in known}


@dataclass(frozen=True)
class Fit:
    """One way to read a component.

    format: its qualified name. folders: below the path, that are read; [""] for the path itself. pieces:
    what would be read from where. missing: the component's names that have no tensor there. unexpected:
    stored names that nothing asks for, with where they are. misshapen: the component's name, its shape as
    it would be stored, and the shape that is stored. absent: folders of the component's parts that are not
    there. spared: names of absent parts that files may lack; they are not among `missing`. twins: of a
    tensor that the component shares and files hold several times, what is read and what is not.
    """

    format: str = ""
    folders: tuple[str, ...] = ()
    pieces: tuple[Piece, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[tuple[StoredTensors, str], ...] = ()
    misshapen: tuple[tuple[str, Shape, Shape], ...] = ()
    absent: tuple[str, ...] = ()
    spared: tuple[str, ...] = ()
    twins: tuple[tuple[tuple[Piece, ...], tuple[Piece, ...]], ...] = ()

    @property
    def found(self) -> int:
        """How many stored tensors are asked for, of the right shape: what ways are compared by."""
        return len({(stored.where, copy.stored) for copy, stored in self.pieces})

    @property
    def whole(self) -> bool:
        """Whether nothing is missing, left over or misshapen."""
        return not (self.missing or self.unexpected or self.misshapen)

    @property
    def sources(self) -> list[StoredTensors]:
        """What is read, each once."""
        read = [*(stored for _, stored in self.pieces), *(stored for stored, _ in self.unexpected)]
        return list({stored.where: stored for stored in read}.values())

    def text(self, stored: StoredTensors, name: str) -> str:
        """A stored name, with its folder where several are read."""
        return f"{stored.where.name}/{name}" if len(self.folders) > 1 else name


def fit(keys: KeyMap, shapes: Mapping[str, Sequence[int]], stored: StoredTensors) -> Fit:
    """How a component of these shapes lies in stored tensors, by a key map.

    A tensor that several names share (tied weights) is asked for once: see `with_ties_resolved`.
    """
    copies = keys.copies(shapes)
    absent = {copy.component for copy in copies if copy.stored not in stored.shapes}
    misshapen = {
        copy.component: (copy.component, copy.stored_shape, tuple(stored.shapes[copy.stored]))
        for copy in copies
        if copy.stored in stored.shapes and tuple(stored.shapes[copy.stored]) != copy.stored_shape
    }
    wanted = {copy.stored for copy in copies}
    left = (n for n in (*stored.shapes, *stored.others) if n not in wanted and not keys.ignores(n))
    return Fit(
        folders=("",),
        pieces=tuple((c, stored) for c in copies if c.component not in absent | misshapen.keys()),
        missing=tuple(name for name in shapes if name in absent),
        unexpected=tuple((stored, name) for name in left),
        misshapen=tuple(misshapen.values()),
    )


def candidate_layouts(
    path: Path, name: str, component: nn.Module, shapes: Mapping[str, Sequence[int]], formats: Formats
) -> list[Fit]:
    """Every way that `formats` know to read a component from a file or folder, the best first.

    Args:
        path: what is to be read.
        name: of the component in its task. component: may be on the meta device.
        shapes: of its tensors, by its own names.
        formats: to be tried.

    Raises:
        CheckpointError: damaged or hostile files; nothing of them has run.
    """
    ways: list[Fit] = []
    seen: dict[Path, StoredTensors] = {}
    faults: list[MMError] = []
    with without_adapters(component):  # a format knows what its author wrote
        for label, known in formats.items():
            lone = path.is_file()  # which tells no format: whatever map fits its names will do
            if not lone and not known.recognises(path):
                continue
            try:
                layouts = of_component(known.layout(name, component))
            except ContractError as fault:  # a model that the format has no map for
                faults.append(fault)
                continue
            folders = [""] if lone else known.folders(path)
            for places in _places(path, layouts, folders):
                found = tuple(folder for folder in places if folder is not None)
                for folder in found:
                    if path / folder not in seen:
                        seen[path / folder] = open_stored(path) if lone else known.open(path, folder)
                opened = [None if folder is None else seen[path / folder] for folder in places]
                try:
                    way = _fit_parts(layouts, shapes, opened)
                except ContractError as fault:  # a map for another shape of model
                    faults.append(fault)
                    continue
                ways.append(replace(way, format=label, folders=found))
    if not ways and faults:
        raise faults[0]
    # Of folders that fit alike, the one that is called as the component is.
    return sorted(ways, key=lambda way: (-way.found, way.folders != (name,), len(way.unexpected)))


def _places(
    path: Path, layouts: Sequence[Layout], folders: Sequence[str]
) -> Iterator[tuple[str | None, ...]]:
    """The folders that the layouts could be read from together; None for a part that is not there."""
    if len(layouts) == 1:
        own = layouts[0].folder
        yield from ((folder,) for folder in ([own] if own in folders else folders))
        return
    # The folder or file of one part alone is known by its name: the parts may well be of one shape.
    home = path.name if path.is_dir() else path.parent.name
    alone = {home: ""} if list(folders) == [""] else {}
    known = alone | {folder: folder for folder in folders if folder}
    places = tuple(known.get(layout.folder) for layout in layouts)
    if any(place is not None for place in places):
        yield places


def _fit_parts(
    layouts: Sequence[Layout], shapes: Mapping[str, Sequence[int]], opened: Sequence[StoredTensors | None]
) -> Fit:
    """How a component lies in the files of its parts; None for those of a part that is not there."""
    ways: list[Fit] = []
    for layout, names, stored in zip(layouts, divided(layouts, shapes), opened, strict=True):
        if stored is not None:
            ways.append(_fit_layout(layout, {name: shapes[name] for name in names}, stored))
        elif layout.optional:
            ways.append(Fit(spared=tuple(names)))
        else:
            ways.append(Fit(missing=tuple(names), absent=(layout.folder,)))
    return Fit(
        pieces=tuple(piece for way in ways for piece in way.pieces),
        missing=tuple(name for way in ways for name in way.missing),
        unexpected=tuple(name for way in ways for name in way.unexpected),
        misshapen=tuple(name for way in ways for name in way.misshapen),
        absent=tuple(folder for way in ways for folder in way.absent),
        spared=tuple(name for way in ways for name in way.spared),
    )


def _fit_layout(layout: Layout, shapes: Mapping[str, Sequence[int]], stored: StoredTensors) -> Fit:
    """By the map that files are written by or, where that leaves something over, the one for others."""
    way = fit(layout.keys, shapes, stored)
    if layout.reading is None or not (way.unexpected or way.misshapen):
        return way
    try:
        other = fit(replace(layout.reading(stored), prefix=layout.keys.prefix), shapes, stored)
    except ContractError:
        return way  # which says in what the files differ
    return other if other.found > way.found else way


def best_layout(ways: Sequence[Fit], path: Path, name: str) -> Fit:
    """The best of `candidate_layouts`.

    Raises CheckpointError where several folders fit alike and none is called as the component is: two models
    of one architecture hold other numbers.
    """
    best = ways[0]
    # Another format that fits as well has no say: the first may know the folder, where that one only guesses.
    of_best = (way for way in ways if way.format == best.format)
    alike = list(dict.fromkeys(way.folders for way in of_best if way.found == best.found))
    if len(alike) > 1 and best.folders != (name,):
        raise CheckpointError(
            f"{name!r} could be read from any of these folders:"
            f" {', '.join(' and '.join(folders) for folders in alike)}",
            where=str(path),
            hint="name one of them in the path",
        )
    return best


def with_ties_resolved(way: Fit, tied: Mapping[str, str]) -> Fit:
    """The same for a component in which several names share a tensor.

    Args:
        way: found for the shapes of all names.
        tied: further name -> the name that is filled.

    What is stored under several of the names is read once; under one of them, that one serves.
    """
    if not tied:
        return way
    groups: dict[str, set[str]] = {}
    for other, first in tied.items():
        groups.setdefault(first, {first}).add(other)
    by_name: dict[str, list[Piece]] = {}
    for copy, stored in way.pieces:
        by_name.setdefault(copy.component, []).append((copy, stored))
    missing = set(way.missing)
    twins: list[tuple[tuple[Piece, ...], tuple[Piece, ...]]] = []
    for first, names in groups.items():
        present = {name: by_name.pop(name) for name in sorted(names) if name in by_name}
        if not present:
            missing -= names - {first}
            continue
        chosen = first if first in present else next(iter(present))
        taken = tuple(present.pop(chosen))
        twins += [(taken, tuple(pieces)) for pieces in present.values()]
        by_name[first] = [(replace(copy, component=first), stored) for copy, stored in taken]
        missing -= names
    kept = tuple(piece for pieces in by_name.values() for piece in pieces)
    left = tuple(name for name in way.missing if name in missing)
    return replace(way, pieces=kept, missing=left, twins=tuple(twins))


def conflicting_aliases(way: Fit) -> list[tuple[str, str]]:
    """Of the tensors that a component shares and files hold several times: the stored name that is read,
    and one that is not and holds other numbers. Reads both. CheckpointError as of reading."""
    return [
        (way.text(taken[0][1], taken[0][0].stored), way.text(passed[0][1], passed[0][0].stored))
        for taken, passed in way.twins
        if not all(_alike(one, other) for one in taken for other in passed)
    ]


def _alike(one: Piece, other: Piece) -> bool:
    """Whether two pieces hold the same numbers where they meet."""
    (copy, stored), (second, beside) = one, other
    if (region := overlap(second, box_of(copy.start, copy.size))) is None:
        return True
    width = max(stored.dtypes[copy.stored].itemsize, beside.dtypes[second.stored].itemsize)
    for box in chunks(region, width):
        first, last = read_box(copy, stored, box), read_box(second, beside, box)
        if first.dtype != last.dtype:
            first, last = first.float(), last.float()
        if not torch.equal(first, last):
            return False
    return True


def no_layout_error(path: Path, component: str, formats: Iterable[str]) -> CheckpointError:
    """The error where no format can read a component from `path`."""
    return CheckpointError(
        f"no weight format reads {component!r} from this {'file' if path.is_file() else 'folder'}"
        if path.exists()
        else "there is no such file or folder",
        where=str(path),
        accepted=f"what one of these reads: {', '.join(formats) or 'none, no plugin offers a format'}",
    )
