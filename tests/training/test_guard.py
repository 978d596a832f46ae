"""Which steps may change the weights: limits, spikes, and what a resumed run remembers."""

from __future__ import annotations

import re

import pytest
import torch

from mm_core.config.sections import NonFiniteSection, SpikeSection, TrainSection
from mm_core.contracts import Batch, Loss, SampleKey
from mm_core.errors import TrainingError
from mm_core.runtime.process_group import process_group
from mm_core.training.guard import UpdateGuard

NAN = float("nan")


@pytest.fixture(autouse=True)
def group():
    with process_group(None):
        yield


def judge(guard: UpdateGuard, step: int, norm: float, loss: float = 1.0) -> str | None:
    batch = Batch([SampleKey(0, 3)], torch.ones(1), ["clip_3.mp4"])
    return guard.judge(step, norm, [Loss(torch.tensor(loss), 1.0)], [batch], [])


def settings(**sections) -> TrainSection:
    return TrainSection(steps=10, **sections)


def test_finite_steps_are_taken():
    assert judge(UpdateGuard(settings()), 0, 3.0) is None


def test_a_loss_that_is_not_finite_ends_the_run_with_step_rank_samples_and_module():
    guard = UpdateGuard(settings(), locate=lambda rerun: "it began in a.b")
    with pytest.raises(TrainingError) as caught:
        judge(guard, 6, NAN, NAN)
    assert str(caught.value) == (
        "step 7, samples ['clip_3.mp4']: the loss is not finite; it began in a.b; "
        "no parameter was changed\n"
        "  hint: lower the learning rate, check the samples of this step, or train in fp32, "
        "or skip such steps: train.non_finite.policy=skip"
    )


def test_a_gradient_that_nobody_can_place_is_reported_without_a_rank():
    with pytest.raises(TrainingError, match=r"^step 1: the gradient norm is inf; no parameter was changed"):
        judge(UpdateGuard(settings()), 0, float("inf"))


def test_steps_are_left_out_within_the_limits():
    guard = UpdateGuard(settings(non_finite=NonFiniteSection("skip", in_a_row=3, in_all=4)))
    for step in (0, 1):
        assert judge(guard, step, NAN, NAN) == "the loss is not finite on rank 0; no parameter was changed"
    assert judge(guard, 2, 1.0) is None, "a step that is taken begins the count in a row anew"
    assert judge(guard, 3, NAN, NAN) is not None
    with pytest.raises(TrainingError, match=r"4 steps skipped in total \(limit: train.non_finite.in_all\)"):
        judge(guard, 4, NAN, NAN)


def test_in_a_row():
    guard = UpdateGuard(settings(non_finite=NonFiniteSection("skip", in_a_row=2)))
    judge(guard, 0, NAN, NAN)
    with pytest.raises(TrainingError, match=r"2 steps in a row skipped \(limit: train.non_finite.in_a_row\)"):
        judge(guard, 1, NAN, NAN)


def test_a_spike_is_judged_by_the_median_of_the_steps_that_were_taken():
    guard = UpdateGuard(settings(spike=SpikeSection(factor=3.0, window=4)))
    assert judge(guard, 0, 100.0) is None, "there is nothing yet to compare with"
    assert judge(guard, 1, 2.0) is None
    for step, norm in enumerate((2.0, 2.0, 2.0, 2.0), 2):
        assert judge(guard, step, norm) is None
    assert judge(guard, 6, 6.0) is None
    said = judge(guard, 7, 6.1)
    assert said == (
        "the gradient norm is 6.1, more than 3 times 2, the median of the last 4 steps;"
        " no parameter was changed"
    )
    assert judge(guard, 8, 6.1) is not None, "a step that was left out does not move the median"


@pytest.mark.parametrize("policy", ["stop", "warn"])
def test_spikes_may_end_the_run_or_only_be_reported(policy):
    heard: list[str] = []
    guard = UpdateGuard(settings(spike=SpikeSection(2.0, 2, policy)), warn=heard.append)
    judge(guard, 0, 1.0)
    if policy == "stop":
        with pytest.raises(TrainingError, match=r"step 2: the gradient norm is 5, more than 2 times 1"):
            judge(guard, 1, 5.0)
    else:
        assert judge(guard, 1, 5.0) is None
        assert re.match(r"warning: step 2: the gradient norm is 5", heard[0])


def test_a_resumed_guard_judges_as_the_one_before():
    config = settings(spike=SpikeSection(3.0, 4), non_finite=NonFiniteSection("skip", in_a_row=2))
    first = UpdateGuard(config)
    for step, norm in enumerate((1.0, 2.0, 3.0, 0.1 + 0.2)):
        judge(first, step, norm)
    judge(first, 4, NAN, NAN)
    second = UpdateGuard(config, first.state())
    assert second.state() == first.state()
    with pytest.raises(TrainingError, match="2 steps in a row"):
        judge(second, 5, NAN, NAN)


def test_a_norm_that_has_moved_for_good_ends_the_run_instead_of_leaving_out_all_steps():
    guard = UpdateGuard(settings(spike=SpikeSection(2.0, 2, in_a_row=3)))
    judge(guard, 0, 1.0)
    for step in (1, 2):
        assert judge(guard, step, 9.0) is not None
    with pytest.raises(TrainingError, match=r"3 steps in a row skipped \(limit: train.spike.in_a_row\)"):
        judge(guard, 3, 9.0)
