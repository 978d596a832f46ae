"""Buckets: which sizes there are, which one a row takes, and which samples a step reads of them."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_core.builtin.configs.data import MediaSource
from mm_core.builtin.tiny import write_clip
from mm_core.contracts import Batch, VideoTextBatch
from mm_core.data.datasets import media_sizes
from mm_core.data.datasets.media_text import MediaTextDataset
from mm_core.data.loading.bucketed import BucketedSamples, BucketOrder, Rests, in_evaluation, used
from mm_core.data.loading.buckets import Bucket, Grid, derived, nearest
from mm_core.errors import PlanError
from support.reading import read_steps, reader

SEED, STEP = 3, 4
WAN = Grid(tuple(range(1, 82, 4)), 16)
SIZES = derived(WAN, 480, 832)
ASPECTS = (16 / 9, 9 / 16, 1.0, 4 / 3, 3 / 2, 21 / 9)


# -- sizes --------------------------------------------------------------------------------------------


def crop(height: int, width: int, size: tuple[int, int, int]) -> float:
    """The pixels of a frame after its resize, per pixel that is kept."""
    ratio = (width / height) / (size[2] / size[1])
    return max(ratio, 1 / ratio)


def test_six_aspects_from_1_to_81_frames_lose_at_most_5_percent_and_are_never_padded_or_enlarged():
    planes = [(1080, round(1080 * aspect)) for aspect in ASPECTS]
    rows = [(frames, *plane) for plane in planes for frames in range(1, 82)]
    chosen = nearest(torch.tensor(rows), SIZES, upscale=False)
    assert (chosen >= 0).all()
    for (frames, height, width), number in zip(rows, chosen.tolist(), strict=True):
        size = SIZES[number]
        assert size[0] <= frames and size[1] <= height and size[2] <= width
        assert size[0] == max(count for count in (1, 5, 9, 21, 41, 81) if count <= frames)
        assert crop(height, width, size) <= 1.05


@given(st.integers(300, 3000), st.floats(1 / 3.4, 3.4))
def test_any_aspect_up_to_one_to_three_loses_little(height, aspect):
    width = round(height * aspect)
    number = int(nearest(torch.tensor([[81, height, width]]), SIZES, upscale=True))
    assert crop(height, width, SIZES[number]) <= 1.06  # 3.5 %, and the rounding to 16 pixels


def test_buckets_keep_the_limits_and_divide_into_patches():
    assert (81, 480, 832) in SIZES and (1, 832, 480) in SIZES and (81, 624, 624) in SIZES
    for frames, height, width in SIZES:
        assert (frames - 1) % 4 == 0 and height % 16 == width % 16 == 0
        assert height * width <= 480 * 832
    assert WAN.tokens((81, 480, 832)) == 21 * 30 * 52 and WAN.tokens((1, 480, 832)) == 30 * 52


def test_a_small_image_takes_a_smaller_bucket_and_a_tiny_one_none_unless_it_may_be_enlarged():
    rows = torch.tensor([[1, 400, 700], [1, 100, 100], [81, 4000, 6000], [0, 9, 9], [5, 0, 9]])
    chosen = nearest(rows, SIZES, upscale=False).tolist()
    assert chosen[1] == chosen[3] == chosen[4] == -1
    assert SIZES[chosen[0]][1:] == (336, 576) and SIZES[chosen[2]] == (81, 496, 768)
    (half, whole) = (nearest(torch.tensor([[1, 480, 640]]), SIZES, upscale) for upscale in (False, True))
    assert SIZES[half][1:] == (384, 512) and SIZES[whole][1:] == (544, 704), "docs/buckets.md"
    chosen = nearest(rows, SIZES, upscale=True).tolist()
    assert SIZES[chosen[0]][1:] == (480, 832) and SIZES[chosen[1]][1:] == (624, 624)
    assert chosen[3] == -1


def test_listed_buckets_take_what_they_fit():
    listed = [(17, 32, 32), (9, 64, 64), (1, 32, 32)]
    rows = torch.tensor([[20, 40, 40], [20, 70, 70], [16, 64, 64], [16, 40, 40], [1, 99, 99], [20, 9, 9]])
    assert nearest(rows, listed, upscale=False).tolist() == [0, 0, 1, 2, 2, -1]


# -- order ---------------------------------------------------------------------------------------------

SHAPES = {(16, 24): (16, 24), (24, 16): (24, 16), (20, 20): (16, 16)}
"""Height and width of the files -> of their buckets."""


@pytest.fixture(scope="module")
def media(tmp_path_factory) -> MediaTextDataset:
    """Photos and clips of three shapes and two lengths; the photos are used 1.5 times an epoch."""
    root = tmp_path_factory.mktemp("media")
    (root / "photos").mkdir()
    for number in range(8):
        height, width = [*SHAPES][number % 3]
        Image.new("RGB", (width, height), (20 * number, 0, 90)).save(root / f"photos/{number}.png")
        (root / f"photos/{number}.txt").write_text(f"photo {number}")
    rows = []
    for number in range(13):
        height, width = [*SHAPES][number % 3]
        frames = torch.full(((5, 9)[number % 2], height, width, 3), 15 * number, dtype=torch.uint8)
        write_clip(root / f"{number}.mp4", frames, 8)
        rows.append({"path": f"{number}.mp4", "cap": f"clip {number}"})
    (root / "clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = (MediaSource(str(root / "photos"), weight=1.5), MediaSource(str(root / "clips.jsonl")))
    return MediaTextDataset(sources, 9, max_height=16, max_width=24)


@pytest.fixture(scope="module")
def samples(media) -> BucketedSamples:
    return in_buckets(media)


def in_buckets(media: MediaTextDataset) -> BucketedSamples:
    sizes = [(frames, *plane) for frames in (9, 5, 1) for plane in SHAPES.values()]
    buckets = tuple(Bucket(*size, 3 if size[0] == 1 else 1) for size in sizes)
    return BucketedSamples(media, buckets, nearest(media.row_sizes(), sizes, upscale=False))


def order_of(samples: BucketedSamples, rests: Rests = "pad", group: int = STEP) -> BucketOrder:
    return BucketOrder(samples, STEP, group, SEED, "random", rests)


def steps(order: BucketOrder, first: int, last: int, ranks: int) -> Iterator[list[Batch]]:
    """The micro-batches of each step, in order; all ranks must have the same size in each."""
    for micro in read_steps(order.samples, order, range(first, last), ranks, seed=SEED):
        sizes = [batch.size for batch in micro]  # type: ignore[attr-defined]
        assert all(len({*sizes[at : at + ranks]}) == 1 for at in range(0, STEP, ranks))
        yield micro


def contents(batches: list[Batch]) -> list[tuple[object, ...]]:
    return [
        (*key, name, weight, float(pixels.sum()))
        for batch in batches
        if isinstance(batch, VideoTextBatch) and batch.pixels is not None
        for key, name, weight, pixels in zip(
            batch.keys, batch.ids, batch.sample_weights.tolist(), batch.pixels, strict=True
        )
    ]


@cache
def uninterrupted(samples: BucketedSamples, rests: Rests, group: int) -> list[list[tuple[object, ...]]]:
    return [contents(each) for each in steps(order_of(samples, rests, group), 0, 14, 1)]


@given(
    st.sampled_from(["pad", "drop", "keep"]),
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from([1, 2])), min_size=1, max_size=4),
)
@settings(deadline=None, max_examples=10)
def test_stops_and_numbers_of_ranks_change_nothing(samples, rests, parts):
    group = 2
    found: list[list[tuple[object, ...]]] = []
    for length, ranks in parts:
        order = order_of(samples, rests, group)
        found += [contents(each) for each in steps(order, len(found), min(14, len(found) + length), ranks)]
    assert found == uninterrupted(samples, rests, group)[: len(found)]


@given(st.integers(0, 40), st.sampled_from([("pad", 3), ("pad", 6), ("drop", 3), ("keep", 3), ("keep", 6)]))
@settings(deadline=None)
def test_one_and_three_ranks_read_the_same_ids_of_one_bucket(samples, step, rule):
    rests, group = rule
    order = BucketOrder(samples, 6, group, SEED, "random", rests)
    alone = order.micro_batches(step, 0, 1)
    shares = [order.micro_batches(step, rank, 3) for rank in range(3)]
    assert [shares[number % 3][number // 3] for number in range(6)] == alone
    of_epoch = [{int(samples.of_epoch(k.epoch)[k.index]) for k, _ in micro} for micro in alone]
    for first in range(0, 6, group):
        assert len(set().union(*of_epoch[first : first + group])) == 1


def test_two_ranks_then_four_then_one_read_each_sample_of_an_epoch_once(samples):
    order = order_of(samples)
    last = order.batches_per_epoch
    parts = [(0, 3, 2), (3, 5, 4), (5, last, 1)]
    found = [row for part in parts for batches in steps(order, *part) for row in contents(batches)]
    assert sorted(row[1] for row in found if row[3]) == [*range(len(samples))]
    assert all(row[0] == 0 for row in found)
    padded = sum(count for _, count, _ in order.counts())
    assert len(found) == len(samples) + padded and padded < STEP * len(samples.buckets)


def test_dropped_rests_are_left_out_and_kept_ones_come_in_the_next_epochs(samples):
    order = order_of(samples, "drop", 2)
    for step in range(20):
        assert all(slot.weight for micro in order.micro_batches(step, 0, 1) for slot in micro)
    dropped = {bucket: lost for bucket, (_, _, lost) in enumerate(order.counts()) if lost}
    assert dropped and all(padded == 0 for _, padded, _ in order.counts())
    kept = order_of(samples, "keep", 2)
    keys = Counter(
        slot.key for step in range(60) for micro in kept.micro_batches(step, 0, 1) for slot in micro
    )
    assert set(keys.values()) == {1}  # no repeats
    epochs = max(key.epoch for key in keys)
    for epoch in range(epochs - 3):  # a rest may wait for several epochs
        assert sorted(key.index for key in keys if key.epoch == epoch) == [*range(len(samples))]


def test_epochs_are_shuffled_and_a_sequential_one_goes_bucket_after_bucket(samples):
    order = order_of(samples)
    keys = [
        [
            slot.key.index
            for step in range(first, first + order.batches_per_epoch)
            for micro in order.micro_batches(step, 0, 1)
            for slot in micro
            if slot.weight
        ]
        for first in (0, order.batches_per_epoch)
    ]
    assert keys[0] != keys[1]
    order = BucketOrder(samples, STEP, STEP, SEED, "sequential")
    numbers = [
        int(samples.of_epoch(0)[slot.key.index])
        for step in range(order.batches_per_epoch)
        for micro in order.micro_batches(step, 0, 1)
        for slot in micro
    ]
    assert numbers == sorted(numbers)


def test_an_evaluation_reads_each_row_once_over_any_number_of_ranks(samples):
    for ranks, rows in [(1, used(samples)), (2, used(samples)), (3, 7)]:
        order = in_evaluation(samples, rows, ranks, SEED)
        read = [
            slot.key.index
            for passed in range(2)
            for step in range(order.batches_per_epoch)
            for rank in range(ranks)
            for micro in order.micro_batches(passed * order.batches_per_epoch + step, rank, ranks)
            for slot in micro
            if slot.weight
        ]
        assert sorted(read) == sorted([index * len(samples) // rows for index in range(rows)] * 2)


def test_a_bucket_of_bad_files_is_read_elsewhere_and_bad_files_are_replaced_by_their_bucket(media, tmp_path):
    (tmp_path / "p").mkdir()
    for number in range(10):
        Image.new("RGB", (24, 16), (20 * number, 0, 90)).save(tmp_path / f"p/{number}.png")
        (tmp_path / f"p/{number}.txt").write_text("x")
    rows = [{"path": f"{n}.mp4", "cap": "x", "num_frames": 9, "height": 24, "width": 16} for n in range(3)]
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    broken = [{"path": f"p/x{n}.png", "cap": "x"} for n in range(2)]  # of unknown size: in the largest bucket
    (tmp_path / "broken.jsonl").write_text("".join(json.dumps(row) + "\n" for row in broken))
    sources = [MediaSource(str(tmp_path / name)) for name in ("p", "bad.jsonl", "broken.jsonl")]
    opened = MediaTextDataset(sources, 9, max_height=16, max_width=24)
    held = in_buckets(opened)
    held.of_row[(opened.row_sizes() == 0).any(1)] = 6
    for ranks in (1, 2):
        order = order_of(held)
        last = order.batches_per_epoch
        shares = [[*reader(held, order, range(last), rank, ranks, seed=SEED)] for rank in range(ranks)]
        found = [batch for share in shares for batch in share]
        assert {len(share) for share in shares} == {last * STEP // ranks}  # all ranks have all forwards
        for step in range(last):
            parts = (share[step * STEP // ranks : (step + 1) * STEP // ranks] for share in shares)
            assert sum(float(batch.sample_weights.sum()) for part in parts for batch in part) > 0
        failures = {Path(record.id).name for batch in found for record in batch.failures}
        assert failures == {"0.mp4", "1.mp4", "2.mp4", "x0.png", "x1.png"}
        good = {Path(name).name for batch in found for name in batch.ids}
        assert good == {f"{number}.png" for number in range(10)}


def test_an_epoch_that_would_be_dropped_is_refused(samples):
    with pytest.raises(PlanError, match="no bucket has the samples of 40 micro-batches, so every epoch"):
        BucketOrder(samples, 40, 40, SEED, rests="drop")
    with pytest.raises(PlanError, match="4 micro-batches of one bucket cannot be divided among 3 data"):
        order_of(samples).micro_batches(0, 0, 3)


def test_sizes_are_those_of_the_header_upright_and_at_the_rate_of_the_dataset(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (24, 16)).save(tmp_path / "a.jpg", exif=exif)
    write_clip(tmp_path / "a.mp4", torch.zeros(9, 16, 24, 3, dtype=torch.uint8), 8)
    rows = [
        *({"path": name, "cap": "x"} for name in ("a.jpg", "a.mp4", "b.mp4")),
        {"path": "c.mp4", "cap": "x", "num_frames": 33, "height": 5, "width": 7, "fps": 16},
        {"path": "c.jpg", "cap": "x", "height": 5, "width": 7},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = [MediaSource(str(tmp_path / "a.jsonl"))]
    found = MediaTextDataset(source, max_height=8, max_width=8).row_sizes().tolist()
    assert found == [[1, 24, 16], [9, 16, 24], [0, 0, 0], [33, 5, 7], [1, 5, 7]]
    found = MediaTextDataset(source, max_height=8, max_width=8, fps=4.0).row_sizes().tolist()
    assert found == [[1, 24, 16], [5, 16, 24], [0, 0, 0], [9, 5, 7], [1, 5, 7]]


def test_reading_many_headers_shows_how_far_it_is(media, monkeypatch):
    monkeypatch.setattr(media_sizes, "_EVERY", 0.0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert (media.row_sizes() > 0).all()
    assert len(found) == 21 and re.fullmatch(
        r"21 of 21 headers read in \d+ s; declare num_frames, height and width of the rows",
        str(found[20].message),
    )
