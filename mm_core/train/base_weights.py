"""Frozen weights that the checkpoints of a run leave to the files that they came from.

A run that trains adapters changes a hundredth of what it holds. Its checkpoints hold what it trains, and
say of the rest where it was read and what it was: that is read again when the run goes on, is sampled or
exported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from mm_core.config.load import load_config
from mm_core.config.schema import InitFromSection, RunConfig
from mm_core.contracts import Pretrained, WeightsFrom
from mm_core.errors import CheckpointError, MMError, TrustError
from mm_core.parallel.adapters import adapter_of
from mm_core.plan import build_task
from mm_core.plugin.registry import Registry, get_registry
from mm_core.train.adapter_runs import adapters_in
from mm_core.train.agreement import Ranks
from mm_core.train.checkpoint_dcp import stored_names
from mm_core.train.checkpoint_reading import find_checkpoint, read_run_manifest
from mm_core.train.warm_start import WarmStart
from mm_core.train.weight_sources import RunSource
from mm_core.weights.fitting import Formats, formats_of
from mm_core.weights.part_of import FormatOfPart

_RECIPE = ("format", "weights", "strict", "include", "exclude", "prefixes")


@dataclass(frozen=True)
class BaseWeights:
    """What a checkpoint leaves out: the names (paths in the task) that each of `starts` brings."""

    starts: tuple[tuple[WarmStart, frozenset[str]], ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """All that is left out."""
        return frozenset(name for _, names in self.starts for name in names)

    def rows(self, literals: Collection[str] = ()) -> list[dict[str, Any]]:
        """What a manifest says of it, a row for each place. Called by all ranks.

        literals: keys of the config that the environment sets; a place that it names is not written down.
        """
        rows: list[dict[str, Any]] = []
        for start, names in self.starts:
            secret = any(key.startswith(f"{start.key}.") for key in literals)
            recipe = {key: value for key, value in asdict(start.init).items() if key in _RECIPE}
            place = {"path": None if secret else str(start.place), "tensors": len(names)}
            rows.append({"key": start.key, **place, **recipe, "sha256": _contents(start, names)})
        return rows

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Reads what of it `state` names into its tensors. Called by all ranks."""
        for start, names in self.starts:
            if wanted := names.intersection(state):
                start.fill(state, wanted)


def starts_of(config: RunConfig, task: nn.Module) -> list[WarmStart]:
    """Where a run's weights begin, in the order in which they are read: the folders that the components
    name, and then `init_from`. task: on meta, since weight formats look at the components."""
    registry = get_registry(config.plugins.path)
    rows = [(f"task.{root}", _own(task, root)) for root in task.trainable]  # type: ignore[union-attr]
    found = [(key, init) for key, init in (*rows, ("init_from", config.init_from)) if init is not None]
    return [_start(key, init, task, registry, config.allow_code) for key, init in found]


def left_out(starts: Sequence[WarmStart], task: nn.Module, config: RunConfig) -> BaseWeights:
    """What the checkpoints of a run that begins leave out: all that stays as one of `starts` brings it.

    starts: whose `covers` has been called.
    """
    held = config.checkpoint.frozen
    if held or (held is None and not config.train.adapters):
        return BaseWeights()
    frozen = frozen_names(task)
    last = {name: start for start in starts for name in start.covered if name in frozen}
    owned = ((start, frozenset(n for n, owner in last.items() if owner is start)) for start in starts)
    return BaseWeights(tuple((start, names) for start, names in owned if names))


def frozen_names(task: nn.Module) -> set[str]:
    """Parameters of the trained components that no step changes, but for those of adapters."""
    roots: tuple[str, ...] = task.trainable  # type: ignore[assignment]
    return {
        name
        for root in roots
        for name, parameter in task.get_submodule(root).named_parameters(prefix=root)
        if not parameter.requires_grad and adapter_of(name) is None
    }


def recorded(
    checkpoint: Path, config: RunConfig, task: nn.Module, state: Mapping[str, Tensor]
) -> BaseWeights:
    """What a checkpoint has left out, found again. Called by all ranks.

    Args:
        checkpoint: of the run.
        config: of the run as it is now: places that have moved are found by it.
        task: with its adapters in place. state: its parameters and buffers, by path.

    Raises:
        CheckpointError: files that are gone, or hold other weights than they did.
    """
    rows = absent_rows(checkpoint)
    absent = set(state).intersection(frozen_names(task)) - stored_names(checkpoint, "model")
    if not rows or not absent:
        return BaseWeights()
    registry = get_registry(config.plugins.path)
    return _found(rows, absent, checkpoint, config, task, registry, state)


def open_run(path: Path, weights: Literal["model", "ema"], allow_code: bool = False) -> RunSource:
    """A checkpoint to begin with, together with what it has left out: its own task says where that goes.
    TrustError for code of that run that this user has not trained with, unless `allow_code`."""
    source = RunSource(path, weights)
    folder = find_checkpoint(path)
    if absent_rows(folder):
        config = load_config(folder / "config.yaml", stored=True, allow_code=allow_code)
        task = build_task(config, adapters_in(folder))
        roots: tuple[str, ...] = task.trainable  # type: ignore[assignment]
        state = {f"{root}.{n}": t for root in roots for n, t in task.get_submodule(root).state_dict().items()}
        source.join(recorded(folder, config, task, state), state)
    return source


# -- where it is now -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What a manifest says of frozen weights elsewhere. key: of the config, that named them. path: None where
    the environment named the place. recipe: how their names are matched."""

    key: str
    path: str | None
    tensors: int
    sha256: str
    recipe: Mapping[str, Any] = field(default_factory=dict)


def absent_rows(checkpoint: Path) -> list[Row]:
    """What a checkpoint leaves to other files, unchecked; [] for one that holds everything."""
    return [_row(row, checkpoint) for row in read_run_manifest(checkpoint).get("base") or ()]


def _row(row: Any, checkpoint: Path) -> Row:
    try:
        recipe = {key: row[key] for key in _RECIPE}
        recipe |= {key: tuple(map(str, row[key])) for key in ("include", "exclude")}
        recipe["prefixes"] = {str(key): str(value) for key, value in row["prefixes"].items()}
        path = None if row["path"] is None else str(row["path"])
        return Row(str(row["key"]), path, int(row["tensors"]), str(row["sha256"]), recipe)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(
            "what this checkpoint says of the weights below is not understood",
            where=str(checkpoint),
            hint="load it with the version of mm-core that wrote it, or a newer one",
        ) from None


def _found(
    rows: Sequence[Row],
    absent: set[str],
    checkpoint: Path,
    config: RunConfig,
    task: nn.Module,
    registry: Registry,
    state: Mapping[str, Tensor],
) -> BaseWeights:
    starts: list[tuple[WarmStart, frozenset[str]]] = []
    # Later places have had the last word: what they bring is theirs.
    for row in reversed(rows):
        faults = []
        for path in _places(row, config, task):
            init = InitFromSection(path=path, **row.recipe)
            start = _start(row.key, init, task, registry, config.allow_code)
            try:
                names = absent.intersection(start.covers(state))
                if not _unchanged(start, names, row):
                    raise CheckpointError("it holds other weights than it did", where=path)
            except TrustError:
                raise
            except MMError as fault:
                faults.append(fault)
                continue
            starts.insert(0, (start, frozenset(names)))
            absent = absent - names
            break
        else:
            raise _lost(row, checkpoint, faults)
    return BaseWeights(tuple(starts))


def _places(row: Row, config: RunConfig, task: nn.Module) -> list[str]:
    """Where the weights may be: as the checkpoint says, and as the config says now."""
    root = row.key.removeprefix("task.")
    own = config.init_from if row.key == "init_from" else _own(task, root)
    return list(dict.fromkeys(path for path in (row.path, own.path if own is not None else None) if path))


def _unchanged(start: WarmStart, names: Collection[str], row: Row) -> bool:
    return len(names) == row.tensors and _contents(start, names) == row.sha256


def _contents(start: WarmStart, names: Collection[str]) -> str:
    doing = f"reading {start.init.path}"
    return Ranks.current().first(doing, lambda: start.fingerprint(names))


def _lost(row: Row, checkpoint: Path, faults: Sequence[MMError]) -> CheckpointError:
    said = "; ".join(f"{fault.where}: {fault.what}" for fault in faults)
    return CheckpointError(
        f"this checkpoint leaves {row.tensors} frozen weights to {said or 'a place that no config names'}",
        where=str(checkpoint),
        accepted="the files that the run began with",
        hint=f"put them back, or have {row.key} name the place where they are; runs whose files may go set"
        " checkpoint.frozen: true",
    )


def _own(task: nn.Module, root: str) -> InitFromSection | None:
    """The files that a component names itself."""
    given = _given(task, root)
    if given is None:
        return None
    new = tuple(f"{root}.{path}" for path in given.new)
    return InitFromSection(path=given.path, format=given.format, include=(root,), exclude=new)


def _given(task: nn.Module, root: str) -> WeightsFrom | None:
    roots: tuple[str, ...] = task.trainable  # type: ignore[assignment]
    component = task.get_submodule(root) if root in roots else None
    return component.weights_from if isinstance(component, Pretrained) else None


def _start(
    key: str, init: InitFromSection, task: nn.Module, registry: Registry, allow_code: bool
) -> WarmStart:
    formats: Formats = formats_of(registry, init.format)
    roots = None if key == "init_from" else (key.removeprefix("task."),)
    for root in roots or ():
        if (given := _given(task, root)) is not None and given.part:
            component = task.get_submodule(root)
            formats = {name: FormatOfPart(one, root, component) for name, one in formats.items()}
    opener = partial(open_run, allow_code=allow_code)
    return WarmStart(init, task, formats, roots=roots, key=key, open_run=opener)
