"""A resumed run reads what an uninterrupted one does, to the bit: each loader mode, ranks, workers, stops."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_core.builtin.configs.data import CaptionTags, MediaSource
from mm_core.builtin.tiny import write_clip
from mm_core.contracts import Batch, VideoTextBatch
from mm_core.data.datasets.media_text import MediaTextDataset
from mm_core.data.loading.bucketed import BucketedSamples, BucketOrder, Rests
from mm_core.data.loading.buckets import Bucket, nearest
from mm_core.data.loading.sampler import BatchPlan, Order
from mm_core.data.media.transforms import ResizeCrop
from support.archives import archive
from support.reading import plain_data, read_steps

SEED, STEP, LAST = 11, 12, 7
"""The run's seed, micro-batches of a step over all ranks, and steps of a run: more than an epoch."""

Row = tuple[object, ...]
PLANES = ((16, 24), (24, 16), (16, 16))


def sources(root: Path) -> tuple[MediaSource, ...]:
    """Photos with tags in a folder, clips of several captions in a table, and both in an archive."""
    (root / "photos").mkdir()
    for number in range(7):
        height, width = PLANES[number % 3]
        picture = torch.randint(0, 255, (height + 4, width + 4, 3), dtype=torch.uint8)
        Image.fromarray(picture.numpy()).save(root / f"photos/{number}.png")
        (root / f"photos/{number}.txt").write_text("a, b, c, d, e, f")
    rows = []
    for number in range(13):
        height, width = PLANES[number % 3]
        frames = torch.randint(0, 255, ((9, 14)[number % 2], height, width, 3), dtype=torch.uint8)
        write_clip(root / f"{number}.mp4", frames, 8)
        rows.append({"path": f"{number}.mp4", "cap": [f"one {number}", f"two {number}"]})
    (root / "clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    members: dict[str, bytes] = {}
    for name in ("photos/0.png", "photos/1.png", "0.mp4", "1.mp4"):
        stem = name.replace("/", "_").partition(".")[0]
        members |= {f"{stem}.{name[-3:]}": (root / name).read_bytes(), f"{stem}.txt": b"of the archive"}
    archive(root / "shard.tar", members)
    return (
        MediaSource(str(root / "photos"), weight=1.5, tags=CaptionTags(shuffle=True, drop=0.3)),
        MediaSource(str(root / "clips.jsonl")),
        MediaSource(str(root / "shard.tar"), weight=0.5),
    )


class Mode:
    """What a run with a loader mode reads."""

    def __init__(self, dataset: Any, order: Order) -> None:
        self.dataset, self.order = dataset, order

    def steps(self, steps: range, ranks: int, workers: int = 0) -> Iterator[list[Row]]:
        for micro in read_steps(self.dataset, self.order, steps, ranks, workers, SEED):
            yield [row for batch in micro for row in contents(batch)]

    @cached_property
    def whole(self) -> list[list[Row]]:
        """Without a stop, by one rank without workers."""
        return list(self.steps(range(LAST), 1))


def contents(batch: Batch) -> list[Row]:
    """Of each sample its key, file, caption, weight and a digest of its pixels."""
    clips = batch.pixels if isinstance(batch, VideoTextBatch) else batch.values["video"]  # type: ignore[attr-defined]
    captions = batch.captions if isinstance(batch, VideoTextBatch) else [""] * len(clips)
    digests = [hashlib.sha256(clip.numpy().tobytes()).hexdigest() for clip in clips]
    return [*zip(batch.keys, batch.ids, captions, batch.sample_weights.tolist(), digests, strict=True)]


@pytest.fixture(scope="module")
def modes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Mode]:
    torch.manual_seed(0)
    found = sources(tmp_path_factory.mktemp("media"))
    changes = {"random_start": True, "transform": ResizeCrop(crop="random", flip=0.5)}
    fixed = MediaTextDataset(found, 5, 16, 16, **changes)
    free = MediaTextDataset(found, 9, max_height=16, max_width=24, **changes)
    sizes = [(frames, *plane) for frames in (9, 1) for plane in PLANES]
    buckets = tuple(Bucket(*size, 2 if size[0] == 1 else 1) for size in sizes)
    samples = BucketedSamples(free, buckets, nearest(free.row_sizes(), sizes, upscale=False))
    plugin = Path(__file__).parents[1] / "runs/plain_sets.py"
    plain = plain_data(plugin, "clips", clips=20, noise=0.2)

    def variable(rests: Rests, group: int) -> Mode:
        return Mode(samples, BucketOrder(samples, STEP, group, SEED, "random", rests))

    return {
        "sampler": Mode(fixed, BatchPlan(len(fixed), 1, STEP, SEED, "random", drop_last=False)),
        "variable, pad": variable("pad", STEP),
        "variable, keep": variable("keep", 6),
        "base": Mode(plain, BatchPlan(len(plain), 1, STEP, SEED, "random", drop_last=True)),
    }


PARTS = st.lists(st.tuples(st.integers(1, LAST), st.integers(1, 3)), min_size=1, max_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["sampler", "variable, pad", "variable, keep", "base"])
@given(parts=PARTS)
@settings(deadline=None, max_examples=6)
def test_random_stops_and_ranks_read_the_same_ids_and_pixels(modes, name, workers, parts):
    """A part is a number of steps, and of ranks that take them."""
    mode, found = modes[name], []
    for length, ranks in parts:
        found += mode.steps(range(len(found), min(LAST, len(found) + length)), ranks, workers)
    assert found == mode.whole[: len(found)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stops"), [("sampler", (1, 2, 3)), ("variable, pad", (2, 4, 6))])
def test_two_ranks_then_four_then_one_read_each_sample_of_three_sources_once(modes, name, stops):
    first, second, last = stops
    mode = modes[name]
    parts = ((range(first), 2), (range(first, second), 4), (range(second, last), 1))
    found = [step for steps, ranks in parts for step in mode.steps(steps, ranks)]
    assert found == mode.whole[:last]
    assert last == mode.order.batches_per_epoch
    rows = [row for step in found for row in step if row[0].epoch == 0 and row[3]]  # type: ignore[attr-defined]
    assert sorted(row[0].index for row in rows) == [*range(len(mode.dataset))]  # type: ignore[attr-defined]
    assert {Path(str(row[1])).parent.name for row in rows} >= {"photos", "shard.tar"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sampler", "variable, pad", "base"])
def test_what_is_equal_above_is_drawn_anew_in_each_epoch(modes, name):
    pixels: dict[object, set[object]] = {}
    for step in modes[name].steps(range(2 * modes[name].order.batches_per_epoch), 1):
        for key, file, _, _, digest in step:
            pixels.setdefault(file if name != "base" else key.index, set()).add(digest)  # type: ignore[attr-defined]
    assert sum(len(found) > 1 for found in pixels.values()) > 3
