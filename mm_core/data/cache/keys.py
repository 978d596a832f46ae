"""What the keys of the feature cache are made of: components with their settings, files and libraries."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mm_core.contracts import SupportsFiles, SupportsWeightsFrom
from mm_core.data.cache.hashes import FileHashes, Span, digest
from mm_core.errors import CacheError
from mm_core.schema.fields import ComponentConfig

FEATURES = 1
"""Version of what readers, transforms and tasks compute: raised when the same settings give other results."""

_UNREAD = ("README*", "LICENSE*", "*.md", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.webp")
"""Files of a component's folder that no loader reads, beside hidden ones."""


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


def libraries(of_text: bool) -> dict[str, str]:
    """The versions, as far as results may change beyond rounding, of libraries that compute features."""
    found = {}
    for name, parts in {"diffusers": 2, "transformers": 2, **({} if of_text else {"Pillow": 1})}.items():
        with suppress(PackageNotFoundError):
            found[name] = ".".join(version(name).split(".")[:parts])
    if not of_text:
        import av

        found["FFmpeg"] = av.ffmpeg_version_info.split(".")[0]
    return found


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
    files = _files(section, component)
    found = hashes.of([Span(file) for file in files.values()])
    missing = [str(file) for file, known in zip(files.values(), found, strict=True) if known is None]
    if missing:
        raise CacheError(f"files of {name} cannot be read: {', '.join(missing)}")
    inside = {place for file in files.values() for place in (file, *file.parents)}
    return {
        "type": name,
        "options": _without_paths(plain(section.options), inside),
        "files": sorted([own, (known or b"").hex()] for own, known in zip(files, found, strict=True)),
    }


def _without_paths(value: object, inside: set[Path]) -> Any:
    """Options without those that lead to a component's files."""

    def leads(one: object) -> bool:
        return isinstance(one, str) and one != "" and _absolute(one) in inside

    if isinstance(value, dict):
        return {name: _without_paths(one, inside) for name, one in value.items() if not leads(one)}
    if isinstance(value, list):
        return [_without_paths(one, inside) for one in value if not leads(one)]
    return value


def _files(section: ComponentConfig, component: object) -> dict[str, Path]:
    """The files that a component reads, by names that stay when all of them are moved: the number of the
    path in its options that they are below, if there are several, and their place among the others there."""
    texts = [*_texts(section.options)]
    if isinstance(component, SupportsWeightsFrom) and component.weights_from is not None:
        texts.append(component.weights_from.path)
    paths = [_absolute(text) for text in dict.fromkeys(text for text in texts if text)]
    listed = component.files() if isinstance(component, SupportsFiles) else None
    files = {_absolute(file) for file in listed} if listed is not None else set().union(*map(_below, paths))
    groups: dict[int, list[Path]] = {}
    for file in sorted(files):
        above = [n for n, path in enumerate(paths) if file.is_relative_to(path)]
        groups.setdefault(max(above, key=lambda n: len(paths[n].parts), default=-1), []).append(file)
    found: dict[str, Path] = {}
    for place, number in enumerate(sorted(groups)):
        shared = os.path.commonpath([file.parent for file in groups[number]])
        before = f"{place}/" if len(groups) > 1 else ""
        found |= {f"{before}{file.relative_to(shared).as_posix()}": file for file in groups[number]}
    return found


def _absolute(path: str | Path) -> Path:
    """Without following links: those of a download's cache have names, and lead to files without."""
    return Path(os.path.normpath(Path(path).absolute()))


def _below(path: Path) -> set[Path]:
    """A file, or the files below a folder that a loader may read."""
    if not path.is_dir():
        return {path} if path.is_file() else set()
    return {
        file
        for file in path.rglob("*")
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
        and not any(file.match(pattern) for pattern in _UNREAD)
        and file.is_file()
    }


def _texts(value: object) -> list[str]:
    """All texts in a value of a config, in an order that does not depend on that of mappings."""
    if isinstance(value, (str, Path)):
        return [str(value)]
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Mapping):
        value = [value[name] for name in sorted(value)]
    return [text for item in value for text in _texts(item)] if isinstance(value, (list, tuple)) else []
