"""The skip ledger: each unreadable sample is listed once, and too many stop the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mm_core.contracts import Batch, FailureRecord, SampleKey
from mm_core.data.loading.skipped import SkipLedger, UnreadableError
from mm_core.errors import DataError


def batch(indices: list[int], failed: tuple[int, ...] = ()) -> Batch:
    return Batch(
        keys=[SampleKey(0, index) for index in indices],
        sample_weights=torch.ones(len(indices)),
        ids=[str(index) for index in indices],
        failures=[FailureRecord(f"v/{index}.mp4", index, "broken") for index in failed],
    )


def listed(folder: Path) -> list[int]:
    return [json.loads(line)["index"] for line in (folder / "skipped.jsonl").read_text().splitlines()]


def test_each_failed_sample_is_written_once(tmp_path: Path) -> None:
    ledger = SkipLedger(tmp_path / "run", 0.5)
    ledger.add(batch([0, 1]))
    assert not (tmp_path / "run").exists(), "no failure, no file"
    for _ in range(3):
        ledger.add(batch([2, 3], failed=(3,)))
    assert (tmp_path / "run" / "skipped.jsonl").read_text() == (
        '{"id": "v/3.mp4", "index": 3, "reason": "broken"}\n'
    )
    assert (ledger.failed, ledger.seen, ledger.draws) == (1, 4, 11)


def test_a_restart_and_other_ranks_add_only_what_is_new(tmp_path: Path) -> None:
    one, other = SkipLedger(tmp_path, 1.0), SkipLedger(tmp_path, 1.0)
    one.add(batch([0], failed=(0,)))
    other.add(batch([1], failed=(0, 1)))
    one.add(batch([1, 2], failed=(1, 2)))
    assert listed(tmp_path) == [0, 1, 2]
    SkipLedger(tmp_path, 1.0).add(batch([0], failed=(0, 1, 2)))
    assert listed(tmp_path) == [0, 1, 2]


def test_a_torn_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    (tmp_path / "skipped.jsonl").write_text('{"id": "torn')
    SkipLedger(tmp_path, 1.0).add(batch([0], failed=(0,)))
    last = (tmp_path / "skipped.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["index"] == 0


def test_too_large_a_share_is_an_error_with_the_numbers(tmp_path: Path) -> None:
    ledger = SkipLedger(tmp_path, 0.1)
    ledger.add(batch(list(range(10)), failed=(0, 1)))  # 20 %, but only 12 draws
    with pytest.raises(DataError, match=r"3 of 20 samples could not be read \(15%\)") as caught:
        ledger.add(batch(list(range(10, 20)), failed=(15,)))
    assert "max_failed_share=0.1" in str(caught.value) and "v/15.mp4: broken" in str(caught.value)
    assert caught.value.where == str(tmp_path / "skipped.jsonl")
    assert listed(tmp_path) == [0, 1, 15]


def test_the_share_is_of_distinct_samples(tmp_path: Path) -> None:
    ledger = SkipLedger(tmp_path, 0.1)
    for _ in range(10):  # one bad file among ten, met again each epoch, stays one in ten
        ledger.add(batch(list(range(10)), failed=(4,)))
    assert ledger.failed / ledger.seen == 0.1


def test_no_failure_is_admitted_when_the_share_is_zero(tmp_path: Path) -> None:
    ledger = SkipLedger(tmp_path, 0.0, min_draws=1)
    ledger.add(batch([0, 1]))
    with pytest.raises(DataError, match="1 of 3"):
        ledger.add(batch([2], failed=(2,)))


def test_watching_a_loader_records_also_what_stops_it(tmp_path: Path) -> None:
    def batches():
        yield batch([0], failed=(5,))
        raise UnreadableError("nothing can be read", [FailureRecord("v/9.mp4", 9, "gone")])

    watched = SkipLedger(tmp_path, 1.0).watch(batches())
    assert next(watched).keys == [(0, 0)]
    with pytest.raises(UnreadableError, match="nothing can be read"):
        next(watched)
    assert listed(tmp_path) == [5, 9]


def parts(row: int, numbers: tuple[int, ...], of: int, replaced: bool = False) -> Batch:
    """A sample `row` of which these parts could not be read."""
    made = batch([row])
    made.failures = [FailureRecord(f"p/{n}.png", row, "broken", n, of, replaced) for n in numbers]
    return made


def test_a_part_counts_as_its_share_of_a_sample_and_is_listed_by_its_own_number(tmp_path: Path) -> None:
    ledger = SkipLedger(tmp_path, 0.1)
    ledger.add(parts(0, (70,), of=4))
    ledger.add(parts(1, (71, 72), of=2, replaced=True))
    assert (ledger.failed, ledger.seen, ledger.draws) == (1.25, 2, 3)
    ledger.add(parts(2, (70,), of=2))  # the next epoch puts it into another sample
    assert ledger.failed == 1.25
    assert listed(tmp_path) == [70, 71, 72]
    SkipLedger(tmp_path, 0.1).add(parts(2, (70,), of=2))
    assert listed(tmp_path) == [70, 71, 72]


def test_many_parts_are_too_large_a_share(tmp_path: Path) -> None:
    ledger = SkipLedger(tmp_path, 0.1)
    for row in range(19):
        ledger.add(parts(row, (row,) if row % 2 else (), of=4))
    assert ledger.failed == 2.25
    with pytest.raises(DataError, match=r"2\.5 of 20 samples could not be read \(12%\)") as caught:
        ledger.add(parts(19, (19,), of=4))
    assert "the last one: p/19.png: broken" in str(caught.value)
