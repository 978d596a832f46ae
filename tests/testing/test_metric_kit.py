"""The conformance kit of metrics: shipped ones pass, and each check refuses a faulty one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mm_core.contracts import Batch, Evaluation, SampleKey
from mm_core.evaluation.metrics.classes import Accuracy
from mm_core.evaluation.metrics.summed import SummedMetric
from mm_core.evaluation.metrics.video import FrameChange
from mm_core.plugin.registry import get_registry
from mm_core.testing.kit import Examination
from mm_core.testing.small_kinds import METRIC
from mm_core.testing.suite import find_components
from support.conformance import examined, refusal, shortcomings

SHIPPED = [each.qualified for each in get_registry().components("metric")]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_metrics_keep_their_contract(name: str) -> None:
    assert shortcomings(name) == []


def test_every_shipped_metric_takes_some_rows() -> None:
    assert [o.reason for name in SHIPPED for o in examined(name) if o.status == "not applicable"] == []


class Counting(Accuracy):
    """Accuracy that also counts rows of weight 0."""

    def batch(self, batch, evaluation):
        super().batch(replace(batch, sample_weights=torch.ones(len(batch))), evaluation)


class MeanOfBatches(Accuracy):
    def batch(self, batch, evaluation):
        before = self._sums.clone()
        super().batch(batch, evaluation)
        rows, right = (self._sums - before).tolist()
        self._sums = before + torch.tensor([1.0, right / rows if rows else 0.0]).double()


class FirstBatch(Accuracy):
    """It weights rows by their place in the evaluation."""

    def reset(self):
        super().reset()
        self.seen = 0

    def batch(self, batch, evaluation):
        for row in range(len(batch)):
            self.seen += 1
            if batch.sample_weights[row] > 0:
                own = evaluation.outputs["predictions"][row] == evaluation.outputs["labels"][row]
                self._sums += torch.tensor([self.seen, self.seen * own.float().mean()]).double()


class Largest(SummedMetric):
    """It keeps a value that does not add up."""

    def batch(self, batch, evaluation):
        kept = evaluation.sums["loss"][batch.sample_weights > 0]
        if len(kept):
            self._sums[0] = max(float(self._sums[0]), float(kept.max()))

    def result(self, sums):
        return {"largest": float(sums[0])} if sums[0] else {}


class Values(SummedMetric):
    """It keeps the values of its rows."""

    width = 0

    def batch(self, batch, evaluation):
        kept = evaluation.sums["loss"][batch.sample_weights > 0].double()
        self._sums = torch.cat([self._sums, kept])

    def result(self, sums):
        return {"median": float(sums.median())} if len(sums) else {}


def results(change) -> type:
    """An accuracy with another result."""
    return type("Faulty", (Accuracy,), {"result": lambda self, sums: change(Accuracy.result(self, sums))})


class Single(Accuracy):
    def sums(self):
        return super().sums().float()


class Table(Accuracy):
    def sums(self):
        return super().sums()[None]


class Untouched(Accuracy):
    def reset(self):
        if not hasattr(self, "_sums"):
            super().reset()


class OwnRows(Accuracy):
    def result(self, sums):
        return super().result(self._sums)


class Dividing(Accuracy):
    def result(self, sums):
        return {"accuracy": float(sums[1]) / float(sums[0])}


class Zero(Accuracy):
    def result(self, sums):
        return {"accuracy": float(sums[1] / sums[0].clamp(min=1))}


class Sorting(Accuracy):
    def batch(self, batch, evaluation):
        super().batch(batch, evaluation)
        evaluation.outputs["labels"].zero_()


class Darkening(FrameChange):
    def sampled(self, clips):
        super().sampled(clips)
        for clip in clips:
            clip.pixels.mul_(0.5)


class Random(Accuracy):
    def batch(self, batch, evaluation):
        super().batch(batch, evaluation)
        self._sums[1] += torch.rand(())


class Silent(Accuracy):
    def result(self, sums):
        return {}


class Gradient(Accuracy):
    def __init__(self):
        self.scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        super().__init__()

    def sums(self):
        return self._sums * self.scale


FAULTS = [
    ("figures", results(lambda found: {n: torch.tensor(v) for n, v in found.items()}), "is tensor("),
    (
        "figures",
        results(lambda found: {n: v / 0.0 if v == 0 else v * 1e400 for n, v in found.items()}),
        "is inf",
    ),
    ("figures", results(lambda found: list(found.items())), "result of Faulty returned [("),
    ("figures", Silent, "result returned no figures for rows with classes "),
    (
        "figures",
        Single,
        "sums returned [2] of torch.float32 on cpu; accepted: [2] of torch.float64 on the CPU",
    ),
    ("figures", Table, "sums returned [1, 2] of torch.float64"),
    (
        "figures",
        Gradient,
        "sums returned [2] of torch.float64 on cpu; accepted: [2] of torch.float64 on the CPU, without",
    ),
    ("figures", Values, "sums returned [1] of torch.float64 on cpu; accepted: [6] of torch.float64"),
    (
        "figures",
        Untouched,
        "after an evaluation and reset, the figures of rows with classes are {'accuracy': 0.6}",
    ),
    ("figures", Largest, "over 2 ranks, the figures of rows with classes are {'largest': "),
    (
        "figures",
        MeanOfBatches,
        "in batches of unequal size, the figures of rows with classes are {'accuracy'",
    ),
    ("figures", FirstBatch, "in reverse order, the figures of rows with classes are {'accuracy': 0.678571"),
    ("figures", Counting, "with rows that only fill a batch, the figures of rows with classes are"),
    ("figures", OwnRows, "over 2 ranks, the figures of rows with classes are {'accuracy': 1"),
    ("figures", Sorting, "the metric changes the rows with classes that it is given"),
    ("figures", Darkening, "the metric changes the sampled clips that it is given"),
    ("figures", Random, "in batches of unequal size, the figures of rows with classes are "),
    ("without_samples", Dividing, "ZeroDivisionError: float division by zero"),
    ("without_samples", Zero, "without samples, result returned {'accuracy': 0.0}; accepted: {}: no figures"),
]


@pytest.mark.parametrize(("check", "faulty", "sentence"), FAULTS)
def test_a_faulty_one_is_refused(check: str, faulty: type, sentence: str) -> None:
    shipped = "core/frame_change" if issubclass(faulty, FrameChange) else "core/accuracy"
    reason = refusal(shipped, check, faulty)
    assert sentence in reason, reason
    assert __file__ in reason or faulty.__name__ == "Faulty", "it names the author's file"


def test_each_check_has_a_fault() -> None:
    assert {check for check, *_ in FAULTS} == set(METRIC.checks)


def test_a_metric_that_takes_nothing_shows_its_own_error() -> None:
    class Needy(Accuracy):
        def batch(self, batch, evaluation):
            raise KeyError("depth")

        def sampled(self, clips):
            raise KeyError("clips")

    outcomes = {o.check: o for o in examined("core/accuracy", Needy)}
    assert outcomes["figures"].status == "failed" and "KeyError: 'depth'" in outcomes["figures"].reason


def depths(folder: Path) -> list[tuple[Batch, Evaluation]]:
    """Rows of a task that the core does not have."""
    batch = Batch([SampleKey(0, row) for row in range(4)], torch.ones(4), list("abcd"))
    evaluation = Evaluation({"loss": torch.ones(4)}, torch.ones(4), {"depth": torch.arange(4.0)})
    return [(batch, evaluation)]


class Depth(SummedMetric):
    def batch(self, batch, evaluation):
        kept = evaluation.outputs["depth"][batch.sample_weights > 0]
        self._sums += torch.tensor([len(kept), kept.sum()]).double()

    def result(self, sums) -> Mapping[str, float]:
        return {"depth": float(sums[1] / sums[0])} if sums[0] else {}


def test_a_metric_of_another_task_brings_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    examination = examined("core/accuracy", Depth)
    assert "KeyError: 'depth'" in examination.run("figures").reason
    component = replace(examination.registered.component, examples="depth_examples:depths")
    monkeypatch.setitem(
        __import__("sys").modules, "depth_examples", __import__(__name__, fromlist=["depths"])
    )
    own = Examination(replace(examination.registered, component=component), examination.registry)
    assert [(o.check, o.reason) for o in own if o.status != "passed"] == []


def test_examples_that_are_not_there_have_an_answer() -> None:
    (registered,) = find_components(get_registry(), "core/accuracy")
    component = replace(registered.component, examples="mm_core.builtin.tiny:rowz")
    outcome = Examination(replace(registered, component=component), get_registry()).run("figures")
    assert "the examples 'mm_core.builtin.tiny:rowz' does not exist" in outcome.reason
