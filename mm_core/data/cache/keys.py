"""Keys of the feature cache: digests of files, of components with their settings, and of samples."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mm_core.contracts import SupportsFiles, SupportsWeightsFrom
from mm_core.data.cache.shards import KEY, Keys
from mm_core.data.cache.store import Store
from mm_core.errors import CacheError
from mm_core.schema.fields import ComponentConfig

_FILE = int.from_bytes(b"the file", "little")
"""In the place of an encoder: the entry has no features, but the hash of a file in its own key."""

FAULTY = int.from_bytes(b"a fault.", "little")
"""In the place of an encoder: the sample cannot be read, and the entry has the reason."""

_READ_BY = ("*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken")
"""Files of a folder that a component without `files` may read."""

_RECENT = 2 * 10**9  # nanoseconds in which a file may change again without another time
_THREADS = 8


def digest(*parts: bytes) -> bytes:
    """16 bytes of a hash of parts; only the last one may vary in length."""
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def digest_of(value: object) -> bytes:
    """The digest of a plain value: mappings in any order, dataclasses, sequences, texts, numbers."""
    return digest(json.dumps(plain(value), sort_keys=True).encode())


def plain(value: object) -> Any:
    """A value of a config as JSON has it."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


class Span(NamedTuple):
    """A file, or `size` bytes of it from `start`."""

    path: Path
    start: int = 0
    size: int = -1


class FileHashes:
    """Hashes of the bytes of files; those of known files (path, size, time of change) are not read again.

    Args:
        store: remembers the hashes.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.read = 0
        """Number of files that were read."""

    def of(self, spans: Sequence[Span]) -> list[bytes | None]:
        """The 16 bytes of the hash of each file; None where there is no file."""
        known = np.zeros(len(spans), KEY)
        changed = [_identified(span, known[place : place + 1]) for place, span in enumerate(spans)]
        places = self.store.find(known)
        content = self.store.keys[places] if len(self.store) else known
        joined = np.stack([content["content"], content["made"]], axis=1) if len(spans) else np.empty((0, 2))
        found: list[bytes | None] = [row.tobytes() for row in joined]
        unknown = [n for n in range(len(spans)) if changed[n] is None or places[n] < 0]
        with ThreadPoolExecutor(_THREADS) as pool:
            for place, read in zip(unknown, pool.map(_hashed, (spans[n] for n in unknown)), strict=True):
                found[place] = read
        self.read += sum(changed[n] is not None for n in unknown)
        now = time.time_ns()
        new = [n for n in unknown if found[n] is not None and now - (changed[n] or now) > _RECENT]
        for place in new:
            known[["content", "made"]][place] = tuple(np.frombuffer(found[place] or b"", "<u8"))
        self._remember(known[new])
        return found

    def _remember(self, known: Keys) -> None:
        known["encoder"] = _FILE
        try:
            self.store.add(known, [{}] * len(known))
        except CacheError:
            return  # a cache that is only read works too: the files are read again
        self.store.refresh()


def is_of_file(keys: Keys) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which keys are those of remembered hashes of files, not of features."""
    return np.asarray(keys["encoder"] == _FILE)


def _identified(span: Span, into: Keys) -> int | None:
    """Fills in the key of a file's path, size and time of change; the time, or None without a file."""
    try:
        found = span.path.stat()
    except OSError:
        return None
    name = f"{span.path.absolute()}\0{found.st_size}\0{found.st_mtime_ns}\0{span.start}\0{span.size}"
    fill(into, digest(os.fsencode(name)))
    return found.st_mtime_ns


def fill(into: Keys, key: bytes) -> None:
    """Sets the 128 bits of a key."""
    into["high"], into["low"] = np.frombuffer(key, "<u8")


def _hashed(span: Span) -> bytes | None:
    found, left = hashlib.blake2b(digest_size=16), span.size
    try:
        with span.path.open("rb") as file:
            file.seek(span.start)
            while piece := file.read(1 << 20 if left < 0 else min(left, 1 << 20)):
                found.update(piece)
                left -= len(piece) if left > 0 else 0
                if not left:
                    break
    except OSError:
        return None
    return found.digest()


def component_facts(
    section: ComponentConfig, component: object, name: str, hashes: FileHashes
) -> dict[str, Any]:
    """What a frozen component's results depend on: its type, its options but paths, the bytes of its files.

    Args:
        section: the component in the config.
        component: as built, loaded or not.
        name: the qualified name of its type.
        hashes: of files.
    """
    files = sorted(_files(section, component))
    inside = {place for file in files for place in (file, *file.parents)}
    found = hashes.of([Span(file) for file in files])
    missing = [str(file) for file, known in zip(files, found, strict=True) if known is None]
    if missing:
        raise CacheError(f"files of {name} cannot be read: {', '.join(missing)}")
    return {
        "type": name,
        "options": _without_paths(section.options, inside),
        "files": sorted([file.name, (known or b"").hex()] for file, known in zip(files, found, strict=True)),
    }


def _without_paths(value: object, inside: set[Path]) -> Any:
    """Options without those that lead to a component's files."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        kept = {name: _without_paths(one, inside) for name, one in value.items()}
        return {name: one for name, one in kept.items() if one is not _PATH}
    if isinstance(value, (list, tuple)):
        return [one for each in value if (one := _without_paths(each, inside)) is not _PATH]
    if isinstance(value, (str, Path)) and value and Path(value).resolve() in inside:
        return _PATH
    return plain(value)


_PATH = object()


def _files(section: ComponentConfig, component: object) -> set[Path]:
    """Absolute paths of the files that a component reads."""
    if isinstance(component, SupportsFiles):
        return {file.resolve() for file in component.files()}
    texts = [*_texts(section.options)]
    if isinstance(component, SupportsWeightsFrom) and component.weights_from is not None:
        texts.append(component.weights_from.path)
    found: set[Path] = set()
    for path in (Path(text).resolve() for text in texts if text):
        if path.is_dir():
            found |= {file for pattern in _READ_BY for file in path.rglob(pattern) if file.is_file()}
        elif path.is_file():
            found.add(path)
    return found


def _texts(value: object) -> list[str]:
    if isinstance(value, (str, Path)):
        return [str(value)]
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    items = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    )
    return [text for item in items for text in _texts(item)]
