"""Names of classes: a run's datasets and its task number them alike."""

from __future__ import annotations

from collections.abc import Mapping

from mm_core.contracts import Dataset, SupportsClassNames
from mm_core.errors import ContractError


def check_class_names(task: object, datasets: Mapping[str, Dataset]) -> None:
    """ContractError where a dataset (by its name under `data`) gives a class's number another name than the
    task does: what is learnt would be exported and predicted under wrong names."""
    known = task.class_names() if isinstance(task, SupportsClassNames) else ()
    if not known:
        return
    for split, dataset in datasets.items():
        named = dataset.class_names() if isinstance(dataset, SupportsClassNames) else ()
        if named == known[: len(named)]:
            continue
        pairs = enumerate(zip(named, known, strict=False))
        other = next((pair for pair in pairs if pair[1][0] != pair[1][1]), None)
        raise ContractError(
            f"the data names {len(named)} classes, and the task {len(known)}"
            if other is None
            else f"class {other[0]} is {other[1][0]!r} in the data, and {other[1][1]!r} in the task",
            where=f"data.{split}",
            accepted=f"{', '.join(known)}"[:400],
            hint="name the classes in task.labels, and repeat them here: labels: ${task.labels}",
        )
