"""Tensors in safetensors and torch files, read by boxes. Nothing in a file runs."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mm_core.errors import CheckpointError
from mm_core.weights.archives import check_archive
from mm_core.weights.formats.format import StoredTensors
from mm_core.weights.formats.key_map import Shape

INDEX = ".safetensors.index.json"
TORCH_SUFFIXES = (".pt", ".pth", ".bin")

_NESTED = ("state_dict", "model", "module")
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError)
_DEPTH = 8  # a mapping of a file that nobody vouches for may hold itself
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}


def open_stored(path: Path, stem: str | None = None) -> StoredTensors:
    """The tensors at `path`: a safetensors file, an index or a folder of such files, or a file of
    torch.save.

    Args:
        path: file or folder.
        stem: in a folder, take `<stem>.safetensors` or the files of `<stem>.safetensors.index.json`; None
            takes the only index, or all files.

    Raises:
        CheckpointError: nothing of that kind is there, or it cannot be read, or asks for more than
            tensors.
    """
    name = path.name
    if path.is_file() and name.endswith(INDEX):
        return SafetensorsFiles(path, indexed(path))
    if path.is_file() and name.endswith(".safetensors"):
        return SafetensorsFiles(path, [path])
    if path.is_file() and path.suffix in TORCH_SUFFIXES:
        return TorchFile(path)
    if path.is_dir() and (found := _in_folder(path, stem)):
        return SafetensorsFiles(path, found)
    raise CheckpointError(
        "there are no weights here" if path.exists() else "there is no such file or folder",
        where=str(path),
        accepted="a .safetensors file, its index, a folder of them, or a .pt, .pth or .bin file of tensors",
    )


def _in_folder(folder: Path, stem: str | None) -> list[Path]:
    if stem is not None and (folder / f"{stem}{INDEX}").is_file():
        return indexed(folder / f"{stem}{INDEX}")
    if stem is not None and (folder / f"{stem}.safetensors").is_file():
        return [folder / f"{stem}.safetensors"]
    indexes = sorted(folder.glob(f"*{INDEX}"))
    if len(indexes) > 1:
        raise CheckpointError(
            f"this folder has several indexes: {', '.join(path.name for path in indexes)}",
            where=str(folder),
            hint="name one of them",
        )
    return indexed(indexes[0]) if indexes else sorted(folder.glob("*.safetensors"))


class SafetensorsFiles:
    """One file or several, mapped into memory: only what is used of them is ever read."""

    others: Sequence[str] = ()

    def __init__(self, where: Path, paths: Sequence[Path]) -> None:
        self.where = where
        self.paths = tuple(paths)
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._files: dict[str, Path] = {}
        self._opened = cache(open_whole)
        for path in paths:
            stored = self._opened(path)
            for name in stored.keys():  # noqa: SIM118  # not a mapping
                if name in self._files:
                    raise CheckpointError(
                        f"{name} is in {self._files[name].name} and in {path.name}",
                        where=str(path.parent),
                        hint="name one file, or the index that lists the right ones",
                    )
                self._files[name] = path
                piece = stored.get_slice(name)
                self.shapes[name] = tuple(piece.get_shape())
                if (kind := str(piece.get_dtype())) not in DTYPES:
                    raise CheckpointError(
                        f"{name} is of dtype {kind}, which torch cannot hold",
                        where=str(path),
                        accepted=", ".join(DTYPES),
                    )
                self.dtypes[name] = DTYPES[kind]

    def metadata(self) -> dict[str, str]:
        """The texts in the headers."""
        return {k: v for path in self.paths for k, v in (self._opened(path).metadata() or {}).items()}

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """A box of a stored tensor: a view of the mapped file."""
        stored = self._opened(self._files[name])
        found: Tensor = stored.get_slice(name)[box] if box else stored.get_tensor(name)  # a scalar: no slice
        return found


def open_whole(path: Path) -> Any:
    """A safetensors file, mapped. CheckpointError where it is none, or not all of it is there."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise CheckpointError("this is no file", where=str(path), accepted="a safetensors file")
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as fault:
        raise CheckpointError(
            f"this is no whole safetensors file: {_why(fault)}",
            where=str(path),
            hint="fetch it again" if path.is_file() else "",
        ) from None


class TorchFile:
    """A file of torch.save, read with `weights_only` and mapped into memory, not copied."""

    def __init__(self, path: Path) -> None:
        stored = _unnested(_load(path), path)
        self.where = path
        self._tensors = {name: item for name, item in stored.items() if isinstance(item, Tensor)}
        if odd := {name: kind for name, item in self._tensors.items() if (kind := _other_kind(item))}:
            name, kind = next(iter(odd.items()))
            more = f", as are {len(odd) - 1} more" if len(odd) > 1 else ""
            raise CheckpointError(
                f"{name} is {kind}{more}",
                where=str(path),
                accepted="dense tensors, which can be read slice by slice",
                hint="save it anew with .to_dense() or .dequantize(), where you trust it",
            )
        self.others: Sequence[str] = sorted(name for name in stored if name not in self._tensors)
        self.shapes: Mapping[str, Shape] = {name: tuple(t.shape) for name, t in self._tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in self._tensors.items()}

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """A box of a stored tensor."""
        return self._tensors[name].detach()[box]


def missing_at(path: Path) -> list[str]:
    """Of weights at a path, what does not exist: the file or folder, or files that its index lists."""
    if not path.exists():
        return [str(path)]
    found = path.glob(f"*{INDEX}") if path.is_dir() else [path] if path.name.endswith(INDEX) else []
    missing = []
    for index in sorted(found):
        with suppress(*_DAMAGED):  # what is wrong with an index, reading says
            files = [index.parent / name for name in _names_in(index)]
            missing += [str(file) for file in files if not file.is_file()]
    return missing


def _names_in(index: Path) -> list[str]:
    """The files that an index lists, as it says itself; one of `_DAMAGED` where it is none."""
    return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))


def indexed(index: Path) -> list[Path]:
    """The files that an index lists; CheckpointError for one that names a file outside of its folder, or
    none at all."""
    try:
        names = _names_in(index)
        odd = [name for name in names if Path(name).name != name or name in {"", ".", ".."}]
    except _DAMAGED as fault:
        raise CheckpointError(
            f"this index cannot be read ({type(fault).__name__})", where=str(index)
        ) from None
    if not names:
        raise CheckpointError("this index lists no file", where=str(index))
    if odd:
        raise CheckpointError(f"this index names {odd[0]!r}, which is outside its folder", where=str(index))
    if wrong := [name for name in names if not name.endswith(".safetensors")]:
        raise CheckpointError(
            f"this index names {wrong[0]!r}, which is no safetensors file",
            where=str(index),
            hint="ask for the weights as safetensors; load nothing that you do not trust",
        )
    if absent := [name for name in names if not (index.parent / name).is_file()]:
        shown = ", ".join(absent[:5]) + (f" and {len(absent) - 5} more" if len(absent) > 5 else "")
        raise CheckpointError(f"files of this index are missing: {shown}", where=str(index))
    return [index.parent / name for name in names]


def _why(fault: Exception) -> str:
    """In our words where safetensors' own do not say what to make of it; by its text, which has no codes."""
    text = " ".join(str(fault).split()).removeprefix("Error while deserializing header: ")
    if "not fully covered" in text:
        return "it is cut off, or longer than its header says"
    if text.startswith(("header too", "invalid header length")):
        return f"it is cut off, or another kind of file under this name ({text})"
    return text[:200]


def _load(path: Path) -> object:
    """A torch file, without running anything in it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what is odd is refused, in one sentence
            with path.open("rb") as file:
                check_archive(file, 0, path.stat().st_size)
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
    if isinstance(fault, CheckpointError):
        return fault.what
    text = " ".join(str(fault).split())
    if named := re.search(r"GLOBAL ([\w.]+)", text):
        return f"it asks for {named[1]}, which no file of tensors needs"
    if "TorchScript" in text:
        return "it is a TorchScript archive, which is a program"
    if "WeightsUnpickler error: " in text:
        text = text.partition("WeightsUnpickler error: ")[2].partition(" Check the")[0]
    return f"{type(fault).__name__}: {text[:300]}"


def _other_kind(tensor: Tensor) -> str:
    """What keeps a tensor from being read slice by slice; "" for a dense one."""
    if tensor.layout is not torch.strided:
        return f"sparse ({str(tensor.layout).removeprefix('torch.')})"
    if tensor.is_quantized:
        return f"quantized ({str(tensor.dtype).removeprefix('torch.')})"
    return "on the meta device, without numbers" if tensor.is_meta else ""


def _unnested(found: object, path: Path) -> Mapping[str, object]:
    """The mapping that holds the tensors, also below `state_dict`, `model` or `module`: what lies beside
    it (a step that is a tensor) is none of the model's."""
    held: Mapping[object, object] | None = None
    for _ in range(_DEPTH):
        if not isinstance(found, Mapping):
            break
        if any(isinstance(item, Tensor) for item in found.values()):
            held = found
        found = next((found[key] for key in _NESTED if isinstance(found.get(key), Mapping)), None)
    if held is not None:
        return {str(name): item for name, item in held.items()}
    raise CheckpointError(
        "this file holds no tensors by name",
        where=str(path),
        accepted="a state dict, also below 'state_dict', 'model' or 'module'",
    )
