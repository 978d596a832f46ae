"""Checks of torch.save archives, made on their zip directory before anything is unpacked."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from typing import IO, TYPE_CHECKING

from mm_core.errors import CheckpointError, plural

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_ZIP = b"PK\x03\x04"
_END = struct.Struct("<4s4H2LH")  # signature, disks and counts, size and place of the directory, comment
_LOCATOR = struct.Struct("<4sLQL")  # points to the end record of a large archive
_LARGE_END = struct.Struct("<4sQ2H2L4Q")


def check_archive(file: IO[bytes], start: int, size: int) -> None:
    """Refuses a torch.save weights file whose zip members are compressed or larger than the file.

    torch.save never compresses. A compressed member of a few kilobytes can declare a terabyte, and torch
    unpacks a complete member at once. A file that is not a zip archive is left to torch.

    Args:
        file: contains the archive.
        start: byte at which the archive begins.
        size: bytes of the archive.

    Raises:
        CheckpointError: an archive that unpacks to more than its size, or that two readers can read
            differently.
        RuntimeError: a damaged archive, as torch raises it.
    """
    piece = _Piece(file, start, size)
    if piece.read(len(_ZIP)) != _ZIP:
        return
    try:
        with zipfile.ZipFile(piece) as archive:
            members = archive.infolist()
        ends = _directory_ends_at_end(piece)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as fault:
        raise RuntimeError(f"the archive is damaged ({fault})") from None
    if not ends:
        # zipfile takes the bytes before for prepended data, and reads a different directory from torch.
        raise CheckpointError(
            "its zip directory is not at its end, where torch.save writes it: it is damaged, or was written"
            " by another program"
        )
    if any(member.filename.endswith("constants.pkl") for member in members):  # as torch recognises them
        raise CheckpointError("it is a TorchScript archive, which is a program")
    declared = sum(member.file_size for member in members)
    if declared > size:
        raise CheckpointError(
            f"its {plural(size, 'byte')} unpack to {declared:,}, but torch.save never compresses"
        )
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise CheckpointError(
                f"its member {member.filename[:60]!r} is compressed, but torch.save never compresses"
            )


def _directory_ends_at_end(piece: _Piece) -> bool:
    """Whether the directory is where the archive's end record points, with nothing between them or after."""
    end = piece.seek(-_END.size, os.SEEK_END)
    signature, *_, length, place, comment = _END.unpack(piece.read(_END.size))
    if signature != b"PK\x05\x06" or comment:
        return False
    piece.seek(end - _LOCATOR.size)
    signature, _, large_end, _ = _LOCATOR.unpack(piece.read(_LOCATOR.size))
    if signature == b"PK\x06\x07":
        end -= _LOCATOR.size + _LARGE_END.size
        piece.seek(end)
        signature, *_, length, place = _LARGE_END.unpack(piece.read(_LARGE_END.size))
        if signature != b"PK\x06\x06" or large_end != end:
            return False
    return bool(place + length == end)


class _Piece(io.RawIOBase):
    """A part of a file, readable like a file of its own."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self._file, self._start, self._at = file, start, 0
        self._size = min(size, file.seek(0, os.SEEK_END) - start)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        target = memoryview(buffer)
        self._file.seek(self._start + self._at)
        found = self._file.read(max(0, min(len(target), self._size - self._at)))
        target[: len(found)] = found
        self._at += len(found)
        return len(found)
