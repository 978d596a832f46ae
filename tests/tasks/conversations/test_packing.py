"""Packing: full rows, nothing lost, nothing seen by its neighbour."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mm_internvl.testing import make_tiny_checkpoint
from transformers import AutoModelForImageTextToText

from mm_core.contracts import Randomness
from mm_core.data.loading.sampler import BatchPlan
from mm_core.tasks.conversations.packing import Packs, best_fit_decreasing, positions
from mm_core.tasks.pretrained import packed_attention

CAPACITY = 4096


def lognormal(count: int, seed: int = 0) -> torch.Tensor:
    """Lengths as conversations have them: a median of 400 tokens, a long tail."""
    drawn = (Randomness(seed).normal((count,), "lengths") * 1.0 + 6.0).exp()
    return drawn.long().clamp(1, CAPACITY)


def test_rows_are_full_on_lognormal_lengths():
    for seed in range(3):
        assert Packs(lognormal(5000, seed), CAPACITY).fill >= 0.98


def next_fit(lengths: list[int]) -> int:
    """Rows where each sample goes into the last row or opens one: what best-fit is measured against."""
    rows, left = 0, 0
    for length in lengths:
        if length > left:
            rows, left = rows + 1, CAPACITY
        left -= length
    return rows


def test_best_fit_needs_fewer_rows_than_next_fit():
    lengths = lognormal(5000)
    assert len(Packs(lengths, CAPACITY)) < 0.95 * next_fit(lengths.tolist())


def fullest(lengths: list[int], capacity: int) -> list[int]:
    """Best-fit as it is defined: each into the row with the least room that is enough."""
    room: list[int] = []
    found = []
    for length in lengths:
        rows = [row for row, left in enumerate(room) if left >= length]
        row = min(rows, key=lambda r: room[r], default=len(room))
        if row == len(room):
            room.append(capacity)
        room[row] -= length
        found.append(row)
    return found


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_it_is_best_fit(lengths):
    lengths.sort(reverse=True)
    found, wanted = best_fit_decreasing(lengths, 50), fullest(lengths, 50)

    def rows(assigned):
        filled = Counter()
        for row, length in zip(assigned, lengths, strict=True):
            filled[row] += length
        return sorted(filled.values())

    assert rows(found) == rows(wanted)
    assert max(rows(found)) <= 50


def test_rows_are_a_function_of_seed_epoch_and_lengths():
    lengths = lognormal(500)
    first, again = Packs(lengths, CAPACITY), Packs(lengths.clone(), CAPACITY)

    def epoch(packs, seed, number):
        return [packs.members(row, seed, number) for row in range(len(packs))]

    assert epoch(first, 7, 3) == epoch(again, 7, 3)
    assert epoch(first, 7, 3) != epoch(first, 7, 4)
    assert epoch(first, 7, 3) != epoch(first, 8, 3)
    for number in range(3):
        rows = epoch(first, 7, number)
        assert sorted(member for row in rows for member in row) == list(range(500))
        sizes = [sum(int(lengths[member]) for member in row) for row in rows]
        assert max(sizes) <= CAPACITY
        assert sizes == first.sizes.tolist()


def test_samples_apart_share_rows_with_one_another_alone():
    lengths, separate = lognormal(500), torch.arange(500) % 10 == 3
    lengths[separate] = 700
    packs = Packs(lengths, CAPACITY, separate)
    for epoch in range(2):
        rows = [packs.members(row, 7, epoch) for row in range(len(packs))]
        assert sorted(member for row in rows for member in row) == list(range(500))
        assert [sum(int(lengths[member]) for member in row) for row in rows] == packs.sizes.tolist()
        assert packs.sizes.max() <= CAPACITY
        assert [bool(separate[row].all()) for row in rows] == [bool(separate[row].any()) for row in rows]
        assert [row for row in rows if separate[row[0]]] == [packs.members(row, 7, 0) for row in range(10)]


@pytest.mark.parametrize("world", [1, 2])
def test_no_sample_is_lost_or_repeated_over_a_resume(world):
    """Three epochs, stopped in the middle of the second and gone on with on another number of ranks."""
    packs = Packs(lognormal(300), CAPACITY)
    plan = BatchPlan(len(packs), 1, 4, 11, "random", drop_last=False)

    def seen(steps, ranks):
        for step in steps:
            for rank in range(ranks):
                for (slot,) in plan.micro_batches(step, rank, ranks):
                    if slot.weight:
                        yield from (
                            (slot.key.epoch, m) for m in packs.members(slot.key.index, 11, slot.key.epoch)
                        )

    last = 3 * plan.batches_per_epoch
    stop = plan.batches_per_epoch + 3
    counts = Counter([*seen(range(stop), 4), *seen(range(stop, last), world)])
    assert counts == Counter((epoch, sample) for epoch in range(3) for sample in range(300))


@pytest.mark.parametrize(
    ("attention", "experts"), [("eager", 0), ("sdpa", 0), ("packed_sdpa", 0), ("packed_sdpa", 4)]
)
def test_packed_loss_and_gradients_equal_unpacked_ones(tmp_path, attention, experts):
    packed_attention.register()
    model = AutoModelForImageTextToText.from_pretrained(
        make_tiny_checkpoint(tmp_path, experts=experts),
        attn_implementation=attention,
    ).double()
    if hasattr(model, "set_experts_implementation"):  # older Transformers has that one alone
        model.set_experts_implementation("eager")  # grouped products know no float64
    context = model.config.image_token_id
    generator = torch.Generator().manual_seed(0)
    rows, pixels = [], []
    for length, tiles in ((9, 0), (30, 2), (17, 1), (5, 0)):
        ids = torch.randint(0, 250, (length,), generator=generator)
        ids[2 : 2 + 4 * tiles] = context
        labels = torch.where(torch.arange(length) > 2 + 4 * tiles, ids, -100)
        rows.append((ids, labels))
        pixels.append(torch.randn(tiles, 3, 56, 56, generator=generator, dtype=torch.float64))

    def gradients(total):
        model.zero_grad()
        total.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def summed(ids, labels, pixel_values, **more):
        given = {"pixel_values": pixel_values} if len(pixel_values) else {}
        logits = model(input_ids=ids[None], use_cache=False, **given, **more).logits[0, :-1]
        return torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum")

    alone = sum(summed(ids, labels, own) for (ids, labels), own in zip(rows, pixels, strict=True))
    wanted = gradients(alone)
    packed = summed(
        torch.cat([ids for ids, _ in rows]),
        torch.cat([labels for _, labels in rows]),
        torch.cat(pixels),
        position_ids=positions([len(ids) for ids, _ in rows])[None],
    )
    found = gradients(packed)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=0)
    assert found.keys() == wanted.keys()
    for name in wanted:
        error = (found[name] - wanted[name]).norm() / wanted[name].norm().clamp_min(1e-12)
        assert error < 1e-5, name
