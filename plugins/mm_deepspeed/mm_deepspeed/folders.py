"""Folders that DeepSpeed scripts saved (ZeRO stages 0 to 3), read without deepspeed. No code in them runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mm_core.contracts import TaskModule
from mm_core.errors import CheckpointError, plural
from mm_core.weights import (
    AdapterLayout,
    Companions,
    KeyMap,
    Layout,
    Rename,
    StoredTensors,
    Written,
)
from mm_deepspeed.saved_files import MIXED, MODEL, Saved, read_saved, refused

_COMPARED = 64
"""Numbers of each piece of a master that are compared with the weights: a page of each file."""


class DeepSpeedFolders:
    """The weight format of folders that a DeepSpeed script saved: float32 masters, by the module's names."""

    def recognises(self, path: Path) -> bool:
        """Whether a folder has files of model states, or the one that its `latest` names, or one beside."""
        try:
            return _has_models(_step(path)) or ((path / "latest").is_file() and bool(_steps(path)))
        except (OSError, ValueError):
            return False

    def folders(self, path: Path) -> Sequence[str]:
        """The folders with weights: always [""], the path itself."""
        return [""]

    def open(self, path: Path, folder: str = "") -> StoredTensors:
        """Opens the masters of a folder of DeepSpeed; what has none comes as it was trained with.

        Raises:
            CheckpointError: a file of a rank is missing or damaged, or contains other things than tensors;
                files of two saves are mixed; or the model is split by tensors, pipeline stages or experts.
        """
        where = _step(path / folder)
        if not where.is_dir() and (steps := _steps(path / folder)):
            here = f"is not here, but {', '.join(steps[:8])} {'is' if len(steps) == 1 else 'are'}"
            raise refused(
                path / folder, f"`latest` names {where.name}, which {here}", "name the folder of a step"
            )
        return _Masters(where)

    def layout(self, name: str, component: nn.Module) -> Layout:
        """Any component by its own names, or by these below one prefix (`model.`). It is only read."""
        own = tuple(component.state_dict())
        return Layout(reading=lambda stored: _below_prefix(own, stored), read_only=True)

    def adapter(self, name: str, component: nn.Module) -> AdapterLayout | None:
        """Adapters are not read from such folders: None."""
        return None

    def companions(self, task: TaskModule, written: Sequence[Written]) -> Companions:
        """Further files of an export: none."""
        return Companions()


def example(folder: Path) -> nn.Module:
    """A model for the conformance tests of the format."""
    return nn.Linear(2, 3)


def _below_prefix(own: Sequence[str], stored: StoredTensors) -> KeyMap:
    """Renames to the prefix under which most of a component's names are stored, if there is one."""
    ends = (found.removesuffix(own[0]) for found in stored.shapes if own and found.endswith(f".{own[0]}"))
    plain = [prefix for prefix in ends if "{" not in prefix]
    best = max(plain, key=lambda prefix: sum(prefix + name in stored.shapes for name in own), default="")
    return KeyMap((Rename("{name...}", best + "{name...}"),))


def _step(path: Path) -> Path:
    """The folder of a step: the path itself, or the one that its file `latest` names."""
    latest = path / "latest"
    if not latest.is_file() or latest.stat().st_size > 1000:
        return path
    tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    named = path / tag if tag and Path(tag).name == tag and tag != ".." else path
    return named if named.is_dir() or not _has_models(path) else path


def _steps(path: Path) -> list[str]:
    """Names of the folders in a folder that have files of model states."""
    return sorted(inner.name for inner in path.iterdir() if _has_models(inner))


def _has_models(path: Path) -> bool:
    return path.is_dir() and any(MODEL.fullmatch(file.name) for file in path.iterdir())


@dataclass(frozen=True)
class _Flat:
    """A tensor whose numbers are those of flat pieces, one after the other; the last may be padded."""

    shape: tuple[int, ...]
    pieces: tuple[Tensor, ...]

    def rows(self, first: int, last: int) -> Tensor:
        """Rows of the tensor, [last - first, ...]; only pieces that contain them are read."""
        width, found, at = prod(self.shape[1:]), [], 0
        for piece in self.pieces:
            low, high = max(first * width - at, 0), min(last * width - at, piece.numel())
            found += [piece[low:high]] if low < high else []
            at += piece.numel()
        flat = found[0] if len(found) == 1 else torch.cat(found or [self.pieces[0][:0]])
        return flat.view(last - first, *self.shape[1:])

    def rounds_to(self, whole: Tensor) -> bool:
        """Whether the first numbers of each piece, in a flat tensor's dtype, are those of that tensor."""
        at = 0
        for piece in self.pieces:
            part = piece[:_COMPARED].to(whole.dtype).double()
            there = whole[at : at + part.numel()].double()
            if not torch.allclose(part, there, rtol=0, atol=0, equal_nan=True):
                return False
            at += piece.numel()
        return True


class _Masters:
    """Tensors in a DeepSpeed folder, by the module's names; files are mapped, and a tensor is joined when
    it is read."""

    others: Sequence[str] = ()

    def __init__(self, where: Path) -> None:
        self.where = where
        try:
            self._tensors = self._found()
        except CheckpointError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as fault:
            what = f"the files are not as DeepSpeed writes them ({type(fault).__name__}: {str(fault)[:100]})"
            raise refused(where, what, "") from None
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.dtypes = {name: tensor.pieces[0].dtype for name, tensor in self._tensors.items()}

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """A box of a tensor of a DeepSpeed folder, joined from the files of the ranks."""
        tensor = self._tensors[name]
        if not tensor.shape:
            return tensor.pieces[0][:1].view(())
        first, last, _ = (box[0] if box else slice(None)).indices(tensor.shape[0])
        return tensor.rows(first, max(first, last))[(slice(None), *box[1:])]

    def _found(self) -> dict[str, _Flat]:
        """Where each tensor is, by name without `module.`."""
        saved = read_saved(self.where)
        model = saved.models[0]
        found = {
            name: _whole(tensor) for name, tensor in model["module"].items() if isinstance(tensor, Tensor)
        }
        if saved.stage:
            masters = _masters(saved)
            self._check_masters(saved, masters, found)
            if saved.stage == 3:
                found = {name: tensor for name, tensor in found.items() if name in model["buffer_names"]}
                found |= _frozen(saved.models)
            found |= masters
            for other, first in (model.get("shared_params") or {}).items():
                found |= {other: found[first]} if first in found else {}
        wrapped = all(name.startswith("module.") for name in found)
        return {name.removeprefix("module.") if wrapped else name: t for name, t in found.items()}

    def _check_masters(self, saved: Saved, masters: Mapping[str, _Flat], model: Mapping[str, _Flat]) -> None:
        """CheckpointError where the masters are not of the step of the model states.

        Up to stage 2 these contain the masters in the script's dtype. At stage 3 the numbers of steps decide.
        """
        kept = [name for name in masters if name in model and model[name].shape == masters[name].shape]
        for name in kept:
            if not masters[name].rounds_to(model[name].pieces[0]):
                what = f"{name} in the optimizer states is not the one in the model states"
                raise refused(self.where, f"files of two saves are mixed: {what}")
        if not kept and saved.steps and saved.steps[0] != saved.steps[1]:
            there, steps = saved.steps
            raise refused(
                self.where,
                f"the model states are of step {there:.0f}, but the optimizer states of step {steps:.0f}",
                f"{MIXED}; if the run went on without its optimizer states, join them with zero_to_fp32.py",
            )


def _masters(saved: Saved) -> dict[str, _Flat]:
    """The float32 masters of trained parameters, from the parts of the ranks."""
    groups = saved.models[0]["param_shapes"]
    if saved.stage == 3:
        return _by_parameter(groups, [state["fp32_flat_groups"] for state in saved.optimizers])
    parts = [state["single_partition_of_fp32_groups"] for state in saved.optimizers]
    return _by_group(groups, parts, saved.optimizers[0].get("param_alignment_paddings"))


def _whole(tensor: Tensor) -> _Flat:
    return _Flat(tuple(tensor.shape), (_numbers(tensor).reshape(-1),))


def _numbers(tensor: Tensor) -> Tensor:
    """A tensor of a file. ValueError for one that has no dense numbers, which a file can contain too."""
    if tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided:
        raise ValueError("a tensor without dense numbers")
    return tensor.detach()


def _shape(found: Sequence[int]) -> tuple[int, ...]:
    """The shape of a tensor in a file. An error for what is none: torch judges it, and allocates nothing."""
    return tuple(torch.empty(tuple(found), device="meta").shape)


def _by_group(
    groups: Sequence[Mapping[str, Sequence[int]]],
    partitions: Sequence[Sequence[Tensor]],
    paddings: Sequence[Sequence[int]] | None,
) -> dict[str, _Flat]:
    """Masters of stages 1 and 2, whose ranks have one part of each group's flat vector."""
    found = {}
    paddings = [[0] * len(shapes) for shapes in groups] if paddings is None else paddings
    flat = [[_numbers(part) for part in parts] for parts in zip(*partitions, strict=True)]
    for shapes, parts, gaps in zip(groups, flat, paddings, strict=True):
        at = 0
        for (name, size), gap in zip(shapes.items(), gaps, strict=True):
            shape = _shape(size)
            found[name] = _Flat(shape, _cut(parts, at, prod(shape)))
            at += prod(shape) + _shape([gap])[0]
        _check_used(at, parts, 2 * len(parts))  # DeepSpeed fills up to twice the ranks
    return found


def _by_parameter(
    groups: Sequence[Mapping[str, Sequence[int]]], partitions: Sequence[Sequence[Tensor]]
) -> dict[str, _Flat]:
    """Masters of stage 3, whose ranks have an equal part of each parameter."""
    found, at = {}, 0
    ranks = [[_numbers(part) for part in parts] for parts in partitions]
    for name, found_shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
        shape = _shape(found_shape)
        size = -(-prod(shape) // len(ranks))
        pieces = [piece for rank in ranks for piece in _cut(rank, at, size)]
        found[name] = _Flat(shape, _cut(pieces, 0, prod(shape)))
        at += size
    for parts in ranks:
        _check_used(at, parts)
    return found


def _frozen(states: Sequence[Mapping[str, Any]]) -> dict[str, _Flat]:
    """Parameters of stage 3 that are not trained: each rank has an equal part of them."""
    found = {}
    for name, size in (states[0].get("frozen_param_shapes") or {}).items():
        shape = _shape(size)
        parts = [_numbers(state["frozen_param_fragments"][name]).reshape(-1) for state in states]
        found[name] = _Flat(shape, _cut(parts, 0, prod(shape)))
        for part in parts:
            _check_used(-(-prod(shape) // len(parts)), [part])
    return found


def _check_used(numbers: int, parts: Sequence[Tensor], multiple: int = 1) -> None:
    """ValueError where parts hold other than these numbers, filled up to a multiple."""
    held = sum(part.numel() for part in parts)
    if -(-held // multiple) != -(-numbers // multiple):
        raise ValueError(f"{plural(held, 'number')} where shapes make {numbers:,}")


def _cut(parts: Sequence[Tensor], start: int, size: int) -> tuple[Tensor, ...]:
    """Views of `size` numbers from `start` on in the flat vector that the parts make together."""
    found, at, left = [], 0, size
    for part in parts:
        low = max(start - at, 0)
        if left and low < part.numel():
            found.append(part[low : low + left])
            left -= found[-1].numel()
        at += part.numel()
    if left:
        raise ValueError(f"{left} of {plural(size, 'number')} are missing")
    return tuple(found) or (parts[0][:0],)
