"""Error report for weights that do not match a task."""

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
    """One error with every name of initial weights that does not fit the task.

    Args:
        init: the config section of the weights.
        found: missing, unexpected and misshapen names.
        stored: stored names, by their path in the task.
        absent: folders of the missing names that do not exist.
        key: config key that names the weights.
    """
    reported = found if init.strict or not found.misshapen else Mismatch(misshapen=found.misshapen)
    left = set(reported.unexpected)
    paths = [path for path, name in stored.items() if name in left]
    near = [
        f"{name} (near: {', '.join(like)})" if (like := nearest(name, paths, 1)) else name
        for name in reported.missing[:10]
    ]
    reported = replace(reported, missing=near + reported.missing[10:])
    what, hint = f"these weights do not fit the task: {reported}", _hint(found)
    if absent:
        what = f"{what}; there is no folder {' and no folder '.join(absent)}"
        hint = (
            "select the existing parts with init_from.include; or set init_from.strict: false to leave the"
            " rest at its initial values"
        )
    if key != "init_from":
        hint = f"set the options of {key} to those of the model in this folder"
    return CheckpointError(what, where=init.path, hint=hint)


def _hint(found: Mismatch) -> str:
    if any(adapter_of(name) is not None for name in found.unexpected):
        return "that run trained adapters: merge them with mm export --merge-lora, and start from the result"
    if likely := likely_prefix(found.missing, found.unexpected):
        start, path, count = likely
        return f"set init_from.prefixes: {{{start!r}: {path!r}}}, which finds {count} of the missing names"
    if found.misshapen:
        return "leave the misshapen ones out with init_from.exclude, or use the model's own options"
    return "rename with init_from.prefixes, leave out with init_from.exclude, or set init_from.strict: false"


def likely_prefix(missing: Collection[str], unexpected: Collection[str]) -> tuple[str, str, int] | None:
    """The init_from prefix that turns most unexpected stored names into missing ones; None for none.

    Returns:
        (start of stored names, path in the task, how many missing names it finds).
    """
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
