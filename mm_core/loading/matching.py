"""Matching a run's initial weights with its task: names are compared before any tensor is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from mm_core.checkpoint.files.mismatch import Mismatch, size_text
from mm_core.config.sections import InitFromSection
from mm_core.errors import CheckpointError, PlanError, plural, some
from mm_core.loading.checkpoint_source import CheckpointSource
from mm_core.loading.mismatch import mismatch_error
from mm_core.modules.adapter_layers import adapter_of, base_name
from mm_core.modules.patterns import select_parameters
from mm_core.modules.tying import tied_names
from mm_core.runtime.ranks import Ranks
from mm_core.weights.adapters.files import is_adapter
from mm_core.weights.fingerprint import fingerprint
from mm_core.weights.fitting import (
    Fit,
    Formats,
    Piece,
    best_layout,
    candidate_layouts,
    conflicting_aliases,
    no_layout_error,
    with_ties_resolved,
)
from mm_core.weights.formats.format import StoredTensors
from mm_core.weights.formats.key_map import Shape, whole
from mm_core.weights.progress import byte_bar
from mm_core.weights.stored import TORCH_SUFFIXES, check_unscaled, open_stored
from mm_core.weights.streaming import overlap, shard_of, stream


class WeightMatch:
    """Weights files matched with a task, for `init_from` or for a component that names its files.

    Satisfies `WeightPlan`; create it on all ranks together.

    Args:
        init: the config section.
        state: parameters and buffers by path in the task, on any device.
        parts: components to fill, by their name in the task, on the meta device or not; weight formats
            inspect them. Without any, stored names are compared with paths in the task only.
        formats: weight formats to try, by qualified name.
        key: config key of the section, for errors.
        source_of_run: opens a checkpoint of mm_core.

    Attributes:
        ranks: those that read the files together.
        names: paths in the task that are filled.
        loaded: the same, without adapters: adapted layers have their plain names in files.
        missing: paths in the task without a stored tensor; they keep their random initialisation.
        unexpected: names in the source that the task does not have.
        skipped: paths in the task that the patterns leave out.
        formats: formats used to read the files; empty if stored names are paths in the task.
        conflicting_aliases: shared tensors that files contain twice, with different numbers: the stored name
            that is read, and the other one. Filled on the first rank only.

    Raises:
        PlanError: a pattern in `include` or `exclude` matches nothing, or nothing is left to read.
        CheckpointError: on all ranks: the weights cannot be read, shapes differ, or (with `strict`) one
            side lacks a name.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    formats: tuple[str, ...] = ()
    conflicting_aliases: tuple[tuple[str, str], ...] = ()

    def __init__(
        self,
        init: InitFromSection,
        state: Mapping[str, Tensor],
        parts: Mapping[str, nn.Module] | None = None,
        formats: Formats | None = None,
        key: str = "init_from",
        source_of_run: Callable[[Path, Literal["model", "ema"]], CheckpointSource] = CheckpointSource,
    ) -> None:
        self.init, self.key, self._open_run = init, key, source_of_run
        self._pieces: list[Piece] = []
        self._run: tuple[CheckpointSource, Mapping[str, str]] | None = None  # path in the task -> stored name
        names = {base_name(name): name for name in state}
        self._shapes = {name: tuple(state[own].shape) for name, own in names.items()}
        chosen = set(select_parameters(init.include, names, "init_from.include") if init.include else names)
        chosen -= set(select_parameters(init.exclude, names, "init_from.exclude"))
        if not chosen:
            raise PlanError(
                "every parameter is left out, so no weight would be read",
                where="init_from",
                hint="widen init_from.include, or narrow init_from.exclude",
            )
        self._chosen = chosen
        self.skipped = tuple(name for name in names if name not in chosen)
        self.ranks = Ranks.current()
        self.ranks.agree(f"reading {init.path}", lambda: self._find(parts or {}, formats or {}))
        self.names = [names[name] for name in self.loaded]

    @property
    def place(self) -> Path:
        """Path of the initial weights: the files, or the run's checkpoint folder."""
        return self._run[0].folder if self._run is not None else Path(self.init.path)

    def __str__(self) -> str:
        kinds = (("missing", self.missing), ("unexpected", self.unexpected), ("left out", self.skipped))
        parts = [f"{len(names)} {kind} ({some(names, 5)})" for kind, names in kinds if names]
        read_by = f" ({', '.join(self.formats)})" if self.formats else ""
        parts += [
            "the model shares one tensor for which the files contain two different ones"
            f" ({taken} is read, {left} is not)"
            for taken, left in self.conflicting_aliases
        ]
        return ", ".join([f"{plural(len(self.loaded), 'tensor')} loaded{read_by}", *parts])

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Reads initial weights into the task's tensors, cast to their dtype. Call it on all ranks.

        Args:
            state: tensors by path in the task: plain ones, or DTensors, of which each rank reads its shard.

        Raises:
            CheckpointError: on all ranks, if one of them cannot read.
        """
        ranks, doing = self.ranks, f"reading {self.init.path}"
        own = {base_name(name): tensor for name, tensor in state.items()}
        targets = {name: own[name] for name in self.loaded if name in own}
        if self._run is not None:
            source, origins = self._run
            stored = {origins[name]: tensor for name, tensor in targets.items()}
            ranks.agree(doing, source.verify)
            ranks.agree(doing, lambda: source.fill(stored))
            return
        ranks.agree(doing, lambda: self._stream(targets, ranks.rank == 0 and len(targets) > 1))

    def fingerprint(self, names: Collection[str]) -> str:
        """sha256 of the stored tensors behind these names; for a checkpoint, of its files' checksums.

        It needs no other rank.
        """
        if self._run is not None:
            return self._run[0].fingerprint()
        wanted = {base_name(name) for name in names}
        found = {(copy.component, copy.stored): held for copy, held in self._pieces}
        keys = sorted(key for key in found if key[0] in wanted)
        return fingerprint((stored, found[name, stored]) for name, stored in keys)

    def _stream(self, targets: Mapping[str, Tensor], shown: bool) -> None:
        places = {name: shard_of(tensor)[1] for name, tensor in targets.items()}
        total = 0
        pieces = [(copy, stored) for copy, stored in self._pieces if copy.component in targets]
        for copy, stored in pieces:
            if (box := overlap(copy, places[copy.component])) is not None:
                total += prod(part.stop - part.start for part in box) * stored.dtypes[copy.stored].itemsize
        with byte_bar(f"reading {self.init.path}", total, shown) as advance:
            stream(targets, pieces, advance)

    # -- matching ------------------------------------------------------------------------------

    def _find(self, parts: Mapping[str, nn.Module], formats: Formats) -> None:
        init, path = self.init, Path(self.init.path)
        if init.format is not None or not self._by_name_alone(path, parts, formats):
            if self._by_format(path, parts, formats):
                return
            if path.is_dir() and not any(path.glob("*.safetensors")):  # a format recognises it
                raise _of_another(path, parts, formats)
        source = _open(path, init, self._open_run)
        stored = renamed([*source.shapes, *source.others], init)
        chosen = (name for name in self._shapes if name in self._chosen)
        origins = {name: stored[name] for name in chosen if stored.get(name) in source.shapes}
        unexpected = [n for name, n in stored.items() if name not in self._shapes or n in source.others]
        shapes = {name: tuple(source.shapes[found]) for name, found in origins.items()}
        misshapen = {name: (self._shapes[name], s) for name, s in shapes.items() if s != self._shapes[name]}
        self._settle(origins, unexpected, misshapen, stored)
        if isinstance(source, CheckpointSource):
            self._run = source, origins
        else:
            self._pieces = [(whole(n, s, shapes[n]), source) for n, s in origins.items()]

    def _by_name_alone(self, path: Path, parts: Mapping[str, nn.Module], formats: Formats) -> bool:
        """Whether only names are compared: for our own checkpoints, renamed files, and no task."""
        init = self.init
        if not parts or init.prefixes or init.weights == "ema" or not path.exists():
            return True
        return path.is_dir() and not any(known.recognises(path) for known in formats.values())

    def _by_format(self, path: Path, parts: Mapping[str, nn.Module], formats: Formats) -> bool:
        """Finds the components' tensors by weight formats; False if stored names are paths in the task."""
        fits: dict[str, Fit] = {}
        for root, part in parts.items():
            own = [name for name in self._shapes if name.startswith(f"{root}.") and adapter_of(name) is None]
            if not any(name in self._chosen for name in own):
                continue
            tied = {base_name(other): base_name(first) for other, first in tied_names(part).items()}
            shapes = {name[len(root) + 1 :]: self._shapes[name] for name in own}
            shapes |= {other: shapes[first] for other, first in tied.items() if first in shapes}
            ways = candidate_layouts(path, root, part, shapes, formats)
            if ways:
                fits[root] = with_ties_resolved(best_layout(ways, path, root), tied)
        if self.init.format is not None and not fits:
            raise no_layout_error(path, ", ".join(parts), formats)
        found = sum(way.found for way in fits.values())
        if self.init.format is None:
            read = (held for way in fits.values() for held in way.sources)
            named = {name for held in read for name in held.shapes if name in self._shapes}
            if not found or len(named) > found:
                return False
        _check_apart(path, fits)
        self._take(fits)
        return True

    def _take(self, fits: Mapping[str, Fit]) -> None:
        """Keeps the copies of the chosen names."""
        pieces: list[Piece] = []
        unexpected: dict[str, None] = {}
        misshapen: dict[str, tuple[Shape, Shape]] = {}
        wanted = {(held.where, copy.stored) for way in fits.values() for copy, held in way.pieces}
        for root, way in fits.items():
            named = ((f"{root}.{copy.component}", copy, held) for copy, held in way.pieces)
            pieces += [(replace(copy, component=n), held) for n, copy, held in named if n in self._chosen]
            left = ((held, name) for held, name in way.unexpected if (held.where, name) not in wanted)
            unexpected |= dict.fromkeys(way.text(held, name) for held, name in left)
            wrong = ((f"{root}.{name}", shapes) for name, *shapes in way.misshapen)
            misshapen |= {name: (own, stored) for name, (own, stored) in wrong if name in self._chosen}
        spared = {f"{root}.{name}" for root, way in fits.items() for name in way.spared}
        absent = [folder for way in fits.values() for folder in way.absent]
        loaded, stored = {copy.component for copy, _ in pieces}, {name: name for name in unexpected}
        self._settle(loaded, list(unexpected), misshapen, stored, spared, absent)
        self._pieces = sorted(pieces, key=lambda piece: (str(piece[1].where), piece[0].stored))
        places = (" in ".join(filter(None, (way.format, _folders(way)))) for way in fits.values())
        self.formats = tuple(dict.fromkeys(places))
        if self.ranks.rank == 0:
            self.conflicting_aliases = tuple(
                pair for way in fits.values() for pair in conflicting_aliases(way)
            )

    def _settle(
        self,
        loaded: Collection[str],
        unexpected: list[str],
        misshapen: Mapping[str, tuple[Shape, Shape]],
        stored: Mapping[str, str],
        spared: Collection[str] = (),
        absent: Sequence[str] = (),
    ) -> None:
        """Keeps which names are read; raises an error if they do not fit or are quantised with scales.

        Args:
            loaded: paths in the task with a stored tensor.
            unexpected: names in the source that the task does not have.
            misshapen: path in the task -> its own and the stored shape.
            stored: stored names, by their path in the task.
            spared: paths in the task that may be missing.
            absent: folders of missing names that do not exist.
        """
        check_unscaled(unexpected, Path(self.init.path))
        self.loaded = tuple(name for name in self._shapes if name in loaded)
        self.missing = tuple(
            name
            for name in self._shapes
            if name in self._chosen
            and name not in loaded
            and name not in misshapen
            and adapter_of(name) is None
        )
        self.unexpected = tuple(unexpected)
        lacking = [name for name in self.missing if name not in spared]
        if misshapen or (self.init.strict and (lacking or unexpected)) or not loaded:
            wrong = [
                f"{name} ({size_text(found)} in the file, {size_text(own)} in the task)"
                for name, (own, found) in misshapen.items()
            ]
            raise mismatch_error(self.init, Mismatch(lacking, unexpected, wrong), stored, absent, self.key)


def _of_another(path: Path, parts: Mapping[str, nn.Module], formats: Formats) -> CheckpointError:
    """The error for a folder that formats recognise but that has none of the components."""
    known = [name for name, form in formats.items() if form.recognises(path)] or ["none"]
    return CheckpointError(
        f"none of this folder's weights belong to {' or '.join(map(repr, parts))}: it contains a different"
        " model",
        where=str(path),
        accepted="weights of the component that the config describes",
        hint=f"compare the names in `mm weights show {path}` with the config's model"
        f" (formats that recognise the folder: {', '.join(known)})",
    )


def _check_apart(path: Path, fits: Mapping[str, Fit]) -> None:
    """CheckpointError where two components would be read from the same tensors."""
    owners: dict[tuple[Path, str], str] = {}
    for root, way in fits.items():
        for copy, held in way.pieces:
            other = owners.setdefault((held.where, copy.stored), root)
            if other != root:
                raise CheckpointError(
                    f"{other!r} and {root!r} would both be read from {_folders(way) or 'the same file'}",
                    where=str(path),
                    hint="select one component with init_from.include, and give the other its own folder",
                )


def _folders(way: Fit) -> str:
    return " and ".join(filter(None, way.folders))


def _open(
    path: Path,
    init: InitFromSection,
    source_of_run: Callable[[Path, Literal["model", "ema"]], CheckpointSource],
) -> StoredTensors | CheckpointSource:
    """Opens weights whose names are paths in the task, or become so by `prefixes`."""
    if is_adapter(path):
        raise CheckpointError(
            "this is an adapter, not weights",
            where=str(path),
            hint="to start from an adapter, set train.adapters: [{from: ...}]",
        )
    of_files = path.is_file() and (path.suffix in {".safetensors", *TORCH_SUFFIXES} or path.suffix == ".json")
    if of_files or (path.is_dir() and any(path.glob("*.safetensors"))):
        if init.weights == "ema":
            raise CheckpointError(
                "weights: ema needs a checkpoint of mm_core: other files contain no average",
                where=str(path),
                hint="leave out init_from.weights",
            )
        return open_stored(path)
    if path.is_dir():
        return source_of_run(path, init.weights)
    raise CheckpointError(
        "this is not a weights file" if path.exists() else "there is no such file or folder",
        where=str(path),
        accepted="a run or checkpoint folder, a .safetensors file or a folder of them, "
        "or a .pt, .pth or .bin file of tensors",
        hint="set init_from.path",
    )


def renamed(stored: Collection[str], init: InitFromSection) -> dict[str, str]:
    """Stored weight names renamed by init_from.prefixes: path in the task -> stored name.

    The longest prefix that fits a name is replaced.

    Raises:
        CheckpointError: two stored names become the same path.
    """
    starts = sorted(init.prefixes, key=len, reverse=True)
    found: dict[str, str] = {}
    for name in stored:
        path = name
        for start in starts:
            head = start.rstrip(".")
            if not head or name == head or name.startswith(head + "."):
                tail = name[len(head) :].lstrip(".")
                path = ".".join(filter(None, (init.prefixes[start].rstrip("."), tail)))
                break
        path = base_name(path)
        if path in found:
            raise CheckpointError(
                f"{found[path]} and {name} would both become {path}",
                where=init.path,
                hint="change init_from.prefixes",
            )
        found[path] = name
    return found
