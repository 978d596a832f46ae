"""Python files in the folder of a Transformers model: `trust_remote_code` of tasks and datasets."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from mm_core.errors import CheckpointError, plain_reason
from mm_core.plugin.trust.known import Piece, check_known, digest_of, read_source, untrusted

RemoteCode = bool | Literal["known"]
"""false; true: the folder's Python files run; known: where this user has trained with all of them. A stored
run's `true` is read as `known`."""

_WHAT = "code in the folder of a model"
_CHOOSING = {"auto_map", "_name_or_path", "name_or_path"}
"""Keys of config.json that say which code makes the model, and where it is."""

MAX_FILES = 20_000
"""In the folder of a model and those in it: a link may lead to a whole disk."""


@contextmanager
def code_folder(folder: Path, trust: RemoteCode) -> Iterator[Path]:
    """The folder for Transformers to open, for the length of the block: itself, or with `known` a private
    copy of the code that was checked, with links to all else. Transformers would read the files again, and by
    then they may be others.

    TrustError, with `known`, for files that this user has not trained with.
    """
    if trust != "known" or not folder.is_dir():
        yield folder
        return
    files = dict(_files(folder))
    code = _code(files)
    _check_within(folder, code)
    check_known(_pieces(folder, code), str(folder), _WHAT)
    with tempfile.TemporaryDirectory(prefix="mm_core-code-") as private:
        # Transformers names the modules by the folder.
        place = Path(private) / (folder.resolve().name or "model")
        for name, path in files.items():
            copy = place / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            if name in code:
                copy.write_bytes(code[name])
            elif path.suffix == ".json":
                copy.write_bytes(_read(path))
            else:
                copy.symlink_to(path.resolve())
        place.mkdir(parents=True, exist_ok=True)
        yield place


def code_files(folder: Path) -> dict[str, bytes]:
    """Path in the folder -> content of what decides which code it runs: its Python files, at any depth, and
    the JSON files that name classes in them. CheckpointError for one that cannot be read."""
    return _code(dict(_files(folder)))


def _code(files: Mapping[str, Path]) -> dict[str, bytes]:
    found = {name: _read(path) for name, path in files.items() if path.suffix == ".py"}
    for name, path in files.items():
        if path.suffix == ".json" and _chooses(content := _read(path)):
            found[name] = content
    return found


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files of a folder and of those in it, whose links are followed, each by its path in the folder.
    Hidden folders and those of compiled files are left out, and so are not there for Transformers either."""
    seen: set[str] = set()
    count = 0
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        if real in seen:  # links in a circle
            folders.clear()
            continue
        seen.add(real)
        count += len(folders) + len(names)
        if count > MAX_FILES:
            what = f"more than {MAX_FILES:,} files lie in the folder of a model, so its code cannot be told"
            raise CheckpointError(what, where=str(folder), accepted="a folder of the model alone")
        for name in sorted(names):
            path = Path(place) / name
            yield str(path.relative_to(folder)), path


def _check_within(folder: Path, code: Mapping[str, bytes]) -> None:
    """TrustError for classes that a folder names in other folders or repositories: nothing hashes these."""
    outside = [
        f"{folder / name} ({reference})"
        for name, content in code.items()
        if not name.endswith(".py")
        for reference in _references(content)
        if "--" in reference or reference.startswith("/") or ".." in reference.split("/")
    ]
    if outside:
        raise untrusted(outside, str(folder), "code outside of the folder of a model")


def code_pieces(folder: Path) -> list[Piece]:
    """The same, as the list of known code has them."""
    return _pieces(folder, code_files(folder))


def check_overrides(changes: Mapping[str, object], trust: RemoteCode) -> None:
    """TrustError, with `known`, for keys laid upon config.json that would have other code run."""
    if trust == "known" and (keys := sorted(_keys(changes) & _CHOOSING)):
        names = [f"what {key} names" for key in keys]
        raise untrusted(names, "task.overrides", _WHAT)


def _pieces(folder: Path, code: Mapping[str, bytes]) -> list[Piece]:
    """The place within the folder counts too: known files under each other's names are other code."""
    return [
        Piece(str(folder / name), digest_of(f"file of a model {json.dumps(name)}\n".encode() + content))
        for name, content in code.items()
    ]


def _read(path: Path) -> bytes:
    """Vocabularies are JSON too, and may be larger than any code."""
    try:
        return read_source(path) if path.suffix == ".py" else path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {plain_reason(error)}", where=str(path)) from None


def _chooses(content: bytes) -> bool:
    """Whether a JSON file names classes. One that does not parse may, to another parser."""
    try:
        return "auto_map" in _keys(json.loads(content))
    except (ValueError, RecursionError):
        return True


def _keys(value: object) -> set[str]:
    if isinstance(value, Mapping):
        return set(map(str, value)).union(*map(_keys, value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(_keys, value))
    return set()


def _references(content: bytes) -> Iterator[str]:
    """What each `auto_map` in a JSON file names; nothing of one that does not parse."""
    try:
        pending = [(json.loads(content), False)]
    except (ValueError, RecursionError):
        return
    while pending:
        value, within = pending.pop()
        if isinstance(value, Mapping):
            pending += [(child, within or key == "auto_map") for key, child in value.items()]
        elif isinstance(value, list):
            pending += [(child, within) for child in value]
        elif within and isinstance(value, str):
            yield value
