"""Schedules equal those of Transformers step by step, and end at the configured rate."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
    get_wsd_schedule,
)
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

from mm_core.config.load import load_config
from mm_core.errors import ConfigError
from mm_core.optim import lr_schedules
from mm_core.optim.lr_schedules import constant, cosine, linear, polynomial, wsd
from mm_core.plan import make_plan

BASE = 0.02
DECAYING = ("linear", "cosine", "polynomial", "wsd")


def theirs(make, steps: int) -> list[float]:
    """The rate that Transformers' schedule gives to each of the first `steps` updates."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    schedule = make(optimizer)
    used = []
    for _ in range(steps):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return used


def ours(schedule, steps: int) -> list[float]:
    return [BASE * schedule.factor(step) for step in range(steps)]


@pytest.mark.parametrize(("total", "warmup"), [(10, 0), (10, 1), (10, 4), (10, 9), (1, 0), (1, 1), (23, 7)])
def test_constant_linear_and_cosine_equal_those_of_transformers(total, warmup):
    for schedule, make in (
        (constant, lambda o: get_constant_schedule_with_warmup(o, warmup)),
        (linear, lambda o: get_linear_schedule_with_warmup(o, warmup, total)),
        (cosine, lambda o: get_cosine_schedule_with_warmup(o, warmup, total)),
    ):
        assert ours(schedule(total, BASE, warmup), total) == pytest.approx(theirs(make, total), abs=1e-12)


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5])
def test_polynomial_equals_that_of_transformers(power):
    make = lambda o: get_polynomial_decay_schedule_with_warmup(o, 3, 20, lr_end=0.001, power=power)  # noqa: E731
    schedule = polynomial(20, BASE, 3, min_lr=0.001, power=power)
    assert ours(schedule, 25) == pytest.approx(theirs(make, 25), abs=1e-12)


@pytest.mark.parametrize("min_lr", [0.0, 0.002, BASE])
def test_the_cosine_ends_at_the_least_rate(min_lr):
    make = lambda o: get_cosine_with_min_lr_schedule_with_warmup(o, 3, 20, min_lr=min_lr)  # noqa: E731
    schedule = cosine(20, BASE, 3, min_lr=min_lr)
    assert ours(schedule, 20) == pytest.approx(theirs(make, 20), abs=1e-12)


@pytest.mark.parametrize(("shape", "name"), [("linear", "linear"), ("sqrt", "1-sqrt"), ("cosine", "cosine")])
def test_wsd_equals_that_of_transformers(shape, name):
    """Their warm-up starts at the lowest rate."""
    make = lambda o: get_wsd_schedule(o, 4, 6, num_training_steps=30, decay_type=name, min_lr_ratio=0.1)  # noqa: E731
    schedule = wsd(
        30, BASE, 4, warmup_init=0.1 * BASE, min_lr=0.1 * BASE, decay_fraction=0.2, decay_shape=shape
    )
    assert ours(schedule, 34) == pytest.approx(theirs(make, 34), abs=1e-12)


def test_a_fraction_of_the_run_is_a_number_of_steps():
    for kind in (constant, linear, cosine, polynomial, wsd):
        assert ours(kind(200, BASE, warmup_fraction=0.05), 201) == ours(kind(200, BASE, warmup_steps=10), 201)


@st.composite
def schedules(draw):
    kind, total = draw(st.sampled_from(DECAYING)), draw(st.integers(1, 400))
    warmup = draw(st.integers(0, total // 2))
    base = draw(st.floats(1e-6, 1.0))
    least, start = (base * draw(st.floats(0.0, 1.0)) for _ in range(2))
    more = {"decay_fraction": draw(st.floats(0, 0.5))} if kind == "wsd" else {}
    more |= {"power": draw(st.floats(0.1, 4.0))} if kind == "polynomial" else {}
    made = getattr(lr_schedules, kind)(total, base, warmup, warmup_init=start, min_lr=least, **more)
    return made, total, warmup, base, least, start


@given(schedules())
def test_every_schedule_rises_then_falls_and_ends_exactly_at_min_lr(drawn):
    made, total, warmup, base, least, start = drawn
    factors = [made.factor(step) for step in range(total + 3)]
    assert all(min(least, start) / base - 1e-12 <= factor <= 1.0 for factor in factors)
    rising, falling = factors[: warmup + 1], factors[warmup:]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(rising))
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(falling))
    assert factors[0] == (start / base if warmup else 1.0)
    assert factors[total:] == [least / base] * 3


def test_the_first_step_of_a_warm_up_moves_nothing_unless_warmup_init_is_set():
    assert linear(10, BASE, 4).factor(0) == 0.0
    assert linear(10, BASE, 4, warmup_init=0.5 * BASE).factor(0) == 0.5
    assert linear(10, BASE, 4).factor(4) == linear(10, BASE).factor(0) == 1.0


def test_a_run_of_no_steps_and_a_rate_of_nothing_have_a_schedule():
    assert constant(0, BASE).factor(0) == 1.0
    assert cosine(0, BASE, min_lr=0.01).factor(0) == 0.5
    assert cosine(10, 0.0).factor(5) == pytest.approx(0.5)


@pytest.mark.parametrize("kind", [constant, linear, cosine, polynomial, wsd])
def test_a_warm_up_longer_than_the_run_is_refused(kind):
    with pytest.raises(ConfigError) as caught:
        kind(10, BASE, 11)
    assert str(caught.value) == (
        "lr_schedule.warmup_steps: warmup_steps is 11, but the run has only 10 steps\n"
        "  accepted: 0 to 10\n"
        "  hint: lower lr_schedule.warmup_steps or raise train.steps"
    )


@pytest.mark.parametrize(("kind", "key"), [(cosine, "min_lr"), (wsd, "min_lr"), (constant, "warmup_init")])
def test_a_least_rate_above_the_base_rate_is_refused(kind, key):
    with pytest.raises(ConfigError) as caught:
        kind(10, BASE, **{key: 0.1})
    assert str(caught.value) == (
        f"lr_schedule.{key}: {key} is 0.1, which is above the optimizer's learning rate 0.02\n"
        "  accepted: 0 to 0.02\n"
        f"  hint: lower it: {key} is a learning rate, not a share of one"
    )


def test_a_decay_that_overlaps_the_warm_up_is_refused():
    with pytest.raises(ConfigError) as caught:
        wsd(10, BASE, 4, decay_fraction=0.8)
    assert str(caught.value) == (
        "lr_schedule.decay_fraction: the warm-up has 4 steps and the decay 8, but the run has only 10\n"
        "  accepted: 0 to 0.6\n"
        "  hint: lower lr_schedule.decay_fraction or shorten the warm-up"
    )


OWN = """
from mm_core import Component, hookimpl
from mm_core.errors import ConfigError


class Own:
    def __init__(self, total_steps, base_lr):
        raise ConfigError(f"a run of {total_steps} steps at {base_lr} is too short")

    def factor(self, step):
        return 1.0


@hookimpl
def mm_lr_schedules():
    return [Component(name="own", target="own_schedule:Own")]
"""


@pytest.mark.parametrize(
    ("schedule", "refused"),
    [
        ("{type: cosine, warmup_steps: 9}", "warmup_steps is 9, but the run has only 8 steps"),
        ("{type: cosine, warmup_steps: 8, min_lr: 2}", "min_lr is 2, which is above"),
        ("{type: local/own}", "a run of 8 steps at 0.02 is too short"),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_refused_at_the_plan(tiny, tmp_path, schedule, refused):
    (tmp_path / "own_schedule.py").write_text(OWN)
    own = f"plugins={{path: [{tmp_path / 'own_schedule.py'}]}}"
    config = load_config(tiny, [own, "train.steps=8", "optimizer.lr=0.02", f"lr_schedule={schedule}"])
    with pytest.raises(ConfigError, match=refused):
        make_plan(config, 1)
