"""Matching a run's initial weights with its task: names are compared before any tensor is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple

from torch import Tensor, nn

from mm_core.checkpoint.files.layout import listed
from mm_core.checkpoint.files.mismatch import Mismatch, size_text
from mm_core.config.sections import InitFromSection
from mm_core.errors import CheckpointError, PlanError, plural
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
    best_layout,
    candidate_layouts,
    conflicting_aliases,
    no_layout_error,
    with_ties_resolved,
)
from mm_core.weights.formats.format import StoredTensors
from mm_core.weights.formats.key_map import Copy, whole
from mm_core.weights.progress import byte_bar
from mm_core.weights.stored import TORCH_SUFFIXES, open_stored
from mm_core.weights.streaming import overlap, shard_of, stream

Pieces = list[tuple[Copy, StoredTensors]]


@dataclass(frozen=True)
class MatchReport:
    """The result of matching initial weights with a task, shown in the log.

    Attributes:
        loaded: paths in the task that are read.
        missing: paths in the task without a stored tensor; they keep their random initialisation.
        unexpected: names in the source that the task does not have.
        skipped: paths in the task that the patterns leave out.
        formats: formats used to read the files; empty if stored names are paths in the task.
        conflicting_aliases: shared tensors that files contain twice, with different numbers: the stored name
            that is read, and the other one. Filled on the first rank only.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    skipped: tuple[str, ...]
    formats: tuple[str, ...] = ()
    conflicting_aliases: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        kinds = (("missing", self.missing), ("unexpected", self.unexpected), ("left out", self.skipped))
        parts = [f"{len(names)} {kind} ({listed(list(names), 5)})" for kind, names in kinds if names]
        read_by = f" ({', '.join(self.formats)})" if self.formats else ""
        parts += [
            "the model shares one tensor for which the files contain two different ones"
            f" ({taken} is read, {left} is not)"
            for taken, left in self.conflicting_aliases
        ]
        return ", ".join([f"{plural(len(self.loaded), 'tensor')} loaded{read_by}", *parts])


class Found(NamedTuple):
    """Where the tensors are: pieces of files, or a checkpoint with path in the task -> stored name."""

    report: MatchReport
    pieces: Pieces
    run: tuple[CheckpointSource, Mapping[str, str]] | None = None


@dataclass(frozen=True, eq=False)
class MatchedWeights:
    """Initial weights that fit a task, found by a `WeightMatch`. Satisfies `WeightPlan`.

    Attributes:
        init: the config section of the match.
        key: config key of the section, for errors.
        names: paths in the task that are filled.
        found: where the tensors are, by the task's names without adapters.
    """

    init: InitFromSection
    key: str
    names: list[str]
    found: Found

    @property
    def place(self) -> Path:
        """Path of the initial weights: the files, or the run's checkpoint folder."""
        return self.found.run[0].folder if self.found.run is not None else Path(self.init.path)

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Reads initial weights into the task's tensors, cast to their dtype. Call it on all ranks.

        Args:
            state: tensors by path in the task: plain ones, or DTensors, of which each rank reads its shard.

        Raises:
            CheckpointError: on all ranks, if one of them cannot read.
        """
        ranks = Ranks.current()
        doing = f"reading {self.init.path}"
        own = {base_name(name): tensor for name, tensor in state.items()}
        targets = {name: own[name] for name in self.found.report.loaded if name in own}
        if self.found.run is not None:
            source, origins = self.found.run
            stored = {origins[name]: tensor for name, tensor in targets.items()}
            ranks.agree(doing, source.verify)
            ranks.agree(doing, lambda: source.fill(stored))
            return
        ranks.agree(doing, lambda: self._stream(targets, ranks.rank == 0 and len(targets) > 1))

    def fingerprint(self, names: Collection[str]) -> str:
        """sha256 of the stored tensors behind these names; for a checkpoint, of its files' checksums.

        It needs no other rank.
        """
        if self.found.run is not None:
            return self.found.run[0].fingerprint()
        wanted = {base_name(name) for name in names}
        found = {(copy.component, copy.stored): held for copy, held in self.found.pieces}
        keys = sorted(key for key in found if key[0] in wanted)
        return fingerprint((stored, found[name, stored]) for name, stored in keys)

    def _stream(self, targets: Mapping[str, Tensor], shown: bool) -> None:
        places = {name: shard_of(tensor)[1] for name, tensor in targets.items()}
        total = 0
        pieces = [(copy, stored) for copy, stored in self.found.pieces if copy.component in targets]
        for copy, stored in pieces:
            if (box := overlap(copy, places[copy.component])) is not None:
                total += prod(part.stop - part.start for part in box) * stored.dtypes[copy.stored].itemsize
        with byte_bar(f"reading {self.init.path}", total, shown) as advance:
            stream(targets, pieces, advance)


class WeightMatch:
    """The matching of weights files with a task, for `init_from` or for a component that names its files.

    Args:
        init: the config section.
        parts: components to fill, by their name in the task, on the meta device or not; weight formats
            inspect them. None compares stored names with paths in the task only.
        formats: weight formats to try, by qualified name.
        key: config key of the section, for errors.
        source_of_run: opens a checkpoint of mm_core.
    """

    def __init__(
        self,
        init: InitFromSection,
        parts: Mapping[str, nn.Module] | None = None,
        formats: Formats | None = None,
        key: str = "init_from",
        source_of_run: Callable[[Path, Literal["model", "ema"]], CheckpointSource] = CheckpointSource,
    ) -> None:
        self.init, self.key, self._open_run = init, key, source_of_run
        self._parts, self._formats = parts or {}, formats or {}
        self._tied = {
            root: {base_name(other): base_name(first) for other, first in tied_names(part).items()}
            for root, part in self._parts.items()
        }

    def covers(self, state: Mapping[str, Tensor]) -> MatchedWeights:
        """Compares a task's tensor names with those in the weights files. Call it on all ranks.

        Args:
            state: parameters and buffers by path in the task, on any device.

        Raises:
            PlanError: a pattern in `include` or `exclude` matches nothing, or nothing is left to read.
            CheckpointError: on all ranks: the weights cannot be read, shapes differ, or (with `strict`) one
                side lacks a name.
        """
        init = self.init
        names = {base_name(name): name for name in state}  # adapted layers have their plain names in files
        state = {name: state[own] for name, own in names.items()}
        chosen = set(select_parameters(init.include, state, "init_from.include") if init.include else state)
        chosen -= set(select_parameters(init.exclude, state, "init_from.exclude"))
        if not chosen:
            raise PlanError(
                "every parameter is left out, so no weight would be read",
                where="init_from",
                hint="widen init_from.include, or narrow init_from.exclude",
            )
        found = Ranks.current().agree(f"reading {init.path}", lambda: self._find(state, chosen))
        return MatchedWeights(init, self.key, [names[name] for name in found.report.loaded], found)

    def _find(self, state: Mapping[str, Tensor], chosen: Collection[str]) -> Found:
        init, path = self.init, Path(self.init.path)
        if init.format is not None or not self._by_name_alone(path):
            found = self._by_format(path, state, chosen)
            if found is not None:
                return found
            if path.is_dir() and not any(path.glob("*.safetensors")):  # a format recognises it
                raise self._of_another(path)
        source = _open(path, init, self._open_run)
        origins, report = _compare(init, source, state, chosen)
        if isinstance(source, CheckpointSource):
            return Found(report, [], (source, origins))
        return Found(report, [(whole(n, s, tuple(source.shapes[s])), source) for n, s in origins.items()])

    def _of_another(self, path: Path) -> CheckpointError:
        """The error for a folder that formats recognise but that has none of the components."""
        known = [name for name, form in self._formats.items() if form.recognises(path)] or ["none"]
        names = " or ".join(map(repr, self._parts))
        return CheckpointError(
            f"none of this folder's weights belong to {names}: it contains a different model",
            where=str(path),
            accepted="weights of the component that the config describes",
            hint=f"compare the names in `mm weights show {path}` with the config's model"
            f" (formats that recognise the folder: {', '.join(known)})",
        )

    def _by_name_alone(self, path: Path) -> bool:
        """Whether only names are compared: for our own checkpoints, renamed files, and no task."""
        init = self.init
        if not self._parts or init.prefixes or init.weights == "ema" or not path.exists():
            return True
        return path.is_dir() and not any(known.recognises(path) for known in self._formats.values())

    def _by_format(self, path: Path, state: Mapping[str, Tensor], chosen: Collection[str]) -> Found | None:
        """Finds the components' tensors by weight formats; None if stored names are paths in the task."""
        init = self.init
        fits: dict[str, Fit] = {}
        for root, part in self._parts.items():
            own = [name for name in state if name.startswith(f"{root}.") and adapter_of(name) is None]
            if not any(name in chosen for name in own):
                continue
            shapes = {name[len(root) + 1 :]: tuple(state[name].shape) for name in own}
            shapes |= {other: shapes[first] for other, first in self._tied[root].items() if first in shapes}
            ways = candidate_layouts(path, root, part, shapes, self._formats)
            if ways:
                fits[root] = with_ties_resolved(best_layout(ways, path, root), self._tied[root])
        if init.format is not None and not fits:
            raise no_layout_error(path, ", ".join(self._parts), self._formats)
        found = sum(way.found for way in fits.values())
        if init.format is None:
            named = {s for way in fits.values() for held in way.sources for s in held.shapes if s in state}
            if not found or len(named) > found:
                return None
        _check_apart(path, fits)
        return self._settle(fits, state, chosen)

    def _settle(self, fits: Mapping[str, Fit], state: Mapping[str, Tensor], chosen: Collection[str]) -> Found:
        """The copies of the chosen names; raises an error if they do not fit."""
        init, pieces = self.init, Pieces()
        loaded: dict[str, None] = {}
        unexpected: dict[str, None] = {}
        misshapen: list[str] = []
        wanted = {(held.where, copy.stored) for way in fits.values() for copy, held in way.pieces}
        for root, way in fits.items():
            for copy, held in way.pieces:
                if (name := f"{root}.{copy.component}") in chosen:
                    loaded[name] = None
                    pieces.append((replace(copy, component=name), held))
            left = ((held, name) for held, name in way.unexpected if (held.where, name) not in wanted)
            unexpected |= dict.fromkeys(way.text(held, name) for held, name in left)
            misshapen += [
                f"{root}.{name} ({size_text(stored)} in the file, {size_text(own)} in the task)"
                for name, own, stored in way.misshapen
                if f"{root}.{name}" in chosen
            ]
        wrong = {text.partition(" ")[0] for text in misshapen}
        missing = [
            name
            for name in state
            if name in chosen and name not in loaded and name not in wrong and adapter_of(name) is None
        ]
        spared = {f"{root}.{name}" for root, way in fits.items() for name in way.spared}
        lacking = [name for name in missing if name not in spared]
        if misshapen or (init.strict and (lacking or unexpected)) or not loaded:
            absent = [folder for way in fits.values() for folder in way.absent]
            mismatch = Mismatch(lacking, list(unexpected), misshapen)
            raise mismatch_error(init, mismatch, {name: name for name in unexpected}, absent, self.key)
        pieces.sort(key=lambda piece: (str(piece[1].where), piece[0].stored))
        skipped = tuple(name for name in state if name not in chosen)
        names = tuple(name for name in state if name in loaded)
        places = (" in ".join(filter(None, (way.format, _folders(way)))) for way in fits.values())
        kinds = tuple(dict.fromkeys(places))
        first = Ranks.current().rank == 0
        pairs = tuple(pair for way in fits.values() for pair in (conflicting_aliases(way) if first else ()))
        return Found(MatchReport(names, tuple(missing), tuple(unexpected), skipped, kinds, pairs), pieces)


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


def _compare(
    init: InitFromSection,
    source: StoredTensors | CheckpointSource,
    parameters: Mapping[str, Tensor],
    chosen: Collection[str],
) -> tuple[dict[str, str], MatchReport]:
    """(path in the task -> stored name) of the tensors to read, and the report."""
    stored = renamed([*source.shapes, *source.others], init)
    origins = {
        name: stored[name] for name in parameters if name in chosen and stored.get(name) in source.shapes
    }
    missing = [
        name for name in parameters if name in chosen and name not in origins and adapter_of(name) is None
    ]
    unexpected = [found for name, found in stored.items() if name not in parameters or found in source.others]
    misshapen = [
        f"{name} ({size_text(stored_shape)} in the file, {size_text(parameters[name].shape)} in the task)"
        for name, found in origins.items()
        if (stored_shape := tuple(source.shapes[found])) != tuple(parameters[name].shape)
    ]
    if misshapen or (init.strict and (missing or unexpected)) or not origins:
        raise mismatch_error(init, Mismatch(missing, unexpected, misshapen), stored)
    skipped = tuple(name for name in parameters if name not in chosen)
    return origins, MatchReport(tuple(origins), tuple(missing), tuple(unexpected), skipped)


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
