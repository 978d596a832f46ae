"""Folders that DeepSpeed scripts saved (ZeRO stages 0 to 3), read without deepspeed. No code in them runs."""

from __future__ import annotations

import re
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
    load_tensors,
)

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_OTHER = re.compile(r"layer_\d+.*\.pt|expp_rank_\d+.*\.pt")  # pipeline stages, experts
_FORM = "a folder global_stepN as save_checkpoint of DeepSpeed 0.19 writes it, or its parent"


class _StandIn:
    """Takes the place of a class of DeepSpeed in a pickle and does nothing but hold its arguments."""

    def __init__(self, *args: object) -> None:
        self.args = args


_STAND_INS = {
    f"deepspeed.{name}": _StandIn
    for name in (
        "runtime.fp16.loss_scaler.LossScaler",
        "runtime.fp16.loss_scaler.DynamicLossScaler",
        "runtime.zero.config.ZeroStageEnum",
        "utils.tensor_fragment.fragment_address",
    )
}


class DeepSpeedFolders:
    """The weight format of folders that a DeepSpeed script saved: float32 masters, by the module's names."""

    def recognises(self, path: Path) -> bool:
        """Whether a folder, or the one that its `latest` names, has files of model states."""
        try:
            return any(_MODEL.fullmatch(file.name) for file in _step(path).iterdir())
        except (OSError, ValueError):
            return False

    def folders(self, path: Path) -> Sequence[str]:
        """The folders with weights: always [""], the path itself."""
        return [""]

    def open(self, path: Path, folder: str = "") -> StoredTensors:
        """Opens the masters of a folder of DeepSpeed; what has none comes as it was trained with.

        Raises:
            CheckpointError: a file of a rank is missing or damaged, or contains other things than tensors; or
                the model is split by tensors, by pipeline stages or by experts.
        """
        return _Masters(_step(path / folder))

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
    tag = latest.read_text(encoding="utf-8").strip()
    return path / tag if tag and Path(tag).name == tag and tag != ".." else path


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
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as fault:
            raise CheckpointError(
                f"the files are not as DeepSpeed writes them ({type(fault).__name__}: {str(fault)[:100]})",
                where=str(where),
                accepted=_FORM,
            ) from None
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
        models, optimizers = self._files(_MODEL), self._files(_OPTIMIZER)
        states = [_mapping(self._load(path)) for path in models.values()]
        if not states:
            raise self._error("there are no model states of DeepSpeed here")
        shapes: Any = states[0].get("param_shapes")
        found = {name: _whole(t) for name, t in states[0]["module"].items() if isinstance(t, Tensor)}
        if shapes is not None or optimizers:
            if not optimizers:
                raise self._error("the files of optimizer states are missing", "copy all files of the folder")
            loaded = [_mapping(self._load(path))["optimizer_state_dict"] for path in optimizers.values()]
            stage = loaded[0].get("zero_stage", 1)  # files bf16_* of stage 1 do not name it
            stage = stage.args[0] if isinstance(stage, _StandIn) else stage
            count = loaded[0]["partition_count"]
            world = int(max(count) if isinstance(count, list) else count)
            self._check_complete(world, optimizers, "optimizer")
            if stage == 3:
                self._check_complete(world, models, "model")
                found = {name: t for name, t in found.items() if name in states[0]["buffer_names"]}
                found |= _by_parameter(shapes, [state["fp32_flat_groups"] for state in loaded])
                found |= _frozen(states)
            else:
                groups = [state["single_partition_of_fp32_groups"] for state in loaded]
                found |= _by_group(shapes, groups, loaded[0].get("param_alignment_paddings"))
            for other, first in (states[0].get("shared_params") or {}).items():
                found |= {other: found[first]} if first in found else {}
        wrapped = all(name.startswith("module.") for name in found)
        return {name.removeprefix("module.") if wrapped else name: t for name, t in found.items()}

    def _files(self, pattern: re.Pattern[str]) -> dict[int, Path]:
        """The files of ranks by rank. CheckpointError for a model that is split in other ways than by ZeRO
        does."""
        found: dict[int, Path] = {}
        for path in self.where.iterdir() if self.where.is_dir() else ():
            match = pattern.fullmatch(path.name)
            if _OTHER.fullmatch(path.name) or (match and int(match[2])):
                raise self._error(
                    f"the model is split by tensors, pipeline stages or experts: {path.name}",
                    "join its parts with the program that trained it, and save them as safetensors",
                )
            if match:
                found[int(match[1] or 0)] = path
        return dict(sorted(found.items()))

    def _check_complete(self, world: int, files: Mapping[int, Path], kind: str) -> None:
        if missing := sorted(set(range(world)) - files.keys()):
            raise self._error(
                f"the {kind} states of rank {missing[0]} of {world} are missing",
                "copy the files of all ranks, also those that other machines wrote",
            )

    def _load(self, path: Path) -> object:
        return load_tensors(path, _STAND_INS)

    def _error(self, what: str, hint: str = "") -> CheckpointError:
        return CheckpointError(what, where=str(self.where), accepted=_FORM, hint=hint)


def _mapping(found: object) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise TypeError(f"a {type(found).__name__} in place of a mapping")
    return found


def _whole(tensor: Tensor) -> _Flat:
    return _Flat(tuple(tensor.shape), (tensor.detach().reshape(-1),))


def _by_group(
    groups: Sequence[Mapping[str, Sequence[int]]],
    partitions: Sequence[Sequence[Tensor]],
    paddings: Sequence[Sequence[int]] | None,
) -> dict[str, _Flat]:
    """Masters of stages 1 and 2, whose ranks have one part of each group's flat vector."""
    found = {}
    for number, shapes in enumerate(groups):
        parts, at = [rank[number] for rank in partitions], 0
        for place, (name, shape) in enumerate(shapes.items()):
            found[name] = _Flat(tuple(shape), _cut(parts, at, prod(shape)))
            at += prod(shape) + (paddings[number][place] if paddings is not None else 0)
    return found


def _by_parameter(
    groups: Sequence[Mapping[str, Sequence[int]]], partitions: Sequence[Sequence[Tensor]]
) -> dict[str, _Flat]:
    """Masters of stage 3, whose ranks have an equal part of each parameter."""
    found, at = {}, 0
    for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
        size = -(-prod(shape) // len(partitions))
        pieces = [piece for rank in partitions for piece in _cut(rank, at, size)]
        found[name] = _Flat(tuple(shape), _cut(pieces, 0, prod(shape)))
        at += size
    return found


def _frozen(states: Sequence[Mapping[str, Any]]) -> dict[str, _Flat]:
    """Parameters of stage 3 that are not trained: each rank has an equal part of them."""
    found = {}
    for name, shape in (states[0].get("frozen_param_shapes") or {}).items():
        parts = [state["frozen_param_fragments"][name].detach().reshape(-1) for state in states]
        found[name] = _Flat(tuple(shape), _cut(parts, 0, prod(shape)))
    return found


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
