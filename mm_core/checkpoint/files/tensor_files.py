"""Writing the bytes of a checkpoint's tensors, with a checksum computed as they are written."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from mm_core.checkpoint.files.fingerprints import Fingerprint
from mm_core.errors import CheckpointError

_CHUNK = 1 << 23
_SMALL = 1 << 16


@dataclass(frozen=True)
class WrittenFile:
    """A checkpoint file of tensors that was written.

    Attributes:
        places: offset and length in bytes of each tensor.
        size: of the file in bytes.
        crc32: of the file.
    """

    places: tuple[tuple[int, int], ...]
    size: int
    crc32: int


class _Summing(io.RawIOBase):
    """Writes to a file and computes its crc32 in another thread at the same time."""

    def __init__(self, file: io.RawIOBase, summer: ThreadPoolExecutor) -> None:
        self._file, self._summer = file, summer
        self.size = self.crc32 = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) < _SMALL:  # torch.save writes about forty such pieces per tensor
            self._file.write(view)
            self.crc32 = zlib.crc32(view, self.crc32)
            self.size += len(view)
            return len(view)
        for start in range(0, len(view), _CHUNK):
            chunk = view[start : start + _CHUNK]
            summed = self._summer.submit(zlib.crc32, chunk, self.crc32)
            try:
                self._file.write(chunk)
            finally:
                self.crc32 = summed.result()  # the caller may reuse the bytes after this
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size

    def writable(self) -> bool:
        return True


def write_file(
    path: Path, tensors: Sequence[Tensor], expected: Sequence[Fingerprint | None] | None = None
) -> WrittenFile:
    """Writes a checkpoint file of tensors, each as torch saves it, and waits until it is on disk (fsync).

    Args:
        path: the file.
        tensors: written one after another.
        expected: a fingerprint or None for each tensor.

    Raises:
        CheckpointError: a tensor differs from its fingerprint.
    """
    places = []
    checkpoint = path.parent.name.partition(".tmp-")[0]
    with _no_sums_by_torch(), ThreadPoolExecutor(1) as summer, path.open("wb", buffering=0) as file:
        stream = _Summing(file, summer)
        for tensor, fingerprint in zip(tensors, expected or [None] * len(tensors), strict=True):
            held = tensor.detach().cpu()
            if held.numel() * held.element_size() != held.untyped_storage().nbytes():
                held = held.clone()  # torch saves the complete storage behind a view
            if fingerprint is not None:
                fingerprint.check(held, checkpoint)
            before = stream.size
            _save(held, stream)
            places.append((before, stream.size - before))
        os.fsync(file.fileno())
    return WrittenFile(tuple(places), stream.size, stream.crc32)


@contextmanager
def _no_sums_by_torch() -> Iterator[None]:
    """Turns off the crc32 of torch.save's zip format, which takes a quarter of the time. torch.load does not
    check it; the crc32 computed here covers the complete file."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _save(tensor: Tensor, stream: _Summing) -> None:
    try:
        torch.save(tensor, cast(IO[bytes], stream))
    except RuntimeError as fault:
        # When the disk is full, torch.save's own error ("unexpected pos") hides the system's.
        if isinstance(fault.__context__, OSError):
            raise fault.__context__ from None
        raise


def check_finite(names: Sequence[str], tensors: Sequence[Tensor], where: str) -> None:
    """Raises CheckpointError if a model weight to be saved is not finite: such a checkpoint is useless.

    Args:
        names: names of the tensors, as `part.name`.
        tensors: the tensors to be saved.
        where: the checkpoint's name, for the error.
    """
    for name, tensor in zip(names, tensors, strict=True):
        if name.startswith("model.") and tensor.is_floating_point() and not _finite(tensor.detach()):
            raise CheckpointError(
                f"{name.removeprefix('model.')} is not finite, so nothing was saved",
                where=where,
                hint="resume from the last checkpoint with a lower learning rate",
            )


def _finite(tensor: Tensor) -> bool:
    # A finite sum proves it in one pass; a sum that is not finite may only have overflowed.
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())
