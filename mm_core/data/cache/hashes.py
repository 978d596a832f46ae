"""Hashes of the bytes of files, remembered in a feature cache, so that a start reads no file again."""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mm_core.files import open_plain, read_plain, replacing

_KNOWN = np.dtype([("high", "<u8"), ("low", "<u8"), ("hash", "V16")])
"""What is remembered: a digest of a file's path, size and time of change, and the hash of its bytes."""

FILES = "files"
"""The folder of the remembered hashes in a cache."""

_RECENT = 2 * 10**9  # nanoseconds in which a file may change again without another time
_MOST_FILES = 32
_THREADS = 8
_AS_EVER = bytes(16)


class Span(NamedTuple):
    """A file, or `size` bytes of it from `start`.

    With `clip` or `image`, the hash is another one if it has changed how this clip or image is read.
    """

    path: Path
    start: int = 0
    size: int = -1
    clip: bool = False
    image: bool = False

    @property
    def version(self) -> bytes:
        """The version of how clips or images are read; nothing for another file."""
        return b"clips 2" if self.clip else b"images 2" if self.image else b""


def digest(*parts: bytes) -> bytes:
    """16 bytes of a hash of parts; only the last one may vary in length."""
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


Hash = bytes | None
_Named = tuple[Span, bytes, int | None]
"""A span, a digest of its file's path, size and time of change, and the time; None without a file."""


class Lookup:
    """Finds keys of 128 bits among others by binary search.

    Args:
        keys: structured array [N] with `high` and `low`.
        last: [N], above 0 for those that are found only where no other has the same key.
    """

    def __init__(self, keys: np.ndarray[Any, np.dtype[np.void]], *last: np.ndarray[Any, Any]) -> None:
        self.keys = keys
        self._order = np.lexsort((*last, keys["high"]))
        self._high = keys["high"][self._order]

    def find(self, keys: np.ndarray[Any, np.dtype[np.void]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The place of each key, int64 of the keys' shape; -1 where it is not among the others."""
        flat = np.ascontiguousarray(keys).reshape(-1)
        found = np.full(len(flat), -1, dtype=np.int64)
        left = np.searchsorted(self._high, flat["high"])
        for _ in range(8):  # entries written twice, and 64 bits that are equal by chance
            there = np.flatnonzero((found < 0) & (left < len(self._high)))
            there = there[self._high[left[there]] == flat["high"][there]]
            places = self._order[left[there]]
            same = self.keys["low"][places] == flat["low"][there]
            found[there[same]] = places[same]
            left[there] += 1
        return found.reshape(keys.shape)


class FileHashes:
    """Hashes of files; those of known files (path, size, time of change) are not read again.

    Args:
        folder: of the remembered hashes; it need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read = 0
        """Number of files that were read."""
        self._new: dict[bytes, bytes] = {}

    @cached_property
    def _known(self) -> Lookup:
        found, self._loaded = [np.empty(0, _KNOWN)], list[Path]()
        for path in sorted(self.folder.glob("*.hashes")):
            with suppress(OSError):  # another process has joined it with others
                content = read_plain(path)
                self._loaded.append(path)
                if content[:16] == digest(content[16:]):  # damaged: its files are read again
                    found.append(np.frombuffer(content[16:], _KNOWN))
        return Lookup(np.concatenate(found))

    def of(self, spans: Sequence[Span]) -> list[Hash]:
        """The 16 bytes of the hash of each file; None where there is none, or it cannot be read."""
        named = [_name(span) for span in spans]
        found = self._of(named, _hashed)
        media = [n for n, each in enumerate(spans) if each.version and found[n] is not None]
        versions = [(span, digest(key, span.version), at) for span, key, at in (named[n] for n in media)]
        for n, mark in zip(media, self._of(versions, _marked), strict=True):
            if mark != _AS_EVER:
                found[n] = digest(found[n] or b"", mark or b"")
        return found

    def _of(self, named: Sequence[_Named], read: Callable[[Span], Hash]) -> list[Hash]:
        """16 bytes of each span under its name: known ones, or what is read."""
        keys = np.frombuffer(b"".join(key for _, key, _ in named), _KNOWN.descr[:2])
        places = self._known.find(keys).tolist()
        found = [
            self._new.get(key) or (None if place < 0 else self._known.keys["hash"][place].tobytes())
            for (_, key, _), place in zip(named, places, strict=True)
        ]
        unknown = [n for n, (*_, changed) in enumerate(named) if changed is not None and found[n] is None]
        self.read += len(unknown) * (read is _hashed)
        with ThreadPoolExecutor(_THREADS) as pool:
            for place, fact in zip(unknown, pool.map(read, (named[n][0] for n in unknown)), strict=True):
                found[place], (_, key, changed) = fact, named[place]
                if fact is not None and changed is not None and time.time_ns() - changed > _RECENT:
                    self._new[key] = fact
        return found

    def save(self) -> None:
        """Remembers new hashes, and finds those that others have; in a read-only cache they stay here."""
        if not self._new:
            return
        new = np.frombuffer(b"".join(key + read for key, read in self._new.items()), _KNOWN)
        joins = len(self._loaded) >= _MOST_FILES
        if joins:
            new = np.concatenate([self._known.keys, new])
            new = new[np.unique(new["high"], return_index=True)[1]]
        with suppress(OSError):
            self.folder.mkdir(exist_ok=True)
            with replacing(self.folder / f"{secrets.token_hex(8)}.hashes") as staged:
                staged.write_bytes(digest(new.tobytes()) + new.tobytes())
            for path in self._loaded if joins else ():
                path.unlink(missing_ok=True)
            self._new.clear()
            del self._known


def _name(span: Span) -> _Named:
    try:
        found = span.path.stat()
    except (OSError, ValueError):
        return span, bytes(16), None
    name = f"{span.path.absolute()}\0{found.st_size}\0{found.st_mtime_ns}\0{span.start}\0{span.size}"
    return span, digest(os.fsencode(name)), found.st_mtime_ns


def _marked(span: Span) -> bytes:
    """How a clip or image is read by its header: `_AS_EVER`, or the version since which it is so."""
    from mm_core.data.media.versions import read_anew

    with suppress(OSError):
        return digest(span.version) if read_anew(*span[:3], clip=span.clip) else _AS_EVER
    return _AS_EVER


def _hashed(span: Span) -> Hash:
    found, left = hashlib.blake2b(digest_size=16), span.size if span.size >= 0 else sys.maxsize
    try:
        with open_plain(span.path) as file:
            file.seek(span.start)
            while piece := file.read(min(left, 1 << 20)):
                found.update(piece)
                left -= len(piece)
    except OSError:
        return None
    return found.digest()
