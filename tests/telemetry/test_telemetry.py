"""Telemetry of a step: loss and gradient norm by noise level, time by phase, and the files of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mm_core.config.load import load_config
from mm_core.contracts import Bins
from mm_core.errors import ConfigError
from mm_core.runtime.launch.watchdog import PHASES
from mm_core.runtime.process_group import process_group
from mm_core.telemetry.loss_by_bin import BinnedLoss
from mm_core.telemetry.phase_clock import PhaseClock
from mm_core.telemetry.reporter import RunReporter
from mm_core.telemetry.trackers.local import read_metrics
from mm_core.training.run import assemble, train

SIGMA = Bins("sigma", (0.0, 0.25, 0.5, 1.0), (0.5, 0.3, 0.2))


def alone(vector: torch.Tensor) -> list[torch.Tensor]:
    return [vector]


def table(*bins: tuple[float, float]) -> torch.Tensor:
    """[2, n] from (loss, weight) of each bin."""
    return torch.tensor(bins).T.contiguous()


# -- by noise level --------------------------------------------------------------------------------


def test_each_bin_has_the_mean_of_its_own_samples_and_its_share_of_all():
    binned = BinnedLoss(SIGMA, alone)
    binned.micro(table((6.0, 3.0), (0.0, 0.0), (1.0, 1.0)))
    binned.micro(table((2.0, 1.0), (0.0, 0.0), (5.0, 1.0)))
    binned.step(grad_norm=1.0, weight=6.0)
    binned.micro(table((0.0, 0.0), (0.0, 0.0), (6.0, 2.0)))
    binned.step(grad_norm=1.0, weight=2.0)
    found = binned.flush()
    assert {name: value for name, value in found.items() if not name.startswith("grad")} == {
        "loss_by_sigma/0-0.25": 8.0 / 4,
        "timesteps_by_sigma/0-0.25": 4 / 8,
        "loss_by_sigma/0.5-1": 12.0 / 4,
        "timesteps_by_sigma/0.5-1": 4 / 8,
    }  # and nothing of the bin that no sample fell into


def test_a_norm_is_credited_by_the_share_of_its_step():
    binned = BinnedLoss(SIGMA, alone)
    binned.micro(table((1.0, 1.0), (1.0, 1.0), (0.0, 0.0)))  # half and half
    binned.step(grad_norm=2.0, weight=2.0)
    binned.micro(table((1.0, 30.0), (0.0, 0.0), (0.0, 0.0)))  # a heavier step is still one norm
    binned.step(grad_norm=8.0, weight=30.0)
    found = binned.flush()
    assert found["grad_norm_by_sigma/0-0.25"] == pytest.approx((0.5 * 2 + 1 * 8) / 1.5)
    assert found["grad_norm_by_sigma/0.25-0.5"] == pytest.approx(2.0)


def test_at_one_sample_a_step_the_norm_by_bin_is_exact():
    binned, norms = BinnedLoss(SIGMA, alone), {0: [3.0, 5.0], 2: [11.0]}
    for place, values in norms.items():
        for norm in values:
            row = torch.zeros(2, 3)
            row[:, place] = 1.0
            binned.micro(row)
            binned.step(norm, 1.0)
    found = binned.flush()
    assert (found["grad_norm_by_sigma/0-0.25"], found["grad_norm_by_sigma/0.5-1"]) == (4.0, 11.0)


def test_a_step_without_a_finite_gradient_leaves_every_bin_alone():
    binned = BinnedLoss(SIGMA, alone)
    binned.micro(table((1.0, 1.0), (0.0, 0.0), (0.0, 0.0)))
    binned.step(grad_norm=1.0, weight=1.0)
    binned.micro(table((float("nan"), 1.0), (0.0, 0.0), (2.0, 1.0)))
    binned.step(grad_norm=float("nan"), weight=2.0)
    assert binned.flush() == {
        "loss_by_sigma/0-0.25": 1.0,
        "grad_norm_by_sigma/0-0.25": 1.0,
        "timesteps_by_sigma/0-0.25": 1.0,
    }
    assert binned.flush() == {}  # a new window


def test_bins_are_summed_over_ranks_before_they_are_divided():
    rows: list[torch.Tensor] = []

    def rank(*bins: tuple[float, float]) -> BinnedLoss:
        def gather(vector: torch.Tensor) -> list[torch.Tensor]:
            rows.append(vector)
            return list(rows)

        binned = BinnedLoss(SIGMA, gather)
        binned.micro(table(*bins))
        binned.step(grad_norm=2.0, weight=5.0)  # of both
        return binned

    first = rank((1.0, 1.0), (0.0, 0.0), (0.0, 0.0))
    second = rank((9.0, 3.0), (4.0, 1.0), (0.0, 0.0))
    first.flush()
    found = second.flush()
    assert found["loss_by_sigma/0-0.25"] == 10.0 / 4
    assert found["timesteps_by_sigma/0-0.25"] == 4 / 5
    assert found["grad_norm_by_sigma/0-0.25"] == found["grad_norm_by_sigma/0.25-0.5"] == 2.0


def test_the_norm_by_bin_is_that_of_one_rank_however_the_samples_are_divided():
    """Ranks of uneven weights, of one sample and of none, over more steps than are summed at once."""
    draw = torch.Generator().manual_seed(0)
    steps = [(torch.rand(2, 2, 3, generator=draw), float(step % 7 + 1)) for step in range(70)]
    for number, (tables, _) in enumerate(steps):
        tables[1] *= (0.0, 0.01, 1.0)[number % 3]
    rows: list[torch.Tensor] = []

    def gather(vector: torch.Tensor) -> list[torch.Tensor]:
        rows.append(vector)
        return list(rows)

    def flushed(ranks: list[int], gather: Callable) -> dict[str, float]:
        binned = BinnedLoss(SIGMA, gather)
        for tables, norm in steps:
            for rank in ranks:
                binned.micro(tables[rank])
            binned.step(norm, float(tables[:, 1].sum()))
        return binned.flush()

    whole = flushed([0, 1], alone)
    flushed([0], gather)
    assert flushed([1], gather) == pytest.approx(whole, rel=1e-5)


class Syncs(TorchDispatchMode):
    """Counts the operations that make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero}
        return func(*args, **(kwargs or {}))


def test_bins_wait_for_nothing_until_the_flush():
    binned = BinnedLoss(SIGMA, alone)
    with Syncs() as syncs:
        for _ in range(3):
            binned.micro(table((1.0, 1.0), (2.0, 1.0), (0.0, 0.0)))
            binned.step(grad_norm=1.0, weight=2.0)
    assert syncs.count == 0
    meta = BinnedLoss(SIGMA, alone)
    meta.micro(torch.ones(2, 3, device="meta"))
    meta.step(grad_norm=1.0, weight=6.0)


# -- time ------------------------------------------------------------------------------------------


class Moments:
    """A device's clock: marks can be read only after the device was waited for."""

    def __init__(self) -> None:
        self.now, self.read, self.reached = 0.0, 0, float("inf")

    def mark(self) -> float:
        return self.now

    def passed(self, moment: float) -> bool:
        return moment <= self.reached

    def seconds(self, begun: float, ended: float) -> float:
        self.read += 1
        return ended - begun


def spend(phases: PhaseClock, clock: Moments, *steps: tuple[str, float]) -> None:
    for phase, seconds in steps:
        phases.enter(phase)
        clock.now += seconds


def test_time_divides_into_phases_and_none_is_lost_between_windows():
    phases = PhaseClock(clock := Moments())
    spend(phases, clock, ("data", 1.0), ("encode", 2.0), ("forward_backward", 4.0), ("encode", 0.5))
    assert clock.read == 0  # nothing is read while steps run
    assert phases.take() == {"data": 1.0, "encode": 2.5, "forward_backward": 4.0}
    clock.now += 0.25  # still in the same phase
    spend(phases, clock, ("log", 1.0))
    assert phases.take() == {"encode": 0.25, "log": 1.0}
    assert PhaseClock(Moments()).take() == {}


def test_what_the_device_has_not_reached_is_left_for_the_next_window():
    phases = PhaseClock(clock := Moments())
    spend(phases, clock, ("data", 1.0), ("encode", 2.0), ("log", 4.0))
    clock.reached = 3.0
    assert phases.take() == {"data": 1.0, "encode": 2.0}
    clock.reached = 7.0
    assert phases.take() == {"log": 4.0}


def test_a_sign_of_life_within_a_phase_is_passed_on_and_not_timed():
    seen: list[str] = []
    phases = PhaseClock(clock := Moments(), watch=seen.append)
    spend(phases, clock, ("validation", 1.0), ("validation", 1.0), ("data", 1.0))
    assert seen == ["validation", "validation", "data"]
    assert phases.take() == {"validation": 2.0, "data": 1.0}
    assert clock.read == 2


# -- a run -----------------------------------------------------------------------------------------


@pytest.fixture
def overrides(tmp_path) -> Callable[..., list[str]]:
    def make(*more: str) -> list[str]:
        return [f"run.dir={tmp_path}", "data.loader.workers=0", "checkpoint.every=100", *more]

    return make


@pytest.mark.slow
def test_a_run_writes_details_where_they_are_due_and_the_rest_on_every_logged_step(tiny, tmp_path, overrides):
    train(load_config(tiny, overrides("train.steps=7", "log.every=2", "log.detail_every=3")))
    rows = {row.pop("step"): row for row in read_metrics(tmp_path / "tiny")}
    assert list(rows) == [2, 3, 4, 6, 7]
    detailed = {step for step, row in rows.items() if any(name.startswith("loss_by_sigma/") for name in row)}
    assert detailed == {3, 6, 7}
    for row in rows.values():
        assert row["samples_per_second"] > 0 and row["tokens_per_second"] > 0
        assert row["model_flops_per_second"] > 0 and "mfu" not in row  # a CPU's peak is not known
        times = {name.removeprefix("time/") for name in row if name.startswith("time/")}
        assert {"data", "encode", "forward_backward", "optimizer"} <= times <= set(PHASES)
        assert row["time/forward_backward"] < row["step_time"]
    for step in detailed:
        shares = [value for name, value in rows[step].items() if name.startswith("timesteps_by_sigma/")]
        assert sum(shares) == pytest.approx(1.0)
    # The last line's windows both hold step 7 alone, so the bins' mean is the loss.
    final = rows[7]
    mean = sum(
        final[f"loss_by_sigma/{name.partition('/')[2]}"] * share
        for name, share in final.items()
        if name.startswith("timesteps_by_sigma/")
    )
    assert mean == pytest.approx(final["loss"], rel=1e-5)
    declared = json.loads((tmp_path / "tiny/telemetry.json").read_text())["bins"]
    assert declared["name"] == "sigma" and sum(declared["declared"]) == pytest.approx(1.0)
    labels = [f"{low:g}-{high:g}" for low, high in pairwise(declared["edges"])]
    assert {name.partition("/")[2] for name in final if "_by_sigma/" in name} <= set(labels)


def test_the_page_names_every_figure_of_a_line(tiny, tmp_path, overrides):
    train(load_config(tiny, overrides("train.steps=2")))
    page = (Path(__file__).parents[2] / "docs/reading-a-run.md").read_text()
    table = "".join(line for line in page.splitlines() if line.startswith("| `"))
    figures = read_metrics(tmp_path / "tiny")[-1].keys() - {"step"}
    groups = {name.partition("/")[0] for name in figures if "_by_" in name}
    assert len(groups) == 3
    assert {name for name in figures if "/" not in name and f"`{name}`" not in table} == set()
    assert {group for group in groups if f"`{group}/" not in table} == set()
    assert {phase for phase in PHASES if f"`{phase}`" not in table} == set()


@pytest.mark.slow
def test_operations_and_bins_change_no_loss(tiny, tmp_path, overrides):
    plain = overrides("train.steps=3", "run.name=plain", "log.detail_every=100")
    train(load_config(tiny, plain))
    train(load_config(tiny, overrides("train.steps=3", "run.name=full", "log.detail_every=1")))
    losses = [
        [(row["loss"], row["grad_norm"]) for row in read_metrics(tmp_path / n)] for n in ("plain", "full")
    ]
    assert losses[0] == losses[1]


def test_a_tracker_that_is_listed_twice_is_refused(tiny, overrides):
    config = load_config(tiny, overrides('log.trackers=["tensorboard","tensorboard"]'))
    with process_group(), pytest.raises(ConfigError) as refused:
        assemble(config, "never")
    assert str(refused.value) == (
        "log.trackers: core/tensorboard is listed twice\n  accepted: each tracker once"
    )


def test_without_matplotlib_the_picture_is_left_out_with_one_note(tiny, overrides, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with process_group():
        reporter: RunReporter = assemble(load_config(tiny, overrides("train.steps=4")), "never").reporter
        reporter.log(2, {"validation/loss": 0.5})
        reporter.close("done")
    assert caplog.messages == [
        "loss.png is left out: matplotlib is not installed\n  hint: pip install 'mm-core[plots]'"
    ]


def test_other_figures_are_lines_of_their_own(tiny, tmp_path, overrides):
    with process_group():
        run = assemble(load_config(tiny, overrides("train.steps=4")), "never")
        reporter: RunReporter = run.reporter
        reporter.log(2, {"validation/loss": 0.5, "validation/loss_at/0.1": 0.25})
        reporter.close("done")
    lines = (tmp_path / "tiny/metrics.jsonl").read_text().splitlines()
    assert lines == ['{"step": 2, "validation/loss": 0.5, "validation/loss_at/0.1": 0.25}']
