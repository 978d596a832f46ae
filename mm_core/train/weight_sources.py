"""Where weights to begin with may lie: our checkpoints, safetensors, torch files. Nothing in them runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mm_core.errors import CheckpointError
from mm_core.train import checkpoint_dcp as dcp
from mm_core.train import checkpoint_io as files
from mm_core.train.agreement import Ranks
from mm_core.train.checkpoint import shares
from mm_core.train.checkpoint_reading import find_checkpoint

_INDEX = ".safetensors.index.json"
_NESTED = ("state_dict", "model", "module")


class WeightSource(Protocol):
    """Stored tensors by name."""

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """The shape of every stored tensor."""
        ...

    @property
    def others(self) -> Sequence[str]:
        """Names of what is stored and is no tensor."""
        ...

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Copies stored tensors into tensors of their shape (plain, or DTensors of which each rank reads
        its shard), cast to their dtype. Called by all ranks, with the same names."""
        ...


def open_source(path: Path, weights: Literal["model", "ema"]) -> WeightSource:
    """The weights at `path`; CheckpointError where there are none, or they can not be trusted."""
    name = path.name
    if path.is_file() and name.endswith(".safetensors"):
        found: WeightSource = SafetensorsSource([path])
    elif path.is_file() and name.endswith(_INDEX):
        found = SafetensorsSource(_indexed(path))
    elif path.is_file() and path.suffix in {".pt", ".pth", ".bin"}:
        found = TorchSource(path)
    elif path.is_dir() and (parts := sorted(path.glob("*.safetensors"))):
        found = SafetensorsSource(_indexed(index) if (index := _only_index(path)) else parts)
    elif path.is_dir():
        return RunSource(find_checkpoint(path), weights)
    else:
        raise CheckpointError(
            "this is no file of weights" if path.exists() else "there is no such file or folder",
            where=str(path),
            accepted="a run or checkpoint folder, a .safetensors file or a folder of them, "
            "or a .pt, .pth or .bin file of tensors",
            hint="set init_from.path",
        )
    if weights == "ema":
        raise CheckpointError(
            "only checkpoints of mm_core tell an average from the weights",
            where=str(path),
            hint="leave out init_from.weights",
        )
    return found


class RunSource:
    """A checkpoint of ours. With `ema`, what has no average (buffers, frozen parameters) comes from the
    model. Every file's checksum is checked by one of the ranks."""

    others: Sequence[str] = ()

    def __init__(self, folder: Path, weights: Literal["model", "ema"]) -> None:
        self._folder = folder
        self._manifest = files.read_manifest(folder)
        files.check_present(folder, self._manifest)
        files.check_contents(folder, self._manifest, [files.METADATA])
        self._metadata = dcp.read_metadata(folder, self._manifest)
        stored = self._metadata.state_dict_metadata
        self._parts = {
            name: part
            for part in ("model", weights)
            for full in stored
            if (name := full.removeprefix(f"{part}.")) != full
        }
        if weights not in self._parts.values():
            raise CheckpointError(
                f"this checkpoint holds no {'average of the weights' if weights == 'ema' else 'weights'}",
                where=str(folder),
                hint="set init_from.weights to model, or choose a checkpoint of a run with `ema`",
            )
        self.shapes = {
            name: tuple(stored[f"{part}.{name}"].size)  # type: ignore[union-attr]  # checked by read_metadata
            for name, part in self._parts.items()
        }

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        ranks = Ranks.current()
        files.check_contents(self._folder, self._manifest, shares(self._manifest, ranks))
        parts: dict[str, dict[str, Tensor]] = {}
        for name, target in targets.items():
            parts.setdefault(self._parts[name], {})[name] = target.detach()
        dcp.read_tensors(self._folder, self._metadata, parts, alone=ranks.alone)


class SafetensorsSource:
    """One file or several; each rank reads its slices only."""

    others: Sequence[str] = ()

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, Sequence[int]] = {}
        for path in paths:
            with _opened(path) as stored:
                for name in stored.keys():  # noqa: SIM118  # not a mapping
                    if name in self._files:
                        raise CheckpointError(
                            f"{name} is in {self._files[name].name} and in {path.name}",
                            where=str(path.parent),
                            hint="set init_from.path to one file, or to the index that lists the right ones",
                        )
                    self._files[name] = path
                    self.shapes[name] = tuple(stored.get_slice(name).get_shape())

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        for path in sorted({self._files[name] for name in targets}):
            with _opened(path) as stored:
                for name, target in targets.items():
                    if self._files[name] == path:
                        local, place = shard_of(target)
                        if local.numel():
                            # A scalar has no slice.
                            read = stored.get_slice(name)[place] if place else stored.get_tensor(name)
                            local.copy_(read)


class TorchSource:
    """A file of torch.save, read with `weights_only` and mapped into memory, not copied."""

    def __init__(self, path: Path) -> None:
        stored = _unnested(_load(path), path)
        self._tensors = {name: item for name, item in stored.items() if isinstance(item, Tensor)}
        self.others = sorted(name for name in stored if name not in self._tensors)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            local, place = shard_of(target)
            local.copy_(self._tensors[name][place])


def shard_of(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """What this rank holds of a tensor (the same memory), and its place in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), tuple(slice(0, size) for size in tensor.shape)
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    place = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    return tensor.to_local().detach(), place


def _opened(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as fault:
        raise CheckpointError(f"this file can not be read: {fault}", where=str(path)) from None


def _only_index(folder: Path) -> Path | None:
    found = sorted(folder.glob(f"*{_INDEX}"))
    if len(found) > 1:
        raise CheckpointError(
            f"this folder has several indexes: {', '.join(path.name for path in found)}",
            where=str(folder),
            hint="set init_from.path to one of them",
        )
    return found[0] if found else None


def _indexed(index: Path) -> list[Path]:
    """The files that an index lists."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        odd = [name for name in names if Path(name).name != name or name in {"", ".", ".."}]
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        raise CheckpointError(
            f"this index can not be read ({type(fault).__name__})", where=str(index)
        ) from None
    if odd:
        raise CheckpointError(f"this index names {odd[0]!r}, which is outside its folder", where=str(index))
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise CheckpointError(f"files of this index are missing: {files.listed(absent)}", where=str(index))
    return [index.parent / name for name in names]


def _load(path: Path) -> Any:
    """A torch file, without running anything in it."""
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as fault:
            if "mmap can only be used" not in str(fault):
                raise
        return torch.load(path, map_location="cpu", weights_only=True)  # written before torch 1.6
    except Exception as fault:
        # A pickle can fail in any way that the calls inside it can; nothing of it has run.
        raise CheckpointError(
            f"this file was refused unread: {_reason(fault)}",
            where=str(path),
            accepted="a file of tensors alone",
            hint="ask for the weights as safetensors; load nothing that you do not trust",
        ) from None


def _reason(fault: Exception) -> str:
    """What is wrong with the file, without torch's advice to load it all the same."""
    text = " ".join(str(fault).split())
    if named := re.search(r"GLOBAL ([\w.]+)", text):
        return f"it asks for {named[1]}, which no file of tensors needs"
    if "TorchScript" in text:
        return "it is a TorchScript archive, which is a program"
    if "WeightsUnpickler error: " in text:
        text = text.partition("WeightsUnpickler error: ")[2].partition(" Check the")[0]
    return f"{type(fault).__name__}: {text[:300]}"


def _unnested(found: Any, path: Path) -> Mapping[str, Any]:
    """The mapping that holds the tensors, also below `state_dict`, `model` or `module`."""
    while isinstance(found, Mapping):
        if any(isinstance(item, Tensor) for item in found.values()):
            return {str(name): item for name, item in found.items()}
        found = next((found[key] for key in _NESTED if key in found), None)
    raise CheckpointError(
        "this file holds no tensors by name",
        where=str(path),
        accepted="a state dict, also below 'state_dict', 'model' or 'module'",
    )
