"""Metrics: exact means over unequal micro-batches and ranks, fetched once."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mm_core.contracts import Loss
from mm_core.errors import ContractError
from mm_core.telemetry.window import MetricsWindow


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def loss(values: list[float], **metrics: list[float]) -> Loss:
    named = {name: torch.tensor(row).sum() for name, row in metrics.items()}
    return Loss(torch.tensor(values).sum(), float(len(values)), named)


def on_ranks(works: Sequence[Callable[[Callable], object]]) -> list[object]:
    """Runs each work in a thread as one rank; their gather meets at a barrier."""
    barrier, table, results = (
        threading.Barrier(len(works), timeout=20),
        [None] * len(works),
        [None] * len(works),
    )

    def rank(index: int) -> None:
        def gather(vector: torch.Tensor) -> list[torch.Tensor]:
            table[index] = vector
            barrier.wait()
            return list(table)

        try:
            results[index] = works[index](gather)
        except ContractError as fault:
            results[index] = fault

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_means_are_over_samples_not_over_batches_or_ranks():
    clock = Clock()
    window = MetricsWindow(memory=lambda: 5, clock=clock)
    window.micro(loss([1.0, 2.0, 3.0], error=[3.0, 3.0, 3.0]))
    window.micro(loss([10.0], error=[7.0]))
    clock.now += 2.0
    window.step(grad_norm=1.0, data_wait=0.5, samples=4, weight=4)
    window.micro(loss([4.0, 4.0], error=[0.0, 0.0]))
    clock.now += 1.0
    window.step(grad_norm=3.0, data_wait=0.1, samples=2, weight=2)
    assert window.flush() == pytest.approx(
        {
            "loss": 24.0 / 6,
            "error": 16.0 / 6,
            "grad_norm": 2.0,
            "step_time": 1.5,
            "data_wait": 0.3,
            "samples_per_second": 2.0,
            "samples": 6.0,
            "memory": 5.0,
        }
    )


def test_a_flush_begins_a_new_window_and_samples_go_on():
    window = MetricsWindow(memory=lambda: 0, samples_seen=100.0, clock=(clock := Clock()))
    for value in (1.0, 7.0):
        window.micro(loss([value]))
        clock.now += 1.0
        window.step(grad_norm=value, data_wait=0.0, samples=1, weight=1)
        metrics = window.flush()
        assert (metrics["loss"], metrics["grad_norm"]) == (value, value)
    assert metrics["samples"] == window.samples_seen == 102.0


def test_what_happens_between_steps_is_not_counted():
    window = MetricsWindow(memory=lambda: 0, clock=(clock := Clock()))
    clock.now += 50.0  # a checkpoint is saved
    window.restart_clock()
    clock.now += 0.25
    window.step(grad_norm=0.0, data_wait=0.0, samples=1, weight=1)
    assert window.flush()["step_time"] == pytest.approx(0.25)


def test_ranks_with_unequal_samples_agree_on_the_exact_mean():
    def rank(values: list[float], memory: int, seconds: float) -> Callable:
        def work(gather: Callable) -> dict[str, float]:
            window = MetricsWindow(memory=lambda: memory, gather=gather, clock=(clock := Clock()))
            window.micro(loss(values, error=values))
            clock.now += seconds
            window.step(grad_norm=1.0, data_wait=seconds / 2, samples=4, weight=4)
            return window.flush()

        return work

    first, second = on_ranks([rank([1.0, 2.0, 3.0], 10, 1.0), rank([10.0], 30, 2.0)])
    assert first == second
    assert (first["loss"], first["error"]) == (4.0, 4.0)
    assert (first["memory"], first["step_time"], first["data_wait"]) == (30.0, 2.0, 1.0)


def test_ranks_with_different_metrics_are_an_error():
    def rank(**metrics: list[float]) -> Callable:
        def work(gather: Callable) -> object:
            window = MetricsWindow(memory=lambda: 0, gather=gather)
            window.micro(loss([1.0], **metrics))
            window.step(grad_norm=1.0, data_wait=0.0, samples=1, weight=1)
            return window.flush()

        return work

    first, second = on_ranks([rank(image=[1.0]), rank()])
    assert str(first).startswith("ranks [1] report different metrics from this rank (image, loss)\n")
    assert str(second).startswith("ranks [0] report different metrics from this rank (loss)\n")
    assert isinstance(first, ContractError)


def test_a_step_without_a_finite_gradient_counts_in_no_mean():
    window = MetricsWindow(memory=lambda: 0, clock=(clock := Clock()))
    for value, norm in ((1.0, 4.0), (math.nan, math.nan), (3.0, 2.0), (9.0, math.inf)):
        window.micro(loss([value, value], error=[value, 0.0]))
        clock.now += 1.0
        window.step(grad_norm=norm, data_wait=0.0, samples=2, weight=2)
    metrics = window.flush()
    assert (metrics["loss"], metrics["error"], metrics["grad_norm"]) == (2.0, 1.0, 3.0)
    assert (metrics["step_time"], metrics["samples"]) == (1.0, 8.0)  # it took its time all the same


def test_a_window_of_such_steps_alone_has_the_same_names_and_no_means():
    window = MetricsWindow(memory=lambda: 0)
    window.micro(loss([math.nan], error=[1.0]))
    window.step(grad_norm=math.nan, data_wait=0.0, samples=1, weight=1)
    metrics = window.flush()
    assert all(math.isnan(metrics[name]) for name in ("loss", "error", "grad_norm"))


def test_tokens_and_operations_are_rates_of_the_slowest_rank():
    def rank(tokens: int, seconds: float) -> Callable:
        def work(gather: Callable) -> dict[str, float]:
            clock = Clock()
            window = MetricsWindow(memory=lambda: 0, gather=gather, clock=clock, peak=1000.0)
            window.step_flops = 4800.0
            for _ in range(2):
                window.micro(Loss(torch.ones(()), 1.0, tokens=tokens))
                clock.now += seconds
                window.step(grad_norm=1.0, data_wait=0.0, samples=2, weight=2)
            return window.flush()

        return work

    first, second = on_ranks([rank(100, 1.0), rank(300, 4.0)])
    assert first == second
    assert first["tokens_per_second"] == 2 * (100 + 300) / 8.0
    assert first["model_flops_per_second"] == 4800.0 / 4.0 / 2  # of a device
    assert first["mfu"] == 0.6


def test_flops_that_losses_report_are_preferred_to_counted_ones():
    window = MetricsWindow(memory=lambda: 0, clock=(clock := Clock()), peak=1000.0)
    window.step_flops = 7.0
    for flops in (600.0, 1000.0):  # clips of two sizes
        for _ in range(2):
            window.micro(Loss(torch.ones(()), 1.0, flops=flops))
        clock.now += 2.0
        window.step(grad_norm=1.0, data_wait=0.0, samples=2, weight=2)
    metrics = window.flush()
    assert (metrics["model_flops_per_second"], metrics["mfu"]) == (2 * (600 + 1000) / 4.0, 0.8)
    window.micro(Loss(torch.ones(()), 1.0))
    clock.now += 1.0
    window.step(grad_norm=1.0, data_wait=0.0, samples=2, weight=2)
    assert window.flush()["model_flops_per_second"] == 7.0


def test_what_is_not_known_is_not_named():
    window = MetricsWindow(memory=lambda: 0, clock=(clock := Clock()))
    window.step_flops = 10.0  # on a device without a published peak
    window.micro(loss([1.0]))
    clock.now += 1.0
    window.step(grad_norm=1.0, data_wait=0.0, samples=1, weight=1)
    known = window.flush()
    assert known["model_flops_per_second"] == 10.0
    assert not {"mfu", "tokens_per_second", "time/data"} & known.keys()


class Syncs(TorchDispatchMode):
    """Counts the operations that make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero}
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device_until_the_flush():
    window = MetricsWindow(memory=lambda: 0)
    with Syncs() as syncs:
        for _ in range(3):
            window.micro(loss([1.0, 2.0], error=[1.0, 1.0]))
            window.step(grad_norm=1.0, data_wait=0.0, samples=2, weight=2)
    assert syncs.count == 0
    meta = MetricsWindow(memory=lambda: 0)
    meta.micro(Loss(torch.ones((), device="meta"), 1.0))
    meta.step(grad_norm=1.0, data_wait=0.0, samples=1, weight=1)


def test_the_loss_is_held_without_its_graph():
    window = MetricsWindow(memory=lambda: 0)
    value = torch.ones((), requires_grad=True)
    total = value * 2
    window.micro(Loss(total, 1.0))
    total.detach().zero_()  # what the engine does with its tensor later must not change the window
    window.step(grad_norm=1.0, data_wait=0.0, samples=1, weight=1)
    assert window.flush()["loss"] == 2.0
