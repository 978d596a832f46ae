"""Listing and comparing weights files: `mm weights show` and `mm weights diff`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from mm_core.checkpoint.reading import checkpoint_at, find_checkpoint
from mm_core.config.load import load_config
from mm_core.errors import CheckpointError, plural
from mm_core.loading.checkpoint_source import CheckpointSource
from mm_core.modules.adapter_layers import adapter_of, base_name
from mm_core.modules.tying import tied_names
from mm_core.plan import build_task
from mm_core.plugin.registry import Registry, get_registry
from mm_core.weights.adapters.files import is_adapter
from mm_core.weights.adapters.inject import linear_layers
from mm_core.weights.adapters.locate import locate
from mm_core.weights.fitting import candidate_layouts, formats_of, with_ties_resolved
from mm_core.weights.formats.format import StoredTensors
from mm_core.weights.formats.key_map import box_of
from mm_core.weights.stored import SafetensorsFiles, open_stored
from mm_core.weights.streaming import chunks
from mm_core.weights.writing import TensorSpec


@dataclass(frozen=True)
class Contents:
    """The weights at a path, for `mm weights show`.

    Attributes:
        path: the file or folder.
        formats: qualified names of the weight formats that recognise it; `checkpoint` for mm_core's own.
        tensors: all tensors.
        fits: sentences on how each component of a config can read it.
        absent: sentences on frozen weights that the checkpoint does not store.
        texts: metadata in the headers of safetensors files.
    """

    path: Path
    formats: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    fits: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)


def contents(path: Path, config: Path | None = None, allow_code: bool = False) -> Contents:
    """Lists the weights in a file, folder, run or checkpoint from headers only; no code in it runs.

    Args:
        path: weights, an adapter, a run or one of its checkpoints.
        config: config of a run whose components are compared with the files.
        allow_code: run code that a stored run's config names even if this user has not trained with it.

    Raises:
        CheckpointError: no weights, or damaged or hostile ones.
    """
    registry = get_registry()
    opened = dict(open_weights(path, registry))
    tensors = tuple(
        _listed(f"{place}{name}", stored, name) for place, stored in opened.items() for name in stored.shapes
    )
    if runs := [stored for stored in opened.values() if isinstance(stored, CheckpointSource)]:
        unsaid = "a path set by the environment"
        rows = runs[0].checkpoint.external
        absent = tuple(
            f"{plural(r.tensors, 'frozen tensor')} of {r.key}, read from {r.path or unsaid}" for r in rows
        )
        return Contents(path, ("checkpoint",), tensors, absent=absent)
    known = tuple(name for name, form in formats_of(registry).items() if form.recognises(path))
    texts: dict[str, str] = {}
    for stored in opened.values():
        texts |= stored.metadata() if isinstance(stored, SafetensorsFiles) else {}
    fits = tuple(_fits(path, config, allow_code)) if config else ()
    return Contents(path, known, tensors, fits, texts=texts)


def _listed(title: str, stored: StoredTensors | CheckpointSource, name: str) -> TensorSpec:
    return TensorSpec(title, stored.dtypes[name], tuple(stored.shapes[name]))


def _fits(path: Path, config: Path, allow_code: bool) -> Iterator[str]:
    run = load_config(config, allow_code=allow_code, fetch="configs")
    registry = run.registry
    task = build_task(run)
    if is_adapter(path):
        linear = {root: linear_layers(task.get_submodule(root)) for root in task.trainable}
        found = locate(task, str(path), linear, formats_of(registry))
        yield f"{found.root}: an adapter for {len(found.modules)} of its modules"
        return
    for root in task.trainable:
        component = task.get_submodule(root)
        state = component.state_dict().items()
        shapes = {base_name(name): tuple(t.shape) for name, t in state if adapter_of(name) is None}
        tied = {base_name(other): base_name(first) for other, first in tied_names(component).items()}
        ways = candidate_layouts(path, root, component, shapes, formats_of(registry))
        if not ways or not ways[0].found:
            yield f"{root} ({type(component).__name__}): no"
            continue
        way = with_ties_resolved(ways[0], tied)
        faults = (("missing", way.missing), ("unexpected", way.unexpected), ("misshapen", way.misshapen))
        words = [f"{len(names)} {kind}" for kind, names in faults if names]
        verdict = "yes, completely" if way.whole else f"{plural(way.found, 'tensor')}; {', '.join(words)}"
        yield f"{root} ({type(component).__name__}) by {way.format}: {verdict}"


def open_weights(path: Path, registry: Registry) -> Iterator[tuple[str, StoredTensors | CheckpointSource]]:
    """Opens the weights at a path: (prefix for names, tensors) for each model of a pipeline, else one pair.

    Args:
        path: a file or folder of weights, a run, a checkpoint, or `RUN@STEP`.
        registry: all weight formats.
    """
    if "@" in path.name and not path.exists():
        path = checkpoint_at(path)
    forms = [form for form in formats_of(registry).values() if path.is_dir() and form.recognises(path)]
    for form in forms:
        if folders := [name for name in form.folders(path) if name]:
            yield from ((f"{folder}/", form.open(path, folder)) for folder in folders)
            return
    if forms:
        yield "", forms[0].open(path)
    elif path.is_dir() and not any(path.glob("*.safetensors")):
        yield "", CheckpointSource(find_checkpoint(path), "model")
    else:
        yield "", open_stored(path)


# -- differences ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorDifference:
    """The difference of one tensor that both weights files contain in the same shape.

    Attributes:
        name: the tensor's name.
        norms: L2 norm on each side.
        largest: largest absolute difference (float64).
        at: index of the first number that differs, and the number on each side.
    """

    name: str
    norms: tuple[float, float]
    largest: float
    at: tuple[tuple[int, ...], float, float]


@dataclass(frozen=True)
class Differences:
    """The differences between two weights files, folders or checkpoints.

    Attributes:
        same: names of equal tensors.
        only: names that only the first or only the second side has.
        shaped: tensors with different shapes: name and both shapes.
        changed: tensors with different numbers.
        dtypes: tensors with different dtypes: name and both dtypes.
    """

    same: tuple[str, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    shaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    changed: tuple[TensorDifference, ...]
    dtypes: tuple[tuple[str, torch.dtype, torch.dtype], ...]

    @property
    def none(self) -> bool:
        """Whether both sides contain the same weights under the same names."""
        return not (any(self.only) or self.shaped or self.changed)


def differences(first: Path, second: Path) -> Differences:
    """Compares the weights at two paths tensor by tensor, by name; values, not dtypes.

    If no names match, a checkpoint's names are compared without the component's name.

    Raises:
        CheckpointError: a side that cannot be read.
    """
    registry = get_registry()
    sides = [_Side(path, registry) for path in (first, second)]
    if sides[0].tensors().keys().isdisjoint(sides[1].tensors()):
        for side in sides:
            side.bare()
    one, two = (side.tensors() for side in sides)
    both = [name for name in one if name in two]
    alike = [name for name in both if one[name].shape == two[name].shape]
    found = {name: _tensor_difference(name, *sides) for name in alike}
    return Differences(
        same=tuple(name for name, difference in found.items() if difference is None),
        only=(tuple(name for name in one if name not in two), tuple(name for name in two if name not in one)),
        shaped=tuple((n, one[n].shape, two[n].shape) for n in both if n not in found),
        changed=tuple(difference for difference in found.values() if difference is not None),
        dtypes=tuple((n, one[n].dtype, two[n].dtype) for n in both if one[n].dtype != two[n].dtype),
    )


class _Side:
    """Weights by name, from files or a checkpoint."""

    def __init__(self, path: Path, registry: Registry) -> None:
        self._places: dict[str, tuple[StoredTensors | CheckpointSource, str]] = {}
        for place, stored in open_weights(path, registry):
            if isinstance(stored, CheckpointSource):
                stored.verify()
            self._places |= {f"{place}{name}": (stored, name) for name in stored.shapes}
        if not self._places:
            raise CheckpointError(
                "there are no tensors here", where=str(path), accepted="weights files or a checkpoint"
            )

    def tensors(self) -> dict[str, TensorSpec]:
        return {title: _listed(title, stored, name) for title, (stored, name) in self._places.items()}

    def bare(self) -> None:
        """Shortens a checkpoint's names to those in weights files: without component and adapter layers."""
        for name, (stored, _) in list(self._places.items()):
            if isinstance(stored, CheckpointSource):
                self._places[base_name(name).partition(".")[2]] = self._places.pop(name)

    def slabs(self, name: str) -> Iterator[Tensor]:
        """Reads a tensor of the weights some rows at a time."""
        stored, own = self._places[name]
        tensor = _listed(name, stored, own)
        boxes = chunks(box_of((0,) * len(tensor.shape), tensor.shape), torch.float64.itemsize)
        if isinstance(stored, CheckpointSource):
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            stored.fill({own: whole})
            yield from (whole[box] for box in boxes)
        else:
            yield from (stored.read(own, box) for box in boxes)


def _tensor_difference(name: str, first: _Side, second: _Side) -> TensorDifference | None:
    squares, largest, at, row = [0.0, 0.0], 0.0, None, 0
    for ours, theirs in zip(first.slabs(name), second.slabs(name), strict=True):
        a, b = ours.to(torch.float64), theirs.to(torch.float64)
        squares = [squares[0] + float((a * a).sum()), squares[1] + float((b * b).sum())]
        other = ~((a == b) | (a.isnan() & b.isnan()))
        if bool(other.any()):
            gap = (a - b)[other].abs()
            largest = max(largest, float(gap.nan_to_num(nan=float("inf")).max()))
            if at is None:
                place = tuple(int(i) for i in other.nonzero()[0].tolist())
                at = ((place[0] + row, *place[1:]) if place else (), float(a[place]), float(b[place]))
        row += ours.shape[0] if ours.dim() else 0
    return None if at is None else TensorDifference(name, (squares[0] ** 0.5, squares[1] ** 0.5), largest, at)


def folded(tensors: Sequence[TensorSpec]) -> list[tuple[str, TensorSpec, int]]:
    """Groups tensors of a weights file whose names differ only in numbers: (name with {*}, one, count)."""
    groups: dict[tuple[str, tuple[int, ...], torch.dtype], list[TensorSpec]] = {}
    for tensor in tensors:
        key = re.sub(r"(?<=\.)\d+(?=\.|\Z)|\A\d+(?=\.)", "{*}", tensor.name)
        groups.setdefault((key, tensor.shape, tensor.dtype), []).append(tensor)
    return [(key[0] if len(held) > 1 else held[0].name, held[0], len(held)) for key, held in groups.items()]
