"""Checks that an evaluation contains what a metric needs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mm_core.contracts import Evaluation
from mm_core.errors import ContractError


def needed_outputs(evaluation: Evaluation, metric: str, names: Sequence[str], hint: str) -> list[Tensor]:
    """Outputs of an evaluation that a metric needs.

    Args:
        evaluation: of a batch.
        metric: its name, for the error message.
        names: of the outputs.
        hint: for the error message.

    Raises:
        ContractError: the task's evaluation does not contain them.
    """
    if missing := [name for name in names if name not in evaluation.outputs]:
        raise _not_given(evaluation, metric, " and ".join(map(repr, missing)), hint)
    return [evaluation.outputs[name] for name in names]


def needed_texts(evaluation: Evaluation, metric: str) -> list[tuple[str, tuple[str, ...]]]:
    """Texts of an evaluation that a metric needs: for each row the generated text and its references.

    Raises:
        ContractError: the task's evaluation contains no texts.
    """
    if evaluation.texts is None or evaluation.references is None:
        hint = "set task.max_new_tokens, so that the task `pretrained` generates answers"
        raise _not_given(evaluation, metric, "'texts' and 'references'", hint)
    return list(zip(evaluation.texts, evaluation.references, strict=True))


def _not_given(evaluation: Evaluation, metric: str, missing: str, hint: str) -> ContractError:
    given = sorted(evaluation.outputs) + ["texts, references"] * (evaluation.texts is not None)
    return ContractError(
        f"the metric needs {missing}, which the task's evaluation does not contain",
        where=f"validation.metrics: {metric}",
        accepted=f"metrics that need only what the evaluation contains: {', '.join(given) or 'losses'}",
        hint=hint,
    )
