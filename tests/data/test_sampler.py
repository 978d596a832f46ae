"""The sampler: every sample once an epoch, the same global batches at any world size."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_core.contracts import SampleKey
from mm_core.data.loading.sampler import BatchPlan, EvenRows
from mm_core.errors import PlanError


@st.composite
def plans(draw: st.DrawFn) -> tuple[BatchPlan, int]:
    """A plan and a number of ranks that divides it."""
    micro, ranks, accumulation = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    size = micro * ranks * accumulation
    drop = draw(st.booleans())
    samples = draw(st.integers(size if drop else 1, 4 * size + 3))
    order = draw(st.sampled_from(["random", "sequential"]))
    grouped = draw(st.booleans()) and order == "random"
    lengths = torch.randint(1, 50, (samples,)) if grouped else None
    return BatchPlan(samples, micro, size, draw(st.integers(0, 9)), order, drop, lengths=lengths), ranks


@settings(max_examples=150, deadline=None)
@given(plans(), st.integers(0, 3))
def test_each_epoch_has_each_sample_once(case, epoch) -> None:
    plan, _ = case
    steps = range(epoch * plan.batches_per_epoch, (epoch + 1) * plan.batches_per_epoch)
    rows = [row for step in steps for row in plan.global_batch(step)]
    assert {row.key.epoch for row in rows} == {epoch}
    counted = Counter(row.key.index for row in rows if row.weight == 1)
    assert set(counted.values()) == {1}
    kept = plan.num_samples // plan.global_batch_size * plan.global_batch_size
    assert len(counted) == (kept if plan.drop_last else plan.num_samples)
    assert {row.weight for row in rows} <= ({1.0} if plan.drop_last else {0.0, 1.0})


@settings(max_examples=150, deadline=None)
@given(plans(), st.integers(0, 20))
def test_the_ranks_together_read_the_global_batch_in_the_same_micro_batches(case, step) -> None:
    plan, ranks = case
    alone = plan.micro_batches(step, 0, 1)
    shares = [plan.micro_batches(step, rank, ranks) for rank in range(ranks)]
    assert [row for micro in alone for row in micro] == plan.global_batch(step)
    assert all(len(micro) == plan.micro_batch_size for share in shares for micro in share)
    assert len({len(share) for share in shares}) == 1
    for place, micro in enumerate(alone):
        assert shares[place % ranks][place // ranks] == micro


def test_two_ranks_with_one_micro_batch_are_one_rank_with_two() -> None:
    plan = BatchPlan(10, 2, 4, 0, "random", True)
    first, second = (plan.micro_batches(3, rank, 2) for rank in (0, 1))
    assert plan.micro_batches(3, 0, 1) == [first[0], second[0]]


def test_sequential_order_and_the_ragged_end() -> None:
    plan = BatchPlan(5, 1, 3, 0, "sequential", False)
    assert plan.batches_per_epoch == 2
    assert [(row.key.epoch, row.key.index, row.weight) for row in plan.global_batch(1)] == [
        (0, 3, 1.0),
        (0, 4, 1.0),
        (0, 0, 0.0),
    ]
    assert [row.key for row in plan.global_batch(2)] == [(1, 0), (1, 1), (1, 2)]


def test_epochs_and_seeds_have_their_own_order() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [row.key.index for row in BatchPlan(64, 64, 64, seed, "random", True).global_batch(epoch)]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_the_random_order_does_not_change_between_versions() -> None:
    # Golden: torch 2.13 and 2.7.1. A change would silently reorder every resumed run.
    plan = BatchPlan(8, 8, 8, 1234, "random", True)
    assert [row.key.index for row in plan.global_batch(0)] == GOLDEN_ORDER


GOLDEN_ORDER = [0, 3, 2, 1, 7, 4, 5, 6]


@pytest.mark.parametrize(
    ("seed", "samples", "key", "drawn"),
    [
        (1234, 1000, (0, 17), [872, 148, 665, 617, 20, 445, 258, 316]),
        (1234, 1000, (2, 17), [332, 284, 39, 773, 342, 545, 91, 638]),
        (7, 1_000_003, (1, 999_999), [630788, 529189, 524281, 718585, 266529, 742388, 7061, 657922]),
        (0, 5, (0, 3), [0, 1, 2, 4]),
        (0, 1, (0, 0), []),
    ],
)
def test_the_replacements_do_not_change_between_versions(seed, samples, key, drawn) -> None:
    """Golden: what the loader drew itself before orders did (789543b), from the size of the dataset."""
    plan = BatchPlan(samples, 1, 1, seed, "random", True)
    assert [*plan.replacements(SampleKey(*key))] == drawn
    rows = EvenRows(1, 1, 1, seed, "sequential", False, total=samples)
    assert [*rows.replacements(SampleKey(*key))] == drawn, "an evaluation's too, over all of the dataset"


def test_the_facts_are_those_that_checkpoints_have() -> None:
    assert BatchPlan(8, 2, 4, 3, "sequential", False).facts() == {
        "num_samples": 8,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "seed": 3,
        "order": "sequential",
        "drop_last": False,
        "repeat_first": False,
        "group_by_length": False,
    }


def test_sizes_that_do_not_fit_are_refused_with_both_numbers() -> None:
    with pytest.raises(PlanError, match="6 does not divide into micro-batches of 4") as caught:
        BatchPlan(100, 4, 6, 0, "random", True)
    assert caught.value.accepted == "multiples of 4"
    with pytest.raises(PlanError, match="5 samples, fewer than a global batch of 8") as caught:
        BatchPlan(5, 4, 8, 0, "random", True)
    assert "drop_last=false" in str(caught.value.hint) and "global_batch_size" in str(caught.value.hint)
    BatchPlan(5, 4, 8, 0, "random", False)
    with pytest.raises(PlanError, match="no samples"):
        BatchPlan(0, 1, 1, 0, "random", False)
    with pytest.raises(PlanError, match="8 does not divide over 3 data-parallel ranks"):
        BatchPlan(100, 2, 8, 0, "random", True).micro_batches(0, 0, 3)


def padded_share(plan: BatchPlan, lengths: torch.Tensor) -> float:
    """Of the positions of one epoch's micro-batches, how many are padding."""
    filled = whole = 0
    for step in range(plan.batches_per_epoch):
        for micro in plan.micro_batches(step, 0, 1):
            rows = lengths[[slot.key.index for slot in micro]]
            filled, whole = filled + int(rows.sum()), whole + len(rows) * int(rows.max())
    return 1 - filled / whole


def test_grouped_by_length_batches_hold_little_padding_and_ranks_get_similar_lengths() -> None:
    lengths = (torch.randn(4000, generator=torch.Generator().manual_seed(0)).mul(0.8).exp() * 60).long() + 1
    plain = BatchPlan(4000, 4, 16, 0, "random", False)
    grouped = BatchPlan(4000, 4, 16, 0, "random", False, lengths=lengths)
    assert padded_share(plain, lengths) > 0.4
    assert padded_share(grouped, lengths) < 0.05
    longest = [
        [
            max(int(lengths[slot.key.index]) for slot in grouped.micro_batches(step, rank, 4)[0])
            for rank in range(4)
        ]
        for step in range(200)
    ]
    assert sorted(max(ranks) / min(ranks) for ranks in longest)[100] < 1.1


def test_groups_change_with_the_epoch_and_follow_from_seed_and_epoch_alone() -> None:
    lengths = torch.arange(512) % 97

    def batches(seed: int, epoch: int) -> list[list[int]]:
        plan = BatchPlan(512, 4, 8, seed, "random", True, lengths=lengths.clone())
        steps = range(epoch * 64, (epoch + 1) * 64)
        return [[slot.key.index for slot in plan.global_batch(step)] for step in steps]

    assert batches(0, 1) == batches(0, 1)
    together = [{frozenset(batch) for batch in batches(*key)} for key in ((0, 0), (0, 1), (1, 0))]
    assert len(set.union(*together)) == 3 * 64  # no batch comes twice
    means = [float(lengths[batch].float().mean()) for batch in batches(0, 0)]
    assert means != sorted(means)  # short ones do not come first
    plan = BatchPlan(512, 4, 8, 0, "random", True, lengths=lengths)
    assert plan.facts()["group_by_length"] is True and "lengths" not in plan.facts()


def balanced(ranks: int, size: int, accumulation: int, work: torch.Tensor, seed: int = 0) -> BatchPlan:
    batch = ranks * size * accumulation
    return BatchPlan(len(work), size, batch, seed, "random", False, work=lambda index, rng: int(work[index]))


def shares(plan: BatchPlan, step: int, ranks: int) -> list[list[int]]:
    """The samples of each rank in a step."""
    micros = [plan.micro_batches(step, rank, ranks) for rank in range(ranks)]
    return [[slot.key.index for micro in share for slot in micro] for share in micros]


def most(plan: BatchPlan, ranks: int, work: torch.Tensor) -> float:
    """The most work of a rank in a step, as a multiple of the ranks' mean, averaged over an epoch."""
    totals = [
        torch.tensor([float(work[share].sum()) for share in shares(plan, step, ranks)])
        for step in range(plan.batches_per_epoch)
    ]
    return float(torch.stack([each.max() / each.mean() for each in totals]).mean())


SKEWED = (torch.randn(8192, generator=torch.Generator().manual_seed(0)).exp() * 256).clamp(max=2048).long()
SKEWED[torch.rand(8192, generator=torch.Generator().manual_seed(1)) < 0.3] = 0  # texts alone
"""Tokens of images up to a limit of pixels, in conversations."""


@pytest.mark.parametrize(
    ("ranks", "size", "accumulation", "before", "after"),
    [(8, 1, 8, 1.7, 1.04), (8, 4, 2, 1.7, 1.04), (64, 1, 8, 2.4, 1.04), (2, 1, 4, 1.35, 1.12)],
)
def test_balanced_ranks_have_about_the_same_work(ranks, size, accumulation, before, after) -> None:
    plan = balanced(ranks, size, accumulation, SKEWED)
    assert most(dataclasses.replace(plan, work=None), ranks, SKEWED) > before
    assert most(plan, ranks, SKEWED) < after


@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_balanced_ranks_share_the_samples_that_a_step_has_anyway(ranks) -> None:
    """Each sample once, the repeats of weight 0 too; in as many micro-batches of the same size."""
    plan = balanced(ranks, 2, 3, SKEWED[: ranks * 10])
    for step in range(2 * plan.batches_per_epoch):
        micros = [micro for rank in range(ranks) for micro in plan.micro_batches(step, rank, ranks)]
        assert [len(micro) for micro in micros] == [2] * 3 * ranks
        assert sorted(slot for micro in micros for slot in micro) == sorted(plan.global_batch(step))
    assert shares(plan, 1, ranks) == shares(balanced(ranks, 2, 3, SKEWED[: ranks * 10]), 1, ranks)


def test_ranks_wait_less_for_each_other_in_every_micro_batch() -> None:
    def waited(plan: BatchPlan) -> float:
        """The most work of a rank in a micro-batch, summed over those of some steps, per mean work."""
        micros = [[plan.micro_batches(step, rank, 8) for rank in range(8)] for step in range(16)]
        work = [[[float(SKEWED[m[0].key.index]) for m in rank] for rank in step] for step in micros]
        found = torch.tensor(work)  # [steps, ranks, micro-batches]
        return float(found.amax(1).sum() / found.mean(1).sum())

    plan = balanced(8, 1, 8, SKEWED)
    assert waited(dataclasses.replace(plan, work=None)) > 3
    assert waited(plan) < 1.7
