"""What a metric needs of an evaluation, or a sentence where the task does not give it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mm_core.contracts import Evaluation
from mm_core.errors import ContractError


def needed_outputs(evaluation: Evaluation, metric: str, names: Sequence[str], hint: str) -> list[Tensor]:
    """The outputs of these names. ContractError, with the hint, where the task does not give them all."""
    if missing := [name for name in names if name not in evaluation.outputs]:
        raise _not_given(evaluation, metric, " and ".join(map(repr, missing)), hint)
    return [evaluation.outputs[name] for name in names]


def needed_texts(evaluation: Evaluation, metric: str) -> list[tuple[str, tuple[str, ...]]]:
    """Each row's text and what would have been right. ContractError where the task gives no words."""
    if evaluation.texts is None or evaluation.references is None:
        hint = "set task.max_new_tokens, so that the task pretrained generates answers in words"
        raise _not_given(evaluation, metric, "'texts' and 'references'", hint)
    return list(zip(evaluation.texts, evaluation.references, strict=True))


def _not_given(evaluation: Evaluation, metric: str, missing: str, hint: str) -> ContractError:
    given = sorted(evaluation.outputs) + ["texts, references"] * (evaluation.texts is not None)
    return ContractError(
        f"the metric needs {missing}, which the task's evaluation does not give",
        where=f"validation.metrics: {metric}",
        accepted=f"a task that gives them; this one gives {', '.join(given) or 'losses alone'}",
        hint=hint,
    )
