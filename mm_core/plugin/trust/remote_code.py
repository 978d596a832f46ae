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
    files = dict(_files(folder))
    code = _code(files)
    _check_within(folder, code)
    check_known(_pieces(folder, code), str(folder), _WHAT)
    with tempfile.TemporaryDirectory(prefix="mm_core-code-") as private:
        # Transformers names the modules after the folder.
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


def _code(files: Mapping[str, Path]) -> dict[str, bytes]:
    """The files that determine which code a model's folder runs: path in the folder -> content.

    These are its Python files, at any depth, and the JSON files that name classes in them.
    """
    found = {name: _read(path) for name, path in files.items() if path.suffix == ".py"}
    for name, path in files.items():
        if path.suffix == ".json" and _chooses(content := _read(path)):
            found[name] = content
    return found


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files of a folder and its subfolders, following links, each with its path in the folder.

    Hidden folders and `__pycache__` are skipped, so Transformers does not see them either.
    """
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
        for name in sorted(names):
            path = Path(place) / name
            yield str(path.relative_to(folder)), path


def _check_within(folder: Path, code: Mapping[str, bytes]) -> None:
    """Raises TrustError for classes in other folders or repositories, which no hash covers."""
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
    """The code of a model's folder as entries for the list of code that this user has trained with.

    Raises:
        CheckpointError: a file cannot be read.
    """
    return _pieces(folder, _code(dict(_files(folder))))


def check_overrides(changes: Mapping[str, object], trust: RemoteCode) -> None:
    """Checks that overrides of a model's config.json do not select other code.

    Args:
        changes: the overrides.
        trust: whether Python files in the model's folder may run.

    Raises:
        TrustError: with `known`, an override selects code.
    """
    if trust == "known" and (keys := sorted(_keys(changes) & _CHOOSING)):
        names = [f"what {key} names" for key in keys]
        raise untrusted(names, "task.overrides", _WHAT)


def _pieces(folder: Path, code: Mapping[str, bytes]) -> list[Piece]:
    """The hash covers the path in the folder too: known files with swapped names are different code."""
    return [
        Piece(str(folder / name), digest_of(f"file of a model {json.dumps(name)}\n".encode() + content))
        for name, content in code.items()
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


def _chooses(content: bytes) -> bool:
    """Whether a JSON file names classes. True for one that does not parse: another parser may read it."""
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
    """The classes named by each `auto_map` in a JSON file; none if it does not parse."""
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
