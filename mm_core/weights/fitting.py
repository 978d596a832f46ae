"""Which format files are in, and where each tensor of a component lies in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from mm_core.errors import CheckpointError, ContractError, MMError
from mm_core.plugin.registry import Registry
from mm_core.weights.format import StoredTensors, WeightFormat
from mm_core.weights.key_map import Copy, KeyMap
from mm_core.weights.stored import open_stored

Formats = Mapping[str, WeightFormat]


def formats_of(registry: Registry, only: str | None = None) -> dict[str, WeightFormat]:
    """The weight formats of all plugins by qualified name, those of other plugins before the core's; or
    one of them.

    Raises PluginError for a name that no format has, or a plugin whose format can not be imported.
    """
    if only is not None:
        found = registry.resolve("weight_format", only)
        return {found.qualified: found.load_target()()}
    known = sorted(registry.components("weight_format"), key=lambda entry: entry.namespace == "core")
    return {entry.qualified: entry.load_target()() for entry in known}


@dataclass(frozen=True)
class Fit:
    """One way to read a component.

    format: its qualified name. folder: below the path. copies: what would be read. missing: the
    component's names that have no tensor there. unexpected: stored names that nothing asks for. misshapen:
    the component's name, its shape as it would be stored, and the shape that is stored.
    """

    format: str
    folder: str
    stored: StoredTensors
    copies: tuple[Copy, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = field(default=())

    @property
    def found(self) -> int:
        """How many stored tensors are asked for, of the right shape: what ways are compared by."""
        return len({copy.stored for copy in self.copies})

    @property
    def whole(self) -> bool:
        """Whether nothing is missing, left over or misshapen."""
        return not (self.missing or self.unexpected or self.misshapen)


def fit(keys: KeyMap, shapes: Mapping[str, Sequence[int]], stored: StoredTensors) -> Fit:
    """How a component of these shapes lies in stored tensors, by a key map.

    A tensor that several names share (tied weights) is asked for once: see `untied`.
    """
    copies = keys.copies(shapes)
    absent = {copy.component for copy in copies if copy.stored not in stored.shapes}
    misshapen = {
        copy.component: (copy.component, copy.stored_shape, tuple(stored.shapes[copy.stored]))
        for copy in copies
        if copy.stored in stored.shapes and tuple(stored.shapes[copy.stored]) != copy.stored_shape
    }
    wanted = {copy.stored for copy in copies}
    return Fit(
        "",
        "",
        stored,
        tuple(c for c in copies if c.component not in absent and c.component not in misshapen),
        tuple(name for name in shapes if name in absent),
        tuple(n for n in (*stored.shapes, *stored.others) if n not in wanted and not keys.ignores(n)),
        tuple(misshapen.values()),
    )


def ways_to_read(
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
    for label, known in formats.items():
        # A single file tells no format: whatever map fits its names will do.
        lone = path.is_file()
        if not lone and not known.recognises(path):
            continue
        layout = known.layout(name, component)
        if layout is None:
            continue
        folders = [""] if lone else known.folders(path)
        for folder in [layout.folder] if layout.folder in folders else folders:
            place = path / folder if folder else path
            try:
                if place not in seen:
                    seen[place] = open_stored(path) if lone else known.open(path, folder)
                ways.append(replace(fit(layout.keys, shapes, seen[place]), format=label, folder=folder))
            except ContractError as fault:  # a map for another shape of model
                faults.append(fault)
    if not ways and faults:
        raise faults[0]
    # Of folders that fit alike, the one that is called as the component is.
    return sorted(ways, key=lambda way: (-way.found, way.folder != name, len(way.unexpected)))


def best_way(ways: Sequence[Fit], path: Path, name: str) -> Fit:
    """The best of `ways_to_read`.

    Raises CheckpointError where several folders fit alike and none is called as the component is: two models
    of one architecture hold other numbers.
    """
    best = ways[0]
    alike = list(dict.fromkeys(way.folder for way in ways if way.found == best.found))
    if len(alike) > 1 and best.folder != name:
        raise CheckpointError(
            f"{name!r} could be read from any of these folders: {', '.join(alike)}",
            where=str(path),
            hint="name one of them in the path",
        )
    return best


def untied(way: Fit, tied: Mapping[str, str]) -> Fit:
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
    by_name: dict[str, list[Copy]] = {}
    for copy in way.copies:
        by_name.setdefault(copy.component, []).append(copy)
    missing = set(way.missing)
    for first, names in groups.items():
        present = sorted(name for name in names if name in by_name)
        chosen = first if first in present else (present[0] if present else None)
        copies = [replace(copy, component=first) for copy in by_name.get(chosen or "", ())]
        for name in names:
            by_name.pop(name, None)
        if chosen is not None:
            by_name[first] = copies
            missing -= names
        else:
            missing -= names - {first}
    kept = tuple(copy for copies in by_name.values() for copy in copies)
    return replace(way, copies=kept, missing=tuple(name for name in way.missing if name in missing))


def no_way(path: Path, component: str, formats: Iterable[str]) -> CheckpointError:
    """The error where no format can read a component from `path`."""
    return CheckpointError(
        f"no weight format reads {component!r} from this {'file' if path.is_file() else 'folder'}"
        if path.exists()
        else "there is no such file or folder",
        where=str(path),
        accepted=f"what one of these reads: {', '.join(formats)}",
    )
