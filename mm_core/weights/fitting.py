"""Finding the weight format of files, and where each tensor of a component is in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

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
"""A box of a component's tensor, and the files it is read from."""


def formats_of(registry: Registry, only: str | None = None) -> dict[str, WeightFormat]:
    """The weight formats of all plugins by qualified name; those of the core come last.

    Args:
        registry: the plugins' components.
        only: return just the format of this name.

    Raises:
        PluginError: no format has this name, or a plugin's format cannot be imported.
    """
    if only is not None:
        found = registry.resolve("weight_format", only)
        return {found.qualified: found.load_target()()}
    known = sorted(registry.components("weight_format"), key=lambda entry: entry.namespace == "core")
    return {entry.qualified: entry.load_target()() for entry in known}


@dataclass(frozen=True)
class Fit:
    """One way to read a component's weights from files.

    Attributes:
        format: qualified name of the weight format.
        folders: folders below the path that are read; ("",) for the path itself.
        pieces: which box is read from which file.
        missing: the component's names without a tensor in the files.
        unexpected: stored names that the component does not use, with the files they are in.
        misshapen: the component's name, the shape expected in the file, and the shape found there.
        absent: folders of the component's parts that do not exist.
        spared: names in absent parts that are optional; they are not in `missing`.
        twins: for each shared tensor that files contain several times, the pieces read and not read.
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
        """How many stored tensors with the right shape this layout reads: the best layout reads most."""
        return len({(stored.where, copy.stored) for copy, stored in self.pieces})

    @property
    def whole(self) -> bool:
        """Whether files and component fit: nothing is missing, left over or misshapen."""
        return not (self.missing or self.unexpected or self.misshapen)

    @property
    def sources(self) -> list[StoredTensors]:
        """The weights files that this layout reads, each once."""
        read = [*(stored for _, stored in self.pieces), *(stored for stored, _ in self.unexpected)]
        return list({stored.where: stored for stored in read}.values())

    def text(self, stored: StoredTensors, name: str) -> str:
        """A stored tensor's name for messages, with its folder where several folders are read."""
        return f"{stored.where.name}/{name}" if len(self.folders) > 1 else name


def fit(keys: KeyMap, shapes: Mapping[str, Sequence[int]], stored: StoredTensors) -> Fit:
    """Matches a component's tensors with the tensors in weights files, by a key map.

    A tensor shared by several names (tied weights) is read once: see `with_ties_resolved`.
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
    """Every way to read a component's weights from a file or folder by known weight formats, best first.

    Args:
        path: file or folder to read.
        name: the component's name in its task.
        component: may be on the meta device.
        shapes: shapes of the component's tensors, by its own names.
        formats: weight formats to try.

    Raises:
        CheckpointError: damaged or hostile files; no code in them has run.
    """
    ways: list[Fit] = []
    seen: dict[Path, StoredTensors] = {}
    faults: list[MMError] = []
    with without_adapters(component):  # formats work on the component without adapter layers
        for label, known in formats.items():
            lone = path.is_file()  # it does not show its format: any map that fits its names will do
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
    # Among folders that fit equally well, prefer the one named like the component.
    return sorted(ways, key=lambda way: (-way.found, way.folders != (name,), len(way.unexpected)))


def _places(
    path: Path, layouts: Sequence[Layout], folders: Sequence[str]
) -> Iterator[tuple[str | None, ...]]:
    """The folders that the layouts could be read from together; None for an absent part."""
    if len(layouts) == 1:
        own = layouts[0].folder
        yield from ((folder,) for folder in ([own] if own in folders else folders))
        return
    # The folder or file of a single part is recognised by name: several parts may have the same shapes.
    home = path.name if path.is_dir() else path.parent.name
    alone = {home: ""} if list(folders) == [""] else {}
    known = alone | {folder: folder for folder in folders if folder}
    places = tuple(known.get(layout.folder) for layout in layouts)
    if any(place is not None for place in places):
        yield places


def _fit_parts(
    layouts: Sequence[Layout], shapes: Mapping[str, Sequence[int]], opened: Sequence[StoredTensors | None]
) -> Fit:
    """Matches a component with the files of its parts; None in `opened` stands for an absent part."""
    ways: list[Fit] = []
    for layout, names, stored in zip(layouts, divided(layouts, shapes), opened, strict=True):
        if stored is not None:
            ways.append(_fit_layout(layout, {name: shapes[name] for name in names}, stored))
        elif layout.optional:
            ways.append(Fit(spared=tuple(names)))
        else:
            ways.append(Fit(missing=tuple(names), absent=(layout.folder,)))
    joined: dict[str, Any] = {
        field: tuple(chain.from_iterable(getattr(way, field) for way in ways))
        for field in ("pieces", "missing", "unexpected", "misshapen", "absent", "spared")
    }
    return Fit(**joined)


def _fit_layout(layout: Layout, shapes: Mapping[str, Sequence[int]], stored: StoredTensors) -> Fit:
    """Matches by the map used for writing; if that leaves tensors over, tries the map for other files."""
    way = fit(layout.keys, shapes, stored)
    if layout.reading is None or not (way.unexpected or way.misshapen):
        return way
    try:
        other = fit(replace(layout.reading(stored), prefix=layout.keys.prefix), shapes, stored)
    except ContractError:
        return way  # it shows where the files differ
    return other if other.found > way.found else way


def best_layout(ways: Sequence[Fit], path: Path, name: str) -> Fit:
    """The best way to read a component's weights, out of `candidate_layouts`.

    Raises:
        CheckpointError: several folders fit equally well and none is named like the component: two models of
            one architecture contain different numbers.
    """
    best = ways[0]
    # Another format that fits as well does not count: the first may know the folder, the other only guesses.
    of_best = (way for way in ways if way.format == best.format)
    alike = list(dict.fromkeys(way.folders for way in of_best if way.found == best.found))
    if len(alike) > 1 and best.folders != (name,):
        raise CheckpointError(
            f"the weights of {name!r} could be in any of these folders:"
            f" {', '.join(' and '.join(folders) for folders in alike)}",
            where=str(path),
            hint="add one of these folders to the path",
        )
    return best


def with_ties_resolved(way: Fit, tied: Mapping[str, str]) -> Fit:
    """A way to read weights in which each shared tensor (tied weights) of a component is read once.

    If files contain the tensor under several of its names, one is read; under only one, that one is.

    Args:
        way: found for the shapes of all names.
        tied: further name -> the name that is filled.
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
    """Tied weights that files contain several times with different numbers: (name read, name not read).

    Raises:
        CheckpointError: a file cannot be read; both tensors are read to compare them.
    """
    return [
        (way.text(taken[0][1], taken[0][0].stored), way.text(passed[0][1], passed[0][0].stored))
        for taken, passed in way.twins
        if not all(_alike(one, other) for one in taken for other in passed)
    ]


def _alike(one: Piece, other: Piece) -> bool:
    """Whether two pieces contain the same numbers where they overlap."""
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
    """The error for a file or folder from which no weight format can read a component."""
    return CheckpointError(
        f"no weight format can read {component!r} from this {'file' if path.is_file() else 'folder'}"
        if path.exists()
        else "there is no such file or folder",
        where=str(path),
        accepted=f"files in one of these formats: {', '.join(formats) or 'none (no plugin has a format)'}",
    )
