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
"""false; true: Python files in the folder run; known: they run if this user has trained with all of them. In
the config of a stored run, `true` is read as `known`."""

_WHAT = "code in the folder of a model"
_CHOOSING = {"auto_map", "_name_or_path", "name_or_path"}
"""Keys of config.json that select the code of the model, and where it is."""

MAX_FILES = 20_000
"""Most files in a model's folder and its subfolders: a link may lead to an entire disk."""


@contextmanager
def code_folder(folder: Path, trust: RemoteCode) -> Iterator[Path]:
    """Within the block, the folder that Transformers opens for a model with code that may be untrusted.

    With `known`, it is a private copy of the checked code files, with links to all other files: Transformers
    reads the files again, and they could change in between. Otherwise it is the folder itself.

    Args:
        folder: the model's folder.
        trust: whether Python files in the folder may run.

    Raises:
        TrustError: with `known`, this user has not trained with the folder's code.
    """
    if trust != "known" or not folder.is_dir():
        yield folder
        return
    files = _files(folder)
    _check_within(folder, files)
    check_known(_pieces(folder, files), str(folder), _WHAT)
    with tempfile.TemporaryDirectory(prefix="mm_core-code-") as private:
        # Transformers names the modules after the folder.
        place = Path(private) / (folder.resolve().name or "model")
        place.mkdir()
        for name, content in files.items():
            copy = place / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                copy.write_bytes(content)
            else:
                copy.symlink_to(content.resolve())
        yield place


def _files(folder: Path) -> dict[str, bytes | Path]:
    """The files of a folder and its subfolders, following links: path in the folder -> file.

    Files that can determine which code runs (Python and JSON) are read, once: their content is checked and
    used. Hidden folders and `__pycache__` are skipped, so Transformers does not see them either.
    """
    found: dict[str, bytes | Path] = {}
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
            what = f"the model's folder contains more than {MAX_FILES:,} files, too many to check for code"
            raise CheckpointError(what, where=str(folder), accepted="a folder that contains only the model")
        for path in (Path(place, name) for name in sorted(names)):
            found[str(path.relative_to(folder))] = _read(path) if path.suffix in (".py", ".json") else path
    return found


def _check_within(folder: Path, files: Mapping[str, bytes | Path]) -> None:
    """Raises TrustError for classes in other folders or repositories, which no hash covers."""
    outside = [
        f"{folder / name} ({value})"
        for name, content in files.items()
        if name.endswith(".json") and isinstance(content, bytes)
        for _, value, names_class in _values(_parsed(content))
        if names_class and isinstance(value, str)
        if "--" in value or value.startswith("/") or ".." in value.split("/")
    ]
    if outside:
        raise untrusted(outside, str(folder), "code outside of the folder of a model")


def code_pieces(folder: Path) -> list[Piece]:
    """The code of a model's folder as entries for the list of code that this user has trained with.

    Raises:
        CheckpointError: a file cannot be read.
    """
    return _pieces(folder, _files(folder))


def check_overrides(changes: Mapping[str, object], trust: RemoteCode) -> None:
    """Checks that overrides of a model's config.json do not select other code.

    Args:
        changes: the overrides.
        trust: whether Python files in the model's folder may run.

    Raises:
        TrustError: with `known`, an override selects code.
    """
    if trust == "known" and (keys := sorted({key for key, *_ in _values(changes)} & _CHOOSING)):
        names = [f"what {key} names" for key in keys]
        raise untrusted(names, "task.overrides", _WHAT)


def _pieces(folder: Path, files: Mapping[str, bytes | Path]) -> list[Piece]:
    """The files that determine which code a model's folder runs: its Python files, and the JSON files that
    name classes in them.

    The hash covers the path in the folder too: known files with swapped names are different code.
    """
    return [
        Piece(str(folder / name), digest_of(f"file of a model {json.dumps(name)}\n".encode() + content))
        for name, content in files.items()
        if isinstance(content, bytes)
        if name.endswith(".py") or any(names_class for *_, names_class in _values(_parsed(content)))
    ]


def _read(path: Path) -> bytes:
    """Reads a file; only Python files have a size limit, as JSON vocabularies may be larger than any code."""
    try:
        return read_source(path) if path.suffix == ".py" else path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path.name} cannot be read: {plain_reason(error)}",
            where=str(path),
            hint="check the file's permissions, or copy the model's folder again",
        ) from None


def _parsed(content: bytes) -> object:
    """A JSON file. One that does not parse counts as one that names classes: another parser may read it."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return {"auto_map": None}


def _values(value: object) -> Iterator[tuple[str, object, bool]]:
    """The values of a JSON file, at any depth: their nearest key, the value, and whether an `auto_map`, which
    names classes, contains it."""
    pending = [("", value, False)]
    while pending:
        key, value, named = pending.pop()
        named = named or key == "auto_map"
        yield key, value, named
        if isinstance(value, Mapping):
            pending += [(str(inner), child, named) for inner, child in value.items()]
        elif isinstance(value, list | tuple):
            pending += [(key, child, named) for child in value]
