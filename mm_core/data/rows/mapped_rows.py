"""Rows of images and clips in files of a temporary folder, mapped into memory by all processes of a host."""

from __future__ import annotations

import socket
import tempfile
from array import array
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import util
from pathlib import Path
from struct import Struct
from typing import TypeVar, overload

import numpy as np

from mm_core.data.rows.media_rows import MediaRow
from mm_core.errors import MMError
from mm_core.runtime.ranks import Ranks

T = TypeVar("T")

_FACTS = np.dtype(
    [
        *(("source", "<u2"), ("image", "?"), ("num_frames", "<i4"), ("height", "<i4"), ("width", "<i4")),
        *(("fps", "<f8"), ("archive", "<i4"), ("start", "<i8"), ("size", "<i8")),
    ]
)
_PACKED = Struct("<H?iiidiqq")
_BETWEEN = "\0"  # between path and captions


class MappedRows(Sequence[MediaRow]):
    """Rows of images and clips, which processes share: only the folder's path is sent to data workers.

    Args:
        folder: written by `write`.

    Attributes:
        facts: structured array [N] of what is known of each row without decoding it: `image`, and what it
            declares, `num_frames`, `height`, `width` (0: nothing) and `fps`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: np.ndarray[tuple[int], np.dtype[np.void]] = np.load(folder / "facts.npy", mmap_mode="r")
        self._ends = np.load(folder / "ends.npy", mmap_mode="r")
        self._text = np.load(folder / "text.npy", mmap_mode="r")

    def __reduce__(self) -> tuple[object, ...]:
        return MappedRows, (self.folder,)

    def __len__(self) -> int:
        return len(self.facts)

    @overload
    def __getitem__(self, index: int) -> MediaRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[MediaRow]: ...
    def __getitem__(self, index: int | slice) -> MediaRow | list[MediaRow]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]  # negative ones too; IndexError outside
        start, end = (int(self._ends[place - 1]) if place else 0), int(self._ends[place])
        path, *captions = self._text[start:end].tobytes().decode().split(_BETWEEN)
        source, image, frames, height, width, fps, archive, first, size = self.facts[place].item()
        sizes = (frames or None, fps or None, height or None, width or None)
        return MediaRow(
            source,
            path,
            "image" if image else "clip",
            tuple(captions),
            *sizes,
            None if archive < 0 else archive,
            first,
            size,
        )

    @staticmethod
    def write(rows: Iterable[MediaRow], folder: Path) -> None:
        """Writes rows, one at a time, into the files of a folder."""
        facts, text, ends = bytearray(), bytearray(), array("q")
        pack = _PACKED.pack
        for row in rows:
            source, path, medium, captions, frames, fps, height, width, archive, start, size = row
            facts += pack(
                source,
                medium == "image",
                frames or 0,
                height or 0,
                width or 0,
                fps or 0.0,
                -1 if archive is None else archive,
                start,
                size,
            )
            joined = _BETWEEN.join((path, *captions))
            if joined.count(_BETWEEN) > len(captions):
                joined = _BETWEEN.join(word.replace(_BETWEEN, " ") for word in (path, *captions))
            text += joined.encode()
            ends.append(len(text))
        np.save(folder / "facts.npy", np.frombuffer(facts, dtype=_FACTS))
        np.save(folder / "text.npy", np.frombuffer(text, dtype=np.uint8))
        np.save(folder / "ends.npy", np.frombuffer(ends, dtype=np.int64))


def read_once(write: Callable[[Path], T]) -> tuple[Path, T]:
    """Calls `write` on one rank of each host, with a folder that lasts as long as that rank.

    All ranks call it.

    Args:
        write: writes files into the folder. What it returns is sent to the other ranks.

    Returns:
        The folder, and what `write` has returned.

    Raises:
        MMError: what `write` raises, on every rank of the host.
    """
    ranks, host = Ranks.current(), socket.gethostname()
    hosts = ranks.gather(host)
    first = hosts.index(host)
    made: tuple[Path, T] | MMError | None = None
    if ranks.rank == first:
        folder = _folder()
        try:
            made = folder, write(folder)
        except MMError as error:
            made = error
    made = ranks.gather(made)[first]
    if isinstance(made, MMError):
        raise made
    assert made is not None, "the first rank of a host has written its rows, or failed"
    if made[0].is_dir():
        return made
    folder = _folder()  # in a container of its own, with its own temporary folder
    return folder, write(folder)


def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="rows-", dir=util.get_temp_dir()))
