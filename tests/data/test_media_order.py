"""What a run reads of several sources is a function of (seed, step): any stops, any number of ranks."""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_core.builtin.configs.data import CaptionTags, MediaSource
from mm_core.contracts import Randomness, VideoTextBatch
from mm_core.data.datasets.media_text import MediaTextDataset
from mm_core.data.loading.sampler import BatchPlan
from support.ranks import run_ranks
from support.reading import read_steps

SEED, GLOBAL = 5, 4
Row = tuple[object, ...]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> MediaTextDataset:
    """Three sources: a folder with tags, a table used twice with two captions, half of an archive."""
    root = tmp_path_factory.mktemp("media")
    for name in ("photos", "more"):
        (root / name).mkdir()
        for number in range(7):
            colour = (20 * number, 100, 200 if name == "more" else 0)
            Image.new("RGB", (8, 8), colour).save(root / name / f"{number}.png")
            (root / name / f"{number}.txt").write_text("a, b, c, d, e, f")
    rows = [{"path": f"more/{number}.png", "cap": [f"one {number}", f"two {number}"]} for number in range(5)]
    (root / "rows.json").write_text(json.dumps(rows))
    with tarfile.open(root / "shard.tar", "w") as archive:
        for file in sorted((root / "more").iterdir()):
            archive.add(file, file.name)
    sources = (
        MediaSource(str(root / "photos"), tags=CaptionTags(shuffle=True, drop=0.3)),
        MediaSource(str(root / "rows.json"), weight=2.0),
        MediaSource(str(root / "shard.tar"), weight=0.5),
    )
    return MediaTextDataset(sources, 1, 8, 8)


def steps(data: MediaTextDataset, first: int, last: int, ranks: int, workers: int = 0) -> Iterator[list[Row]]:
    """What all ranks read in each step, in the order of the global batch."""
    order = BatchPlan(len(data), 1, GLOBAL, SEED, "random", drop_last=False)
    for micro in read_steps(data, order, range(first, last), ranks, workers, SEED):
        yield [row for batch in micro for row in read(batch)]


def read(batch: object) -> list[Row]:
    assert isinstance(batch, VideoTextBatch) and batch.pixels is not None
    weights, pixels = batch.sample_weights.tolist(), batch.pixels.flatten(1).sum(1).tolist()
    return [*zip(batch.keys, batch.ids, batch.captions, weights, pixels, strict=True)]


@cache
def uninterrupted(data: MediaTextDataset) -> list[list[Row]]:
    return list(steps(data, 0, 18, 1))


@given(st.lists(st.tuples(st.integers(1, 6), st.sampled_from([1, 2, 4])), min_size=1, max_size=6))
@settings(deadline=None, max_examples=30)
def test_stops_and_numbers_of_ranks_change_nothing(data, parts) -> None:
    found: list[list[Row]] = []
    for length, ranks in parts:
        found += steps(data, len(found), min(18, len(found) + length), ranks)
    assert found == uninterrupted(data)[: len(found)]


def test_two_ranks_then_four_then_one_read_each_sample_of_an_epoch_once(data) -> None:
    found = [*steps(data, 0, 2, 2), *steps(data, 2, 4, 4), *steps(data, 4, 6, 1)]
    assert found == uninterrupted(data)[:6]
    rows = [row for step in found for row in step if row[0].epoch == 0 and row[3] > 0]  # type: ignore[attr-defined]
    assert sorted(row[0].index for row in rows) == [*range(len(data))]  # type: ignore[attr-defined]
    uses = Counter(str(Path(str(row[1])).parent.name) for row in rows)
    assert uses == {"photos": 7, "more": 10, "shard.tar": 4}
    assert set(Counter(row[1] for row in rows if "more" in str(row[1])).values()) == {2}


def test_epochs_draw_other_captions_and_other_parts_of_a_source(data) -> None:
    count = len(data)
    epochs = [
        {data.sample_at(index, Randomness(SEED).at("data", epoch, index))["id"] for index in range(17, count)}
        for epoch in (0, 1)
    ]
    assert epochs[0] != epochs[1] and len(epochs[0] | epochs[1]) == 7
    captions = {row[2] for step in uninterrupted(data) for row in step if "photos" in str(row[1])}
    assert len(captions) > 12


@pytest.mark.slow
def test_workers_and_ranks_share_rows_that_one_rank_reads(data, tmp_path) -> None:
    assert [*steps(data, 3, 7, 2, workers=1)] == uninterrupted(data)[3:7]
    rows = [{"path": f"{number}.png", "cap": "x"} for number in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = Path(__file__).with_name("media_ranks.py")
    printed = run_ranks(script, 3, tmp_path / "rows.jsonl")
    folders = {text.splitlines()[0] for text in printed}
    assert len(folders) == 1 and not Path(folders.pop()).exists()
    assert [text.splitlines()[1:] for text in printed] == [
        [f"rows {'read' if rank == 0 else 'mapped'}: 9", "the table has no column"] for rank in range(3)
    ]
