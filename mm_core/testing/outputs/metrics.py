"""The conformance kit of metrics (`mm_core.contracts.Metric`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cached_property, partial
from typing import Any

import torch

from mm_core.contracts import Metric
from mm_core.errors import plural
from mm_core.plugin.checks.values import fits, returned
from mm_core.testing.common import KindProbe, expect_tensor
from mm_core.testing.data.reading import equal
from mm_core.testing.kit import Kit, NotApplicable, checks_of
from mm_core.testing.outputs.evaluations import Source, sources

_CLOSE = 1e-6
"""Relative tolerance of figures: batches of other sizes sum their rows in float32 in another order."""

Rows = Sequence[Sequence[int]]
"""The numbers of the rows of each batch."""


class MetricProbe(KindProbe):
    """A metric under test, with the evaluations that it takes."""

    def start(self) -> Any:
        """A new metric at the beginning of an evaluation."""
        metric = self.build()
        metric.reset()
        return metric

    @cached_property
    def answers(self) -> dict[Source, Exception | bool]:
        """What comes of each sort of rows: the metric's error, or whether it has figures for them."""
        return {source: self._answer(source) for source in sources(self.probe.examples or ())}

    def _answer(self, source: Source) -> Exception | bool:
        metric = self.start()
        try:
            source.give(metric, range(source.rows))
        except Exception as error:
            return error
        try:
            return bool(figures_of(metric))
        except Exception:  # a check shows it
            return True

    @property
    def taken(self) -> list[Source]:
        """The sorts of rows that the metric takes, and has figures for."""
        return [source for source, answer in self.answers.items() if answer is True]

    @property
    def sources(self) -> list[Source]:
        """As `taken`; NotApplicable if there are none, which the check `figures` shows."""
        if not self.taken:
            raise NotApplicable("the metric has no figures: see the check `figures`")
        return self.taken

    def after(self, source: Source, batches: Rows, filling: Sequence[int] = ()) -> Any:
        """A new metric that has received batches."""
        metric = self.start()
        for rows in batches:
            source.give(metric, rows, filling)
        return metric

    def over(self, source: Source, *ranks: Rows, filling: Sequence[int] = ()) -> dict[str, float]:
        """The figures over ranks, each with its batches, as the core computes them."""
        metrics = [self.after(source, batches, filling) for batches in ranks]
        sums = [metric.sums().double() for metric in metrics]
        return dict(metrics[0].result(torch.stack(sums).sum(0)))

    def expect_same(self, source: Source, found: Mapping[str, float], what: str, hint: str) -> None:
        """Expects the figures of all rows in one batch.

        Args:
            source: the rows.
            found: figures by name.
            what: how the rows were given, for the ContractError.
            hint: what to do next.
        """
        wanted = self.over(source, [range(source.rows)])
        near = partial(math.isclose, rel_tol=_CLOSE, abs_tol=1e-9)
        self.expect(
            found.keys() == wanted.keys() and all(near(found[name], wanted[name]) for name in wanted),
            f"{what}, the figures of {source.name} are {_shown(found)}",
            accepted=f"{_shown(wanted)}, as for all rows in one batch",
            hint=hint,
        )


def figures_of(metric: Any) -> Any:
    """What a metric returns for its own sums."""
    return metric.result(metric.sums().double())


def _shown(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in figures.items()) or "none"


def figures(probe: MetricProbe) -> None:
    """result returns finite Python numbers by name, which JSON can hold."""
    if not probe.taken:
        errors = [answer for answer in probe.answers.values() if isinstance(answer, Exception)]
        if errors and len(errors) + 1 >= len(probe.answers):
            raise errors[0]
        probe.expect(
            False,
            f"result returned no figures for {', '.join(source.name for source in probe.answers)}",
            accepted="figures by name for rows that the metric takes",
            hint="name rows that it takes: Component(..., examples='package.module:function')",
        )
    for source in probe.taken:
        metric = probe.after(source, [range(source.rows)])
        found = returned(Metric.result, figures_of(metric), metric)
        for name, value in found.items():
            probe.expect(
                isinstance(name, str) and name.strip() == name != "",
                f"result returned a figure with the name {name!r}",
                accepted="a text without white space around it",
            )
            probe.expect(
                fits(value, float) and math.isfinite(value),
                f"the figure {name} of {source.name} is {value!r}",
                accepted="a finite float",
                hint="convert tensors with float()",
            )


def sums(probe: MetricProbe) -> None:
    """sums returns [n] float64 on the CPU without gradients, and n does not depend on the rows."""
    for source in probe.sources:
        half = source.rows // 2
        batches = ([range(half)], [range(half, source.rows)], [range(1), range(1, source.rows)])
        lengths = set()
        for each in batches:
            found = probe.after(source, each).sums()
            expect_tensor(probe, "sums", found, torch.float64, None)
            lengths.add(len(found))
        probe.expect(
            len(lengths) == 1,
            f"sums of different rows have {' and '.join(map(str, sorted(lengths)))} numbers",
            accepted="equally many on all ranks",
            hint="only sums are exchanged over ranks: keep counts of a fixed number, not values of rows",
        )


def no_samples(probe: MetricProbe) -> None:
    """Without samples, result returns no figures and raises no error."""
    found = figures_of(probe.start())
    probe.expect(not found, f"without samples, result returned {_shown(found)}", accepted="{}: no figures")


def resets(probe: MetricProbe) -> None:
    """reset forgets everything: the next evaluation's figures are those of a new metric."""
    for source in probe.sources:
        metric = probe.after(source, [range(source.rows // 2)])
        figures_of(metric)
        metric.reset()
        source.give(metric, range(source.rows))
        found = figures_of(metric)
        probe.expect_same(source, found, "after an evaluation and reset", "clear every sum in reset")


def over_ranks(probe: MetricProbe) -> None:
    """The figures from the summed sums of two or three ranks equal those of one rank."""
    for source in probe.sources:
        numbers = range(source.rows)
        for ranks in (
            [[numbers[:1]], [numbers[1:]]],
            [[numbers[::2]], [numbers[1::2][:1]], [numbers[1::2][1:]]],
        ):
            probe.expect_same(
                source,
                probe.over(source, *ranks),
                f"over {plural(len(ranks), 'rank')}",
                "sums must add up: keep totals and counts, and divide in result",
            )


def batch_sizes(probe: MetricProbe) -> None:
    """The figures depend neither on the size nor on the order of the batches."""
    for source in probe.sources:
        singles = [[row] for row in range(source.rows)]
        hint = "add to totals and counts in every batch, and divide in result"
        probe.expect_same(source, probe.over(source, singles), "one row a batch", hint)
        uneven = [range(1), range(1, source.rows)]
        probe.expect_same(source, probe.over(source, uneven), "in batches of unequal size", hint)
        probe.expect_same(source, probe.over(source, singles[::-1]), "in reverse order", hint)


def filling_rows(probe: MetricProbe) -> None:
    """Rows whose sample_weights is 0 do not count, also in a batch that has no others."""
    for source in probe.sources:
        if source.method == "sampled":
            continue  # clips that are sampled fill no batch
        hint = "leave out rows where batch.sample_weights is 0"
        numbers = range(source.rows)
        found = probe.over(source, [numbers], filling=[0, source.rows - 1])
        probe.expect_same(source, found, "with rows that only fill the batch", hint)
        idle = probe.start()
        source.give(idle, (), [0, 1])
        busy = probe.after(source, [numbers])
        found = busy.result(busy.sums().double() + idle.sums().double())
        probe.expect_same(source, found, "with a rank whose rows all fill its batch", hint)


def result_of_sums(probe: MetricProbe) -> None:
    """result depends on the sums that it is given, not on what its rank has seen, and can be called again."""
    hint = "compute the figures from the sums alone: every rank is given those over all ranks"
    for source in probe.sources:
        given = probe.after(source, [range(source.rows)]).sums().double()
        metric = probe.after(source, [range(1)])
        for what in ("on a rank that has seen one row", "at a second call"):
            probe.expect_same(source, metric.result(given.clone()), what, hint)


def pure(probe: MetricProbe) -> None:
    """Equal rows give equal figures, bit for bit; batches, evaluations and clips stay as they were."""
    for source in probe.sources:
        numbers = range(source.rows)
        first, second = (probe.over(source, [numbers]) for _ in range(2))
        probe.expect(first == second, f"equal {source.name} give {_shown(first)}, then {_shown(second)}")
        given = source.given(numbers, ())
        kept = deepcopy(given)
        getattr(probe.start(), source.method)(*given)
        probe.expect(
            equal(kept, given),
            f"the metric changes the {source.name} that it is given",
            hint="other metrics are given the same objects: change copies",
        )


KIT = Kit(checks_of(__name__), probe=MetricProbe)
"""The conformance checks of metrics."""
