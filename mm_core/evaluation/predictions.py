"""Predictions of an evaluation for each row: gathered from all ranks in order, written as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from mm_core.contracts import IGNORED_LABEL, Batch, Evaluation
from mm_core.files import json_number, write_text
from mm_core.runtime.ranks import Ranks

Row = dict[str, object]


class Predictions:
    """Collects predictions for this rank's rows in one evaluation, without rows that only fill up."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}

    def batch(self, batch: Batch, evaluation: Evaluation) -> None:
        """Adds the predictions of a batch; unreadable rows are added with the reason."""
        mine = {key.index for key in batch.keys}  # failed replacements are not rows of this batch
        lost = [failure for failure in batch.failures if failure.replaced and failure.index in mine]
        self._rows |= {f.index: {"row": f.index, "id": f.id, "error": f.reason} for f in lost}
        columns = _columns(evaluation)
        sums = {name: values.tolist() for name, values in evaluation.sums.items()}
        weights = evaluation.weights.tolist()
        for place, (key, counts) in enumerate(zip(batch.keys, batch.sample_weights.tolist(), strict=True)):
            if counts <= 0:
                continue
            weight = weights[place]
            means = (
                {name: json_number(values[place] / weight) for name, values in sums.items()} if weight else {}
            )
            found = {name: values[place] for name, values in columns.items()}
            self._rows[key.index] = {
                "row": key.index,
                "id": batch.ids[place],
                "weight": weight,
                **means,
                **found,
            }

    def gather(self, ranks: Ranks) -> list[Row]:
        """Gathers the predictions of all ranks on rank 0, in the dataset's order; [] on other ranks.

        A collective call.
        """
        table: dict[int, Row] = {}
        for rows in ranks.gather_first(self._rows):
            table |= rows
        return [table[index] for index in sorted(table)]


def _columns(evaluation: Evaluation) -> dict[str, list[object]]:
    """One value for each row: `label` and `prediction` (for tokens, only those with a label), and texts."""
    outputs, columns = evaluation.outputs, dict[str, list[object]]()
    labels = outputs.get("labels")
    if labels is not None:
        tokens = labels.dim() == 2 and not labels.is_floating_point()
        counting = [row != IGNORED_LABEL for row in labels] if tokens else None
        found = outputs.get("predictions", outputs.get("logits"))
        for name, values in (("label", labels), ("prediction", found)):
            if values is not None and counting is not None:
                columns[name] = [row[known].tolist() for row, known in zip(values, counting, strict=True)]
            elif values is not None:
                columns[name] = [_plain(row) for row in values.cpu()]
    if evaluation.texts is not None and evaluation.references is not None:
        columns |= {"text": [*evaluation.texts], "references": [[*each] for each in evaluation.references]}
    return columns


def _plain(row: Tensor) -> object:
    values = row.flatten().tolist()
    numbers = [json_number(value) if isinstance(value, float) else value for value in values]
    return numbers[0] if len(numbers) == 1 else numbers


def write_predictions(rows: Sequence[Row], path: Path) -> None:
    """Writes predictions as JSON lines, either the complete file or nothing.

    Raises:
        MMError: the file cannot be written.
    """
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
