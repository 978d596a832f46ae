"""A run that begins with the weights of another: names are compared before anything is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mm_core.config.schema import InitFromSection
from mm_core.errors import CheckpointError, PlanError, nearest
from mm_core.parallel.freezing import covered
from mm_core.train.agreement import Ranks
from mm_core.train.checkpoint_io import listed
from mm_core.train.weight_sources import WeightSource, open_source


@dataclass(frozen=True)
class WarmStartReport:
    """What `init_from` has done.

    loaded, missing, skipped: paths in the task that were read, that kept their initialisation because the
    source has no such name, and that the patterns leave out. unexpected: names of the source that nothing
    asked for.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        kinds = (("missing", self.missing), ("unexpected", self.unexpected), ("left out", self.skipped))
        parts = [f"{len(names)} {kind} ({listed(list(names), 5)})" for kind, names in kinds if names]
        return ", ".join([f"{len(self.loaded)} tensors loaded", *parts])


def warm_start(init: InitFromSection, parameters: Mapping[str, Tensor]) -> WarmStartReport:
    """Fills parameters and buffers in place from the weights at `init.path`. Called by all ranks.

    Args:
        init: the config's section.
        parameters: what the engine holds of the trained modules, by path in the task: plain tensors, or
            DTensors of which each rank reads its shard. Dtypes may differ: values are cast.

    Raises:
        PlanError: a pattern of `include` or `exclude` that matches nothing, or nothing left to read.
        CheckpointError: on all ranks, with nothing touched: weights that can not be read, and with
            `strict` a name that one side lacks; other shapes always.
    """
    chosen = set(covered(init.include, parameters, "init_from.include") if init.include else parameters)
    chosen -= set(covered(init.exclude, parameters, "init_from.exclude"))
    if not chosen:
        raise PlanError(
            "every parameter is left out, so no weight would be read",
            where="init_from",
            hint="widen init_from.include, or narrow init_from.exclude",
        )
    ranks = Ranks.current()
    doing = f"reading {init.path}"
    source = ranks.agree(doing, lambda: open_source(Path(init.path), init.weights))
    origins, report = ranks.agree(doing, lambda: _compare(init, source, parameters, chosen))
    targets = {stored: parameters[name] for name, stored in origins.items()}
    ranks.agree(doing, lambda: source.fill(targets))
    return report


def _compare(
    init: InitFromSection, source: WeightSource, parameters: Mapping[str, Tensor], chosen: Collection[str]
) -> tuple[dict[str, str], WarmStartReport]:
    """(path in the task -> stored name) of what is to be read, and the report."""
    stored = renamed([*source.shapes, *source.others], init)
    origins = {
        name: stored[name] for name in parameters if name in chosen and stored.get(name) in source.shapes
    }
    missing = tuple(name for name in parameters if name in chosen and name not in origins)
    unexpected = tuple(
        found for name, found in stored.items() if name not in parameters or found in source.others
    )
    misshapen = [
        f"{name} ({_size(source.shapes[found])} in the file, {_size(parameters[name].shape)} in the task)"
        for name, found in origins.items()
        if tuple(source.shapes[found]) != tuple(parameters[name].shape)
    ]
    if misshapen or (init.strict and (missing or unexpected)) or not origins:
        raise _misfit(init, list(missing), list(unexpected), misshapen, stored)
    skipped = tuple(name for name in parameters if name not in chosen)
    return origins, WarmStartReport(tuple(origins), missing, unexpected, skipped)


def renamed(stored: Collection[str], init: InitFromSection) -> dict[str, str]:
    """Path in the task -> stored name, by `prefixes`: the longest start that fits a name is replaced."""
    starts = sorted(init.prefixes, key=len, reverse=True)
    found: dict[str, str] = {}
    for name in stored:
        path = name
        for start in starts:
            head = start.rstrip(".")
            if not head or name == head or name.startswith(head + "."):
                tail = name[len(head) :].lstrip(".")
                path = ".".join(filter(None, (init.prefixes[start].rstrip("."), tail)))
                break
        if path in found:
            raise CheckpointError(
                f"{found[path]} and {name} would both become {path}",
                where=init.path,
                hint="change init_from.prefixes",
            )
        found[path] = name
    return found


def _misfit(
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


def _size(shape: Collection[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
