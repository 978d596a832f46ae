"""The core's schedules against those of DeepSpeed."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.lr_schedules import LRRangeTest, OneCycle, WarmupDecayLR, WarmupLR

from mm_core.optim.lr_schedules import constant, linear, lr_range_test, one_cycle

STEPS = 50
BASE = 3e-3


def rates_of(kind, **params):
    """The rate with which DeepSpeed trains each of 51 steps: that of step s is set by s calls of `step()`."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    scheduler = kind(optimizer, **params)
    rates = []
    for _ in range(STEPS + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return rates


def ours(schedule):
    return [BASE * schedule.factor(step) for step in range(STEPS + 1)]


@pytest.mark.parametrize("stairs", [(0, None), (3, None), (4, 2), (3, 0)])
@pytest.mark.parametrize(("first", "second"), [(10, None), (7, 13), (30, 40)])
@pytest.mark.parametrize(("every", "rate"), [(0, 0.0), (4, 0.5)])
def test_one_cycle_has_the_rate_of_each_step(stairs, first, second, every, rate):
    cycle = {
        "cycle_first_step_size": first,
        "cycle_second_step_size": second,
        "cycle_first_stair_count": stairs[0],
        "cycle_second_stair_count": stairs[1],
        "decay_step_size": every,
        "decay_lr_rate": rate,
    }
    theirs = rates_of(OneCycle, cycle_min_lr=1e-4, cycle_max_lr=BASE, cycle_momentum=False, **cycle)
    assert ours(one_cycle(STEPS, BASE, min_lr=1e-4, **cycle)) == pytest.approx(theirs, rel=1e-12, abs=0)


@pytest.mark.parametrize("staircase", [False, True])
def test_the_range_test_has_the_rate_of_each_step(staircase):
    options = {"step_size": 7, "step_rate": 1.5, "staircase": staircase}
    options = {f"lr_range_test_{name}": value for name, value in options.items()}
    theirs = rates_of(LRRangeTest, lr_range_test_min_lr=BASE, **options)
    assert ours(lr_range_test(STEPS, BASE, **options)) == pytest.approx(theirs, rel=1e-12, abs=0)


@pytest.mark.parametrize("shape", ["linear", "log"])
@pytest.mark.parametrize("warmup", [2, 10, 49])
def test_a_warm_up_is_one_step_ahead(warmup, shape):
    """DeepSpeed trains steps 0 and 1 with the least rate: step s + 1 of its schedules is step s of ours."""
    options = {"warmup_num_steps": warmup, "warmup_min_lr": 1e-4, "warmup_max_lr": BASE, "warmup_type": shape}
    shared = {"warmup_steps": warmup, "warmup_init": 1e-4, "warmup_type": shape}
    theirs = rates_of(WarmupLR, **options)
    assert ours(constant(STEPS, BASE, **shared))[:-1] == pytest.approx(theirs[1:], rel=1e-12, abs=0)
    theirs = rates_of(WarmupDecayLR, total_num_steps=STEPS, **options)
    falls = ours(linear(STEPS, BASE, **shared))[:-1]
    # from the full rate on, DeepSpeed adds the difference to warmup_min_lr: the line ends there, not at 0
    falls[warmup:] = ours(linear(STEPS, BASE, min_lr=1e-4, **shared))[warmup:-1]
    assert falls == pytest.approx(theirs[1:], rel=1e-12, abs=0)
