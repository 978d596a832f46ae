"""Files of a checkpoint: their names, how they are written to disk, and checks by checksum."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_core.errors import CheckpointError, plural, some
from mm_core.files import open_plain, write_durably

Document = Mapping[str, Any]
"""A JSON object, such as facts and manifests. The module `facts` refuses invalid values."""

CHECKSUMS = "checksums.json"
METADATA = ".metadata"
FACTS = "facts.json"
CONFIG = "config.yaml"
MANIFEST = "manifest.json"
EVALUATION_FILE = "validation.json"
FORMAT = 1
OTHER = "resume from another checkpoint: --resume PATH"
"""The hint for a damaged checkpoint."""
DISTRUST = f"do not trust this checkpoint; {OTHER}"
"""The hint for a checkpoint that may have been manipulated."""
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Exceptions raised by opening a file that does not exist."""

_AGAIN = "try again when the file system responds; if it does not, resume from another: --resume PATH"
UPGRADE = "load it with the version of mm-core that wrote it, or a newer one"

_CHUNK = 1 << 22
_LARGEST = 1 << 26  # bytes of a JSON file
_DEEPEST = 128  # nested lists and objects; a config has 100 levels at most


class DamagedError(CheckpointError):
    """A checkpoint that was changed after it was written, or is incomplete: an older one may be usable."""


def unreadable(path: Path, fault: OSError) -> CheckpointError:
    """The error for a checkpoint file that exists but cannot be read at the moment.

    This is not damage: the checkpoint may be complete once the disk or file server responds again.
    """
    return CheckpointError(
        f"{path.name} cannot be read now ({fault.strerror})", where=str(path.parent), hint=_AGAIN
    )


@dataclass(frozen=True)
class Checksum:
    """Size in bytes and crc32 of a checkpoint file."""

    size: int
    crc32: int


def checksum(path: Path) -> Checksum:
    """Computes the checksum of a checkpoint file by reading all of it."""
    size = crc = 0
    with open_plain(path) as stream:
        while chunk := stream.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return Checksum(size, crc)


def write_texts(stage: Path, texts: Mapping[str, str]) -> dict[str, Checksum]:
    """Writes the small text files of a checkpoint (on rank 0); returns their checksums and `.metadata`'s."""
    for name, text in texts.items():
        write_durably(stage / name, text)
    return {name: checksum(stage / name) for name in (*texts, METADATA)}


def write_checksums(folder: Path, files: Mapping[str, Checksum]) -> None:
    """Writes checksums.json, the checksums of all files of a checkpoint, which makes it complete."""
    rows = {
        name: {"size": entry.size, "crc32": f"{entry.crc32:08x}"} for name, entry in sorted(files.items())
    }
    write_durably(folder / CHECKSUMS, json.dumps({"format": FORMAT, "files": rows}, indent=1) + "\n")


def read_checksums(folder: Path) -> dict[str, Checksum]:
    """Reads checksums.json of a checkpoint; DamagedError if it is missing or invalid."""
    path = folder / CHECKSUMS
    try:
        document = _parsed(path)
        version, rows = document["format"], document["files"]
        files = {str(name): Checksum(int(row["size"]), int(row["crc32"], 16)) for name, row in rows.items()}
    except ABSENT:
        raise DamagedError(
            "this checkpoint is incomplete: it has no checksums.json (an interrupted copy or deletion)",
            where=str(folder),
            hint=f"copy it again, or {OTHER}",
        ) from None
    except OSError as fault:
        raise unreadable(path, fault) from fault
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as fault:
        raise DamagedError(
            f"checksums.json cannot be read ({type(fault).__name__})", where=str(folder), hint=OTHER
        ) from None
    if version != FORMAT:
        # Damage to `--resume auto`: a flipped bit and a format of the future look the same.
        raise DamagedError(
            f"this checkpoint has format {version}",
            where=str(folder),
            accepted=f"format {FORMAT}",
            hint=UPGRADE,
        )
    odd = [name for name in files if Path(name).name != name or name in {"", ".", ".."}]
    needed = {METADATA, FACTS, CONFIG} - files.keys()
    if odd or needed:
        lacks = f"does not list {', '.join(sorted(needed))}"
        fault_text = f"lists {odd[0]!r}, which is not a file name" if odd else lacks
        raise DamagedError(f"checksums.json {fault_text}", where=str(folder), hint=OTHER)
    return files


def check_present(folder: Path, files: Mapping[str, Checksum]) -> None:
    """Raises DamagedError that names every checkpoint file that is missing or has a different size."""
    faults = []
    for name, entry in files.items():
        path = folder / name
        try:
            if path.is_symlink():
                faults.append(f"{name} is a symbolic link")
            elif not path.is_file():
                faults.append(f"{name} is missing")
            elif (size := path.stat().st_size) != entry.size:
                faults.append(f"{name} has {plural(size, 'byte')} instead of {entry.size:,}")
        except OSError as fault:
            raise unreadable(path, fault) from fault
    _refuse(folder, faults)


def check_contents(folder: Path, files: Mapping[str, Checksum], names: Iterable[str]) -> None:
    """Raises DamagedError that names every checkpoint file among `names` whose bytes have changed."""
    faults = []
    for name in names:
        try:
            if checksum(folder / name) != files[name]:
                faults.append(f"{name} does not match its checksum")
        except ABSENT:
            faults.append(f"{name} is missing")
        except OSError as fault:
            raise unreadable(folder / name, fault) from fault
    _refuse(folder, faults)


def read_json(path: Path) -> Document:
    """Reads a JSON object from a checkpoint file; DamagedError if the file contains none."""
    try:
        document = _parsed(path)
    except (*ABSENT, ValueError, RecursionError) as fault:
        raise DamagedError(
            f"{path.name} cannot be read ({type(fault).__name__})", where=str(path.parent), hint=OTHER
        ) from None
    except OSError as fault:
        raise unreadable(path, fault) from fault
    if not isinstance(document, dict):
        raise DamagedError(f"{path.name} contains no JSON object", where=str(path.parent), hint=OTHER)
    return document


def _parsed(path: Path) -> Any:
    """JSON from a file, with limits on size and depth that no valid checkpoint reaches. ValueError for
    numbers that are not finite, which JSON does not have."""
    with open_plain(path) as stream:
        text = stream.read(_LARGEST + 1)
    if len(text) > _LARGEST:
        raise ValueError(f"more than {_LARGEST} bytes")
    document = json.loads(text.decode("utf-8"), parse_float=_finite, parse_constant=_finite)
    _check_depth(document, _DEEPEST)
    return document


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


def _check_depth(value: object, left: int) -> None:
    if left < 0:
        raise RecursionError(f"more than {_DEEPEST} levels")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, left - 1)


def _refuse(folder: Path, faults: list[str]) -> None:
    if faults:
        raise DamagedError(f"this checkpoint is damaged: {some(faults, 10)}", where=str(folder), hint=OTHER)
