"""Reading the JSON files of a checkpoint; invalid values (-5 steps, a list for a mapping) are refused.

Checksums find accidents only: a file that was edited, or written by a stranger or another program, can have
correct checksums. Code that uses these values can rely on their types and ranges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeGuard

from mm_core.checkpoint.files import layout as files
from mm_core.errors import CheckpointError

STEP = re.compile(r"step_([0-9]{8,15})\Z")
"""The name of a checkpoint's folder."""

_MOST = 10**15


def step_name(step: int) -> str:
    """The name of the checkpoint folder for a step."""
    return f"step_{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step in the name of a checkpoint folder; None for any other name, also one with too many zeros."""
    match = STEP.match(folder.name)
    return int(match[1]) if match and step_name(int(match[1])) == folder.name else None


def _whole(value: object, least: int = -_MOST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST


def _number(value: object) -> bool:
    return (isinstance(value, float) and value >= 0) or _whole(value, 0)


def _count(value: object) -> bool:
    return _whole(value, 0)


def _mapping(value: object) -> TypeGuard[files.Document]:
    return isinstance(value, dict)


def _text(value: object) -> bool:
    return isinstance(value, str)


def _rows(value: object) -> bool:
    return isinstance(value, list) and all(map(_mapping, value))


def _texts(value: object) -> bool:
    return isinstance(value, dict) and all(map(_text, value.values()))


def _metrics(value: object) -> bool:
    return _mapping(value) and all(isinstance(one, str | float) or _whole(one) for one in value.values())


def _guard(value: object) -> bool:
    if not _mapping(value):
        return value is None
    counts, norms = (value.get(name, 0) for name in ("in_a_row", "in_all", "spikes")), value.get("norms", [])
    return all(map(_count, counts)) and isinstance(norms, list) and all(map(_number, norms))


def _data(value: object) -> bool:
    return isinstance(value, dict) and all(
        _mapping(row) and _mapping(row.get("files", {})) for row in value.values()
    )


def _config(value: object) -> bool:
    return isinstance(value, dict) and _mapping(value.get("train", {}))


_Rules = Mapping[str, tuple[Callable[[object], bool], str]]
_FACTS: _Rules = {
    "torch": (_text, "text"),
    "seed": (_whole, "an integer"),
    "samples": (_number, "a number >= 0"),
    "world": (_count, "an integer >= 0"),
    "ema_updates": (_count, "an integer >= 0"),
    "order": (_mapping, "a mapping"),
    "guard": (_guard, "null, or a mapping with counts of skipped steps and a list of norms"),
    "metrics": (_metrics, "a mapping of names to numbers"),
    "evaluated": (lambda value: isinstance(value, bool), "true or false"),
    "imported": (_mapping, "a mapping"),
}
_MANIFEST: _Rules = {
    "config": (_config, "a mapping of sections"),
    "environment": (_texts, "a mapping of keys to texts"),
    "adapters": (_rows, "a list of mappings"),
    "base": (_rows, "a list of mappings"),
    "plugins": (_rows, "a list of mappings"),
    "data": (_data, "a mapping of datasets, each with its files"),
    "devices": (_mapping, "a mapping"),
    "versions": (_mapping, "a mapping"),
    "world": (_count, "an integer >= 0"),
}


def read_facts(folder: Path) -> files.Document:
    """Reads facts.json of a checkpoint; DamagedError for invalid values or a step other than the folder's."""
    facts = _under_todays_names(files.read_json(folder / files.FACTS))
    step = facts.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        raise files.DamagedError("facts.json contains no step", where=str(folder), hint=files.OTHER)
    if not 0 <= step <= _MOST:
        raise _untrue(folder, files.FACTS, "step", step, f"an integer from 0 to {_MOST}")
    named = step_of(folder.absolute())
    if named is not None and named != step:
        raise _untrue(folder, files.FACTS, "step", step, f"{named}, the step in the folder's name")
    _check(folder, files.FACTS, facts, _FACTS)
    return facts


def read_manifest(folder: Path) -> files.Document:
    """Reads manifest.json of a checkpoint; DamagedError for invalid values."""
    manifest = files.read_json(folder / files.MANIFEST)
    _check(folder, files.MANIFEST, manifest, _MANIFEST)
    return manifest


def read_later(folder: Path) -> files.Document:
    """Reads the validation results added to a checkpoint after its save; {} if there are none to read.

    The keys are `metrics` and `evaluated`.
    """
    with suppress(CheckpointError):
        later = _under_todays_names(files.read_json(folder / files.EVALUATION_FILE))
        found = {key: later.get(key) for key in ("metrics", "evaluated")}
        if all(_FACTS[key][0](value) for key, value in found.items()):
            return found
    return {}


def _under_todays_names(facts: files.Document) -> files.Document:
    """`evaluated` was called `looked` until November 2026."""
    return {"evaluated" if key == "looked" else key: value for key, value in facts.items()}


def _check(folder: Path, name: str, document: files.Document, rules: _Rules) -> None:
    for key, (holds, accepted) in rules.items():
        if key in document and not holds(document[key]):
            raise _untrue(folder, name, key, document[key], accepted)


def _untrue(folder: Path, name: str, key: str, value: object, accepted: str) -> files.DamagedError:
    shown = json.dumps(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return files.DamagedError(
        f"{name} has an invalid value, {key}: {shown}", where=str(folder), accepted=accepted, hint=files.OTHER
    )
