"""What is said of weights that do not fit a task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from mm_core.checkpoint.files.layout import listed
from mm_core.config.schema import InitFromSection
from mm_core.errors import CheckpointError, nearest
from mm_core.modules.adapter_layers import adapter_of


def misfit(
    init: InitFromSection,
    missing: list[str],
    unexpected: list[str],
    misshapen: list[str],
    stored: Mapping[str, str],
) -> CheckpointError:
    """One error with every name that does not fit."""
    lacking = missing if init.strict or not misshapen else []
    left = unexpected if init.strict or not misshapen else []
    paths = [path for path, name in stored.items() if name in set(left)]
    near = [
        f"{name} (near: {', '.join(found)})" if (found := nearest(name, paths, 1)) else name
        for name in lacking[:10]
    ]
    kinds = (("missing", near + lacking[10:]), ("unexpected", left), ("misshapen", misshapen))
    lines = [f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds if names]
    return CheckpointError(
        "these weights do not fit the task: " + "; ".join(lines),
        where=init.path,
        hint=_hint(missing, unexpected, misshapen),
    )


def _hint(missing: list[str], unexpected: list[str], misshapen: list[str]) -> str:
    if any(adapter_of(name) is not None for name in unexpected):
        return "the run trained adapters: mm export --merge-lora puts them into weights to begin with"
    if found := likely_prefix(missing, unexpected):
        start, path, count = found
        return f"init_from.prefixes: {{{start!r}: {path!r}}} would name {count} of the missing ones"
    if misshapen:
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


def size_text(shape: Collection[int]) -> str:
    """Of a tensor: `3x4`."""
    return "x".join(map(str, shape)) or "scalar"


def absent_parts(fault: CheckpointError, folders: Sequence[str]) -> CheckpointError:
    """The same, where what is missing lies in folders that are not there."""
    if not folders:
        return fault
    hint = "init_from.include takes the parts that are there, and strict: false leaves the rest as it begins"
    what = f"{fault.what}; there is no folder {' and no folder '.join(folders)}"
    return CheckpointError(what, where=fault.where, hint=hint)
