"""What is said of weights that do not fit a task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from mm_core.checkpoint.files.mismatch import Mismatch
from mm_core.config.sections import InitFromSection
from mm_core.errors import CheckpointError, nearest
from mm_core.modules.adapter_layers import adapter_of


def mismatch_error(
    init: InitFromSection,
    found: Mismatch,
    stored: Mapping[str, str],
    absent: Sequence[str] = (),
    key: str = "init_from",
) -> CheckpointError:
    """One error with every name that does not fit.

    Args:
        stored: what a stored name would be in the task -> the stored name.
        absent: folders that are not there, in which what is missing lies.
        key: of the config that names the weights.
    """
    told = found if init.strict or not found.misshapen else Mismatch(misshapen=found.misshapen)
    left = set(told.unexpected)
    paths = [path for path, name in stored.items() if name in left]
    near = [
        f"{name} (near: {', '.join(like)})" if (like := nearest(name, paths, 1)) else name
        for name in told.missing[:10]
    ]
    told = replace(told, missing=near + told.missing[10:])
    what, hint = f"these weights do not fit the task: {told}", _hint(found)
    if absent:
        what = f"{what}; there is no folder {' and no folder '.join(absent)}"
        hint = (
            "init_from.include takes the parts that are there, and strict: false leaves the rest as it begins"
        )
    if key != "init_from":
        hint = f"{key} must have the options of the model that this folder holds"
    return CheckpointError(what, where=init.path, hint=hint)


def _hint(found: Mismatch) -> str:
    if any(adapter_of(name) is not None for name in found.unexpected):
        return "the run trained adapters: mm export --merge-lora puts them into weights to begin with"
    if likely := likely_prefix(found.missing, found.unexpected):
        start, path, count = likely
        return f"init_from.prefixes: {{{start!r}: {path!r}}} would name {count} of the missing ones"
    if found.misshapen:
        return "leave them out with init_from.exclude"
    return "rename with init_from.prefixes, leave out with init_from.exclude, or set init_from.strict: false"


def likely_prefix(missing: Collection[str], unexpected: Collection[str]) -> tuple[str, str, int] | None:
    """(start of stored names, path in the task, how many names it mends): the change of the beginning that
    makes most stored names into missing ones, or None."""
    tails: dict[str, list[list[str]]] = {}
    for name in unexpected:
        tails.setdefault(".".join(name.split(".")[-2:]), []).append(name.split("."))
    votes: Counter[tuple[str, str]] = Counter()
    for name in missing:
        path = name.split(".")
        for other in tails.get(".".join(path[-2:]), ()):
            same = 0
            while same < min(len(path), len(other)) and path[-1 - same] == other[-1 - same]:
                same += 1
            votes[".".join(other[: len(other) - same]), ".".join(path[: len(path) - same])] += 1
    if not votes:
        return None
    (start, end), count = votes.most_common(1)[0]
    return start, end, count
