"""Tensors in safetensors and torch files, read box by box. No code in a file runs."""

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
from mm_core.files import open_plain, read_plain
from mm_core.weights.archives import check_archive
from mm_core.weights.formats.format import StoredTensors
from mm_core.weights.formats.key_map import Shape

INDEX = ".safetensors.index.json"
_POINTER = b"version https://git-lfs"
_IS_POINTER = "it is a pointer of Git LFS: `git lfs pull` fetches the file itself"
TORCH_SUFFIXES = (".pt", ".pth", ".bin")

_NESTED = ("state_dict", "model", "module")
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError)
_DEPTH = 8  # a mapping in an untrusted file may contain itself
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
    """Opens the tensors of weights files: a safetensors file, an index, a folder, or a torch.save file.

    Args:
        path: file or folder.
        stem: in a folder, take `<stem>.safetensors` or the files of `<stem>.safetensors.index.json` (see
            `set_of`); None takes the only index, or the file beside it, or all files.

    Raises:
        CheckpointError: there is no weights file, it cannot be read, or it needs more than tensors.
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


def set_of(folder: Path, stem: str) -> Path | None:
    """The file or index of a folder's weights, if it has such; of both, the one that their library loads.

    Transformers, whose files are called `model`, takes the file; Diffusers and other users of its
    `from_pretrained` the index.
    """
    index, single = folder / f"{stem}{INDEX}", folder / f"{stem}.safetensors"
    order = (single, index) if stem == "model" else (index, single)
    return next((path for path in order if path.is_file()), None)


def _in_folder(folder: Path, stem: str | None) -> list[Path]:
    chosen = None if stem is None else set_of(folder, stem)
    if chosen is None:
        indexes = sorted(folder.glob(f"*{INDEX}"))
        if len(indexes) > 1:
            raise CheckpointError(
                f"this folder has several indexes: {', '.join(path.name for path in indexes)}",
                where=str(folder),
                hint="give the path of one index instead of the folder",
            )
        chosen = set_of(folder, indexes[0].name.removesuffix(INDEX)) if indexes else None
    if chosen is None:
        return sorted(folder.glob("*.safetensors"))
    return indexed(chosen) if chosen.name.endswith(INDEX) else [chosen]


class SafetensorsFiles:
    """Tensors in one or several safetensors files, mapped into memory: only bytes in use are read."""

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
                        hint="set the path to one file, or to the index that lists the right files",
                    )
                self._files[name] = path
                piece = stored.get_slice(name)
                self.shapes[name] = tuple(piece.get_shape())
                if (kind := str(piece.get_dtype())) not in DTYPES:
                    raise CheckpointError(
                        f"{name} has dtype {kind}, which torch does not support",
                        where=str(path),
                        accepted=", ".join(DTYPES),
                    )
                self.dtypes[name] = DTYPES[kind]

    def metadata(self) -> dict[str, str]:
        """The metadata texts in the headers of the safetensors files."""
        return {k: v for path in self.paths for k, v in (self._opened(path).metadata() or {}).items()}

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """A box of a tensor in the safetensors files: a view of the mapped file."""
        stored = self._opened(self._files[name])
        found: Tensor = stored.get_slice(name)[box] if box else stored.get_tensor(name)  # a scalar: no slice
        return found


def open_whole(path: Path) -> Any:
    """Opens a safetensors file, mapped into memory.

    Raises:
        CheckpointError: it is not a safetensors file, or it is incomplete.
    """
    if path.exists() and not path.is_file():  # opening a pipe would block
        raise CheckpointError("this is not a file", where=str(path), accepted="a safetensors file")
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as fault:
        raise CheckpointError(
            f"this is not a complete safetensors file: {_why(fault, path)}",
            where=str(path),
            hint="download or copy it again" if path.is_file() else "",
        ) from None


class Inert:
    """What stands for an object that another program saved beside its tensors: it does nothing."""

    def __init__(self, *values: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def open_saved(path: Path) -> StoredTensors:
    """Opens a torch.save file of a trainer, which has more in it than tensors: its settings, random states.

    Anything else in it becomes an object that does nothing, and no code runs.

    Raises:
        CheckpointError: the file is damaged, or holds no named tensors.
    """
    names: Sequence[str] = ()
    with suppress(Exception):  # `load_tensors` reports what is damaged
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    return TorchFile(path, {name: type("Inert", (Inert,), {}) for name in names})


class TorchFile:
    """Tensors in a torch.save file, read with `weights_only` and mapped into memory, not copied.

    Args:
        path: the file.
        stand_ins: as for `load_tensors`.
    """

    def __init__(self, path: Path, stand_ins: Mapping[str, type] | None = None) -> None:
        stored = _unnested(load_tensors(path, stand_ins), path)
        self.where = path
        self._tensors = {name: item for name, item in stored.items() if isinstance(item, Tensor)}
        if odd := {name: kind for name, item in self._tensors.items() if (kind := _other_kind(item))}:
            name, kind = next(iter(odd.items()))
            more = f", as are {len(odd) - 1} more" if len(odd) > 1 else ""
            raise CheckpointError(
                f"{name} is {kind}{more}",
                where=str(path),
                accepted="dense tensors, which can be read slice by slice",
                hint="if you trust the file, convert it with .to_dense() or .dequantize() and save again",
            )
        self.others: Sequence[str] = sorted(name for name in stored if name not in self._tensors)
        self.shapes: Mapping[str, Shape] = {name: tuple(t.shape) for name, t in self._tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in self._tensors.items()}

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """A box of a tensor in the torch.save file."""
        return self._tensors[name].detach()[box]


def missing_at(path: Path) -> list[str]:
    """Missing weights files at a path: the file or folder itself, or files listed in its index."""
    if not path.exists():
        return [str(path)]
    found = [path] if path.name.endswith(INDEX) else []
    if path.is_dir():
        indexes = path.glob(f"*{INDEX}")
        found = [index for index in indexes if set_of(path, index.name.removesuffix(INDEX)) == index]
    missing = []
    for index in sorted(found):
        with suppress(*_DAMAGED):  # reading reports a damaged index
            files = [index.parent / name for name in _names_in(index)]
            missing += [str(file) for file in files if not file.is_file()]
    return missing


def _names_in(index: Path) -> list[str]:
    """The file names in an index, unchecked. Raises one of `_DAMAGED` for anything else."""
    return sorted(set(json.loads(read_plain(index))["weight_map"].values()))


def indexed(index: Path) -> list[Path]:
    """The weights files listed in a safetensors index.

    Raises:
        CheckpointError: the index lists no file, a missing file, or one outside its folder.
    """
    try:
        names = _names_in(index)
        odd = [name for name in names if Path(name).name != name or name in {"", ".", ".."}]
    except _DAMAGED as fault:
        raise CheckpointError(
            f"this index cannot be read ({type(fault).__name__})",
            where=str(index),
            accepted="JSON with a weight_map from tensor names to file names",
            hint="download or copy it again",
        ) from None
    if not names:
        raise CheckpointError("this index lists no file", where=str(index), hint="download or copy it again")
    if odd:
        raise CheckpointError(
            f"this index lists {odd[0]!r}, which is outside its folder",
            where=str(index),
            accepted="names of files in the same folder",
        )
    if wrong := [name for name in names if not name.endswith(".safetensors")]:
        raise CheckpointError(
            f"this index lists {wrong[0]!r}, which is not a safetensors file",
            where=str(index),
            hint="get the weights as safetensors; load only files that you trust",
        )
    if absent := [name for name in names if not (index.parent / name).is_file()]:
        shown = ", ".join(absent[:5]) + (f" and {len(absent) - 5} more" if len(absent) > 5 else "")
        raise CheckpointError(
            f"files listed in this index are missing: {shown}",
            where=str(index),
            hint="download or copy them into this folder",
        )
    return [index.parent / name for name in names]


def _why(fault: Exception, path: Path) -> str:
    """A clearer text for safetensors errors, chosen by their text since they have no codes."""
    text = " ".join(str(fault).split()).removeprefix("Error while deserializing header: ")
    if "not fully covered" in text:
        return "it is truncated, or longer than its header declares"
    if text.startswith(("header too", "invalid header length")):
        with path.open("rb") as file:
            head = file.read(64)
        if head.startswith(_POINTER):
            return _IS_POINTER
        if head and head.isascii() and b"\0" not in head:
            return f"it begins with the text {head[:16]!r}"
        return f"it is truncated, or a different kind of file under this name ({text})"
    return text[:200]


def load_tensors(path: Path, stand_ins: Mapping[str, type] | None = None) -> object:
    """Loads a torch.save file without running any code in it; its tensors are mapped into memory.

    Args:
        path: the file.
        stand_ins: classes to build in place of those that the file names, by the name in the file
            (`package.module.Class`); the package is not imported.

    Raises:
        CheckpointError: the file is damaged, or needs more than tensors, plain values and `stand_ins`.
    """
    allowed: list[Any] = [(kind, name) for name, kind in (stand_ins or {}).items()]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(allowed):
            warnings.simplefilter("ignore", UserWarning)  # the error below is enough
            with open_plain(path) as file:
                _check_begins(file.read(64))
                check_archive(file, 0, path.stat().st_size)
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as fault:
                if "mmap can only be used" not in str(fault):
                    raise
            return torch.load(path, map_location="cpu", weights_only=True)  # written before torch 1.6
    except Exception as fault:
        # A pickle can fail in any way that the calls inside it can; none of it has run.
        raise CheckpointError(
            f"this file was refused without loading it: {_reason(fault)}",
            where=str(path),
            accepted="a file that contains only tensors",
            hint="get the weights as safetensors; load only files that you trust",
        ) from None


def _check_begins(head: bytes) -> None:
    """CheckpointError unless a file begins as torch.save begins one: with a zip archive or a pickle."""
    if head.startswith(_POINTER):
        raise CheckpointError(_IS_POINTER)
    if not head.startswith((b"PK", b"\x80")):
        kind = "text" if head.isascii() else "bytes"
        raise CheckpointError(f"torch.save did not write it: it begins with the {kind} {head[:16]!r}")


def _reason(fault: Exception) -> str:
    """What is wrong with the file, without torch's advice to load it anyway."""
    if isinstance(fault, CheckpointError):
        return fault.what
    text = " ".join(str(fault).split())
    if named := re.search(r"GLOBAL ([\w.]+)", text):
        return f"it would import {named[1]}, which a file of tensors never needs"
    if "TorchScript" in text:
        return "it is a TorchScript archive, which is a program"
    if "WeightsUnpickler error: " in text:
        text = text.partition("WeightsUnpickler error: ")[2].partition(" Check the")[0]
    return f"{type(fault).__name__}: {text[:300]}"


def _other_kind(tensor: Tensor) -> str:
    """Why a tensor cannot be read slice by slice; "" for a dense one."""
    if tensor.layout is not torch.strided:
        return f"sparse ({str(tensor.layout).removeprefix('torch.')})"
    if tensor.is_quantized:
        return f"quantized ({str(tensor.dtype).removeprefix('torch.')})"
    return "on the meta device, without numbers" if tensor.is_meta else ""


def _unnested(found: object, path: Path) -> Mapping[str, object]:
    """The mapping that contains the tensors, also below `state_dict`, `model` or `module`: anything beside
    it (a step that is a tensor) does not belong to the model."""
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
        "this file contains no named tensors",
        where=str(path),
        accepted="a state dict, also below 'state_dict', 'model' or 'module'",
    )
