"""Schedules equal Transformers' ones, step by step."""

from __future__ import annotations

import pytest
import torch
from transformers import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

from mm_core.errors import ConfigError
from mm_core.train.lr_schedules import Constant, Cosine


def rates(make, steps: int) -> list[float]:
    """The rate that Transformers' schedule gives to each of the first `steps` updates, at base rate 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make(optimizer)
    used = []
    for _ in range(steps):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return used


@pytest.mark.parametrize(("total", "warmup"), [(10, 0), (10, 1), (10, 4), (10, 10), (1, 0), (1, 1)])
def test_constant_and_cosine_equal_those_of_transformers(total, warmup):
    constant, cosine = Constant(total, warmup), Cosine(total, warmup, 0.0)
    assert [constant.factor(step) for step in range(total)] == pytest.approx(
        rates(lambda optimizer: get_constant_schedule_with_warmup(optimizer, warmup), total), abs=1e-12
    )
    assert [cosine.factor(step) for step in range(total)] == pytest.approx(
        rates(lambda optimizer: get_cosine_schedule_with_warmup(optimizer, warmup, total), total), abs=1e-12
    )


@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
def test_the_cosine_ends_at_the_least_rate(ratio):
    theirs = rates(
        lambda optimizer: get_cosine_with_min_lr_schedule_with_warmup(optimizer, 3, 20, min_lr_rate=ratio), 20
    )
    ours = Cosine(20, 3, ratio)
    assert [ours.factor(step) for step in range(20)] == pytest.approx(theirs, abs=1e-12)
    assert ours.factor(20) == ours.factor(35) == pytest.approx(ratio)


def test_the_first_step_of_a_warm_up_moves_nothing():
    assert Constant(10, 4).factor(0) == Cosine(10, 4, 0.0).factor(0) == 0.0
    assert Constant(10, 4).factor(4) == Cosine(10, 4, 0.0).factor(4) == 1.0
    assert Constant(10).factor(0) == Cosine(10, 0, 0.0).factor(0) == 1.0


def test_a_run_of_no_steps_has_a_schedule():
    assert Constant(0).factor(0) == 1.0
    assert Cosine(0, 0, 0.5).factor(0) == 1.0


@pytest.mark.parametrize("make", [lambda: Constant(10, 11), lambda: Cosine(10, 11, 0.0)])
def test_a_warm_up_longer_than_the_run_is_refused(make):
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == (
        "lr_schedule.warmup_steps: warmup_steps is 11, but the run has only 10 steps\n"
        "  accepted: 0 to 10\n"
        "  hint: lower lr_schedule.warmup_steps or raise train.steps"
    )
