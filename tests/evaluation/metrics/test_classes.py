"""Accuracy, F1 and perplexity are those of scikit-learn and torch, however rows are spread over batches."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import accuracy_score
from sklearn.metrics import f1_score as sklearn_f1
from torch.nn import functional

from mm_core.contracts import Batch, Evaluation, SampleKey, TextBatch
from mm_core.errors import ContractError, MMError
from mm_core.plugin.registry import build

ROWS, CLASSES = 61, 7


def batch(weights: torch.Tensor) -> Batch:
    keys = [SampleKey(0, row) for row in range(len(weights))]
    return Batch(keys, weights, [f"row {key.index}" for key in keys])


def figures(metric, evaluations: list[tuple[torch.Tensor, Evaluation]], ranks: int = 2) -> dict[str, float]:
    """As the core does: each rank sums its batches, the sums are added."""
    sums = []
    for rank in range(ranks):
        metric.reset()
        for weights, evaluation in evaluations[rank::ranks]:
            metric.batch(batch(weights), evaluation)
        sums.append(metric.sums())
    return dict(metric.result(torch.stack(sums).sum(0)))


def classes(known: int = CLASSES) -> tuple[torch.Tensor, torch.Tensor, list]:
    """Labels, logits, and the same in uneven batches whose last row only fills up. `known` of the classes
    are labelled or predicted."""
    rng = torch.Generator().manual_seed(5)
    labels = torch.randint(0, known, (ROWS,), generator=rng)
    logits = torch.randn(ROWS, CLASSES, generator=rng) + 1.5 * functional.one_hot(labels, CLASSES)
    logits[:, known:] = -100
    evaluations = []
    for rows in torch.arange(ROWS).split(9):
        filled = torch.cat([rows, rows[:1]])
        weights = torch.tensor([1.0] * len(rows) + [0.0])
        found, wanted = logits[filled], labels[filled]
        loss = functional.cross_entropy(found, wanted, reduction="none")
        outputs = {"predictions": found.argmax(1), "labels": wanted, "logits": found}
        evaluations.append((weights, Evaluation({"loss": loss}, torch.ones(len(filled)), outputs)))
    return labels, logits, evaluations


def test_accuracy_is_that_of_scikit_learn():
    labels, logits, evaluations = classes()
    found = figures(build("metric", {"type": "accuracy"}), evaluations)
    assert found == {"accuracy": pytest.approx(accuracy_score(labels, logits.argmax(1)), rel=1e-12)}
    assert 0.3 < found["accuracy"] < 0.9


@pytest.mark.parametrize("known", [CLASSES, CLASSES - 2])
@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
def test_the_f1_score_is_that_of_scikit_learn(average, known):
    labels, logits, evaluations = classes(known)
    found = figures(build("metric", {"type": "f1", "average": average}), evaluations)
    expected = sklearn_f1(labels, logits.argmax(1), average=average)
    assert found == {f"f1_{average}": pytest.approx(expected, rel=1e-12)}


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
def test_the_f1_score_of_several_yes_or_no_is_that_of_scikit_learn(average):
    rng = torch.Generator().manual_seed(6)
    labels = (torch.rand(ROWS, 4, generator=rng) < 0.4).float()
    logits = torch.randn(ROWS, 4, generator=rng) + labels
    parts = [
        (
            torch.ones(len(rows)),
            Evaluation({}, torch.ones(len(rows)), {"logits": logits[rows], "labels": labels[rows]}),
        )
        for rows in torch.arange(ROWS).split(10)
    ]
    found = figures(build("metric", {"type": "f1", "average": average}), parts)
    expected = sklearn_f1(labels, logits > 0, average=average, zero_division=0)
    assert found == {f"f1_{average}": pytest.approx(expected, rel=1e-12)}


def test_perplexity_is_of_all_tokens_and_accuracy_passes_over_those_that_do_not_count():
    """Rows of 1 and of 9 tokens count by their tokens."""
    rng = torch.Generator().manual_seed(7)
    logits = torch.randn(4, 9, 11, generator=rng)
    labels = torch.randint(0, 11, (4, 9), generator=rng)
    for row, length in enumerate((1, 9, 4, 6)):
        labels[row, length:] = -100
    losses = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    outputs = {"predictions": logits.argmax(2), "labels": labels}
    parts = [
        (
            torch.ones(2),
            Evaluation(
                {"loss": losses[rows].sum(1)},
                (labels[rows] != -100).sum(1).float(),
                {name: tensor[rows] for name, tensor in outputs.items()},
            ),
        )
        for rows in ([0, 1], [2, 3])
    ]
    mean = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    found = figures(build("metric", {"type": "perplexity"}), parts)
    assert found == {"perplexity": pytest.approx(math.exp(mean), rel=1e-6)}
    known = labels != -100
    right = accuracy_score(labels[known], logits.argmax(2)[known])
    assert figures(build("metric", {"type": "accuracy"}), parts) == {"accuracy": pytest.approx(right)}
    hopeless = [(torch.ones(1), Evaluation({"loss": torch.tensor([1e4])}, torch.ones(1), outputs))]
    assert figures(build("metric", {"type": "perplexity"}), hopeless, 1) == {"perplexity": math.inf}


@pytest.mark.parametrize("name", ["accuracy", "f1", "perplexity", "exact_match", "anls"])
def test_without_rows_there_is_no_figure(name):
    metric = build("metric", {"type": name})
    assert metric.result(metric.sums()) == {}


@pytest.mark.parametrize(
    ("name", "missing", "hint"),
    [
        ("accuracy", "'predictions' and 'labels'", "choose a metric that fits the task"),
        ("f1", "'logits' and 'labels'", "F1 needs rows with one class"),
        ("perplexity", "'predictions' and 'labels'", "choose a metric that fits the task"),
        ("exact_match", "'texts' and 'references'", "set task.max_new_tokens"),
        ("anls", "'texts' and 'references'", "set task.max_new_tokens"),
    ],
)
def test_a_metric_that_the_task_gives_nothing_for_is_refused(name, missing, hint):
    clips = Evaluation(
        {"loss": torch.ones(2)}, torch.ones(2), {"clean": torch.ones(2, 1), "estimate": torch.ones(2, 1)}
    )
    with pytest.raises(ContractError) as fault:
        build("metric", {"type": name}).batch(batch(torch.ones(2)), clips)
    assert fault.value.what == f"the metric needs {missing}, which the task's evaluation does not contain"
    assert fault.value.where == f"validation.metrics: {name}"
    assert fault.value.accepted == "metrics that need only what the evaluation contains: clean, estimate"
    assert fault.value.hint.startswith(hint)


def test_numbers_to_learn_have_no_classes():
    numbers = {"logits": torch.ones(2, 1), "labels": torch.tensor([0.5, 3.2])}
    with pytest.raises(ContractError, match="the F1 score needs classes, but the labels are numbers"):
        build("metric", {"type": "f1"}).batch(
            batch(torch.ones(2)), Evaluation({"loss": torch.ones(2)}, torch.ones(2), numbers)
        )
    with pytest.raises(MMError, match="macro, micro, weighted"):
        build("metric", {"type": "f1", "average": "mean"})


def test_a_metric_of_clips_is_refused_for_rows_of_text():
    ids = torch.ones(1, 2, dtype=torch.int64)
    batch = TextBatch([SampleKey(0, 0)], torch.ones(1), ["a"], {"input_ids": ids})
    with pytest.raises(
        ContractError, match="needs sampled clips, but the task samples no clips from rows"
    ) as caught:
        build("metric", {"type": "frame_change"}).batch(
            batch, Evaluation({"loss": torch.ones(1)}, torch.ones(1))
        )
    assert caught.value.where == "validation.metrics: frame_change" and "accuracy" in caught.value.hint
