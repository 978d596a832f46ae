"""Hashes of the bytes of files, remembered in a feature cache, so that a start reads no file again."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mm_core.data.cache.store import Lookup
from mm_core.files import open_plain, read_plain, replacing

_KNOWN = np.dtype([("high", "<u8"), ("low", "<u8"), ("hash", "V16")])
"""What is remembered: a digest of a file's path, size and time of change, and the hash of its bytes."""

FILES = "files"
"""The folder of the remembered hashes in a cache."""

_RECENT = 2 * 10**9  # nanoseconds in which a file may change again without another time
_MOST_FILES = 32
_THREADS = 8
_CLIPS = b"clips 2"
_IMAGES = b"images 2"
"""Versions of how clips and images are read."""
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


def digest(*parts: bytes) -> bytes:
    """16 bytes of a hash of parts; only the last one may vary in length."""
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


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
        self._loaded: list[Path] = []

    def __reduce__(self) -> tuple[object, ...]:
        return FileHashes, (self.folder,)

    @cached_property
    def _known(self) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        found = [np.empty(0, _KNOWN)]
        for path in sorted(self.folder.glob("*.hashes")):
            with suppress(OSError):  # another process has joined it with others
                content = read_plain(path)
                self._loaded.append(path)
                if content[:16] == digest(content[16:]):  # damaged: its files are read again
                    found.append(np.frombuffer(content[16:], _KNOWN))
        return np.concatenate(found)

    @cached_property
    def _lookup(self) -> Lookup:
        return Lookup(self._known)

    def of(self, spans: Sequence[Span], fresh: bool = False) -> list[bytes | None]:
        """The 16 bytes of the hash of each file; None where there is none, or it cannot be read.

        Args:
            spans: the files.
            fresh: whether known ones are read again.
        """
        names = [_name(span) for span in spans]
        found = self._of(spans, names, _hashed, fresh)
        media = [n for n, each in enumerate(spans) if (each.clip or each.image) and found[n] is not None]
        versions = [(digest(names[n][0], _version(spans[n])), names[n][1]) for n in media]
        marks = self._of([spans[n] for n in media], versions, _marked, fresh)
        for n, mark in zip(media, marks, strict=True):
            if mark != _AS_EVER:
                found[n] = digest(found[n] or b"", mark or b"")
        return found

    def _of(
        self,
        spans: Sequence[Span],
        names: Sequence[tuple[bytes, int | None]],
        read: Callable[[Span], bytes | None],
        fresh: bool,
    ) -> list[bytes | None]:
        """16 bytes of each span under its name: known ones, or what is read."""
        keys = np.frombuffer(b"".join(key for key, _ in names), _KNOWN.descr[:2])
        places = self._lookup.find(keys).tolist()
        found = [
            self._new.get(key) or (None if place < 0 else self._known["hash"][place].tobytes())
            for (key, _), place in zip(names, places, strict=True)
        ]
        there = [n for n, (_, changed) in enumerate(names) if changed is not None]
        unknown = [n for n in there if fresh or found[n] is None]
        if unknown:
            self.read += len(unknown) * (read is _hashed)
            with ThreadPoolExecutor(_THREADS) as pool:
                for place, fact in zip(unknown, pool.map(read, (spans[n] for n in unknown)), strict=True):
                    found[place] = fact
                    key, changed = names[place]
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
            new = np.concatenate([self._known, new])
            new = new[np.unique(new["high"], return_index=True)[1]]
        with suppress(OSError):
            self.folder.mkdir(exist_ok=True)
            with replacing(self.folder / f"{secrets.token_hex(8)}.hashes") as staged:
                staged.write_bytes(digest(new.tobytes()) + new.tobytes())
            for path in self._loaded if joins else ():
                path.unlink(missing_ok=True)
            for held in (self._new, self._loaded):
                held.clear()
            for name in ("_known", "_lookup"):
                self.__dict__.pop(name, None)


def _name(span: Span) -> tuple[bytes, int | None]:
    """A digest of a file's path, size and time of change, and the time; None without a file."""
    try:
        found = span.path.stat()
    except (OSError, ValueError):
        return bytes(16), None
    name = f"{span.path.absolute()}\0{found.st_size}\0{found.st_mtime_ns}\0{span.start}\0{span.size}"
    return digest(os.fsencode(name)), found.st_mtime_ns


def _version(span: Span) -> bytes:
    return _CLIPS if span.clip else _IMAGES


def _marked(span: Span) -> bytes:
    """How a clip or image is read by its header: `_AS_EVER`, or the version since which it is so."""
    from mm_core.data.media.versions import read_anew

    with suppress(OSError):
        return digest(_version(span)) if read_anew(*span[:3], clip=span.clip) else _AS_EVER
    return _AS_EVER


def _hashed(span: Span) -> bytes | None:
    found, left = hashlib.blake2b(digest_size=16), span.size
    try:
        with open_plain(span.path) as file:
            file.seek(span.start)
            while piece := file.read(1 << 20 if left < 0 else min(left, 1 << 20)):
                found.update(piece)
                left -= len(piece) if left > 0 else 0
                if not left:
                    break
    except OSError:
        return None
    return found.digest()
