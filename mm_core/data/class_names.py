"""Class names: checks that a run's datasets and its task number the classes identically."""

from __future__ import annotations

from collections.abc import Mapping

from mm_core.contracts import SupportsClassNames
from mm_core.errors import ContractError, plural
from mm_core.plugin.checks.values import returned


def check_class_names(task: object, datasets: Mapping[str, object]) -> None:
    """Checks that every dataset numbers its classes as the task does, so that predictions get correct names.

    Args:
        task: the run's task.
        datasets: the run's datasets, by their key under `data`.

    Raises:
        ContractError: a class number has different names in the data and in the task.
    """
    known = _names(task)
    if not known:
        return
    for split, dataset in datasets.items():
        named = _names(dataset)
        if named == known[: len(named)]:
            continue
        pairs = enumerate(zip(named, known, strict=False))
        other = next((pair for pair in pairs if pair[1][0] != pair[1][1]), None)
        raise ContractError(
            f"the data have {plural(len(named), 'class name')}, but the task has {len(known)}"
            if other is None
            else f"class {other[0]} is {other[1][0]!r} in the data, but {other[1][1]!r} in the task",
            where=f"data.{split}",
            accepted=f"{', '.join(known)}"[:400],
            hint="list the class names in task.labels, and reuse them here: labels: ${task.labels}",
        )


def _names(part: object) -> tuple[str, ...]:
    if not isinstance(part, SupportsClassNames):
        return ()
    return returned(SupportsClassNames.class_names, part.class_names(), part)
