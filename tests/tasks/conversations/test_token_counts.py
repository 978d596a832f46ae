"""The lengths of conversations: measured by several processes and ranks, kept in a file."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from mm_internvl.testing import TOKENS
from PIL import Image

from mm_core.contracts import Randomness
from mm_core.data.loading.stopping import StopRequested, stop_on
from mm_core.data.loading.workers import StartWorker
from mm_core.errors import DataError
from mm_core.tasks.conversations import token_counts
from mm_core.tasks.conversations.dataset import Conversations
from support import conversation_sets as sets
from support import warm
from support.ranks import free_port, run_ranks

HERE = Path(__file__).parent
data, dataset, place = sets.data, sets.dataset, sets.place


def test_rows_measured_with_random_draws_have_the_same_length_on_every_rank():
    rows = token_counts._Rows(range(10), lambda row: row + torch.randint(100, ()).item())
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    whole = rows[range(10)]
    assert torch.equal(torch.rand(()), expected), "the process draws on as before"
    assert [*rows[range(0, 10, 2)], *rows[range(1, 10, 2)]] == [*whole[0::2], *whole[1::2]]


def test_lengths_group_batches_and_are_kept_in_a_file(place, tmp_path, monkeypatch):
    file = tmp_path / "kept" / "lengths.json"
    found = dataset(place, lengths=str(file))
    wanted = [len(found[index]["pieces"][0].of("input_ids")) for index in range(len(found))]
    assert found.lengths().tolist() == wanted
    packed = dataset(place, packing=True)
    assert packed.lengths().tolist() == [
        sum(len(piece.of("input_ids")) for piece in packed[index]["pieces"]) for index in range(len(packed))
    ]

    def measured(self, row):
        raise AssertionError("measured again")

    monkeypatch.setattr(Conversations, "_length", measured)
    assert dataset(place, lengths=str(file)).lengths().tolist() == wanted
    with pytest.raises(AssertionError, match="measured again"):
        dataset(place, lengths=str(file), system="another").lengths()


@pytest.mark.parametrize("packing", [False, True])
def test_the_work_of_a_sample_is_that_of_its_images_in_every_epoch(place, tmp_path, packing):
    file = tmp_path / "lengths.json"
    rows = [*data.ROWS, *(data.asked("<image>what?", "red", image="a.png") for _ in range(5))]
    found = dataset(place, rows, packing=packing, lengths=str(file), max_length=300)
    for epoch in range(3):
        for index in range(len(found)):
            rng = Randomness(3).at("data", epoch, index)
            tiles = len(sets.pixels_of(found.sample_at(index, rng)))
            images = sum(len(piece.blocks) for piece in found.sample_at(index, rng)["pieces"])
            assert found.work_at(index, rng) >= tiles * TOKENS
            assert found.work_at(index, rng) <= tiles * TOKENS + 2 * max(images, tiles)  # tags around them
    again = pickle.loads(pickle.dumps(found))
    assert [again.work_at(n, rng) for n in range(len(again))] == [
        found.work_at(n, rng) for n in range(len(found))
    ]


def test_an_image_that_has_grown_since_is_an_error_with_the_file_of_the_lengths(place, tmp_path):
    rows = [data.asked("<image>what?", "red", image="grown.png"), data.asked("what?", "number " * 20)]
    Image.new("RGB", (16, 16)).save(place / "files" / "grown.png")
    fields = {"packing": True, "lengths": str(tmp_path / "kept.json")}
    length = int(dataset(place, rows, **fields, max_length=400).packs.lengths.sum())
    before = dataset(place, rows, **fields, max_length=length)
    assert len(before) == 1 and len(before[0]["pieces"]) == 2
    Image.new("RGB", (512, 128)).save(place / "files" / "grown.png")
    with pytest.raises(DataError, match="have changed since their lengths") as fault:
        dataset(place, rows, **fields, max_length=length)[0]
    assert fault.value.hint == f"delete {tmp_path / 'kept.json'}, and start again"


@pytest.mark.slow
def test_many_rows_are_measured_by_several_processes(place, monkeypatch):
    rows = [data.asked(f"what is {n}?", "number " * (n % 7 + 1)) for n in range(30)]
    rows[7] = data.asked("<image>", "red", image="gone.png")
    wanted = dataset(place, rows).lengths()
    monkeypatch.setattr(token_counts, "ALONE", 10)
    monkeypatch.setattr(token_counts, "CHUNK", 8)
    monkeypatch.setattr(token_counts, "_processes", lambda: 2)
    started = []
    monkeypatch.setattr(token_counts, "StartWorker", lambda: started.append(1) or StartWorker())
    assert dataset(place, rows).lengths().equal(wanted) and started
    assert len(dataset(place, rows, packing=True, max_length=64)) > 1
    with pytest.raises(
        DataError, match="none of 30 conversations can be read; error of the first: there is no such"
    ):
        dataset(place, [rows[7]] * 30, packing=True)


def test_lengths_that_cannot_be_kept_stop_nothing(place, tmp_path):
    (tmp_path / "a file").touch()
    with pytest.warns(UserWarning, match="the measured lengths of conversations cannot be stored in"):
        found = dataset(place, lengths=str(tmp_path / "a file" / "lengths.json")).lengths()
    assert found.equal(dataset(place).lengths())


def test_measuring_that_takes_long_shows_its_progress(place, monkeypatch, caplog):
    rows = [data.asked(f"what is {n}?", "number") for n in range(25)]
    dataset(place, rows).lengths()
    assert not caplog.messages
    monkeypatch.setattr(token_counts, "SECONDS", 0.0)
    monkeypatch.setattr(token_counts, "CHUNK", 10)
    dataset(place, rows).lengths()
    assert caplog.messages[-1] == "counting tokens of conversations: 25 of 25 in 0 s"
    assert [text.rpartition(" in")[0] for text in caplog.messages[:2]] == [
        f"counting tokens of conversations: {n} of 25" for n in (10, 20)
    ]


@pytest.mark.slow
def test_ranks_share_the_measuring_and_find_the_same(place, tmp_path):
    rows = [data.asked(f"what is {n}?", "number " * (n % 7 + 1)) for n in range(9)]
    rows[4] = data.asked("<image>", "red", image="gone.png")
    files = [data.write(place / "files" / "shared.jsonl", rows)]
    files += [tmp_path / "lengths.json"]
    files += [data.write(place / "files" / "bad.jsonl", [{**rows[4], "image": f"{n}.png"} for n in range(3)])]
    for rank in range(2):
        data.write(tmp_path / f"{rank}.jsonl", rows[: rank + 2])
    wanted = dataset(place, rows).lengths().tolist()
    wanted[4] = round(sum(wanted[:4] + wanted[5:]) / 8)
    said = run_ranks(HERE / "token_count_ranks.py", 2, place / "model", *files, tmp_path)
    found = [json.loads(text.splitlines()[-1]) for text in said]
    assert [one["lengths"] for one in found] == [wanted, wanted]
    lines = [[int(line.removeprefix("line ")) for line in one["asked"]] for one in found]
    assert lines == [[1, 3, 5, 7, 9], [2, 4, 6, 8]], "each measures its own"
    assert [one["wrote"] for one in found] == [1, 0]
    assert [one["again"] for one in found] == [[wanted, 0]] * 2
    assert found[0]["bad"] == found[1]["bad"]
    assert found[0]["bad"].startswith(
        f"{place}/files/0.png: none of 3 conversations can be read; error of the first: "
    )
    for rank, one in enumerate(found):
        assert one["other"].startswith(
            f"{tmp_path}/{rank}.jsonl: rank 0 reads 2 conversations, but rank 1 reads 3"
        )


def test_measuring_ends_where_the_run_is_asked_to_stop_and_keeps_nothing(place, tmp_path, monkeypatch):
    rows = [data.asked(f"what is {n}?", "number") for n in range(25)]
    monkeypatch.setattr(token_counts, "CHUNK", 10)
    asked = []
    measure = Conversations._length
    monkeypatch.setattr(Conversations, "_length", lambda self, row: asked.append(row) or measure(self, row))
    file = tmp_path / "lengths.json"
    with stop_on(lambda: bool(asked)), pytest.raises(StopRequested):
        dataset(place, rows, packing=True, lengths=str(file))
    assert len(asked) == 10 and not file.exists()
    assert len(dataset(place, rows, packing=True, lengths=str(file)).packs.lengths) == 25, (
        "nobody asks any more"
    )
    assert file.exists()


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_signal_to_one_rank_ends_a_run_that_measures(place, tmp_path, world):
    count = 40_000  # alone, enough for processes; of two ranks, each measures by itself
    rows = data.write(
        tmp_path / "rows.jsonl", [data.asked("what is it?", f"number {n}") for n in range(count)]
    )
    train = {"type": "conversations", "processor": str(place / "model"), "packing": True}
    train |= {"sources": [{"annotations": str(rows)}], "max_length": 128}
    sections = {"data": {"train": train}, "train": {"micro_batch_size": 1, "global_batch_size": 2}}
    sets.config_of(tmp_path, place / "model", **sections)
    port = free_port()
    started = []
    for rank in range(world):
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        words = [HERE / "stopped_run.py", "train", "--config", tmp_path / "tuned.yaml"]
        started.append(warm.Running(words, env=os.environ | environment, merged=True))
    try:
        until = time.monotonic() + 120
        while "counting tokens of conversations" not in started[0].out:
            assert time.monotonic() < until, started[0].out
            time.sleep(0.02)
        started[-1].process.send_signal(signal.SIGTERM)
        ends = [running.end(120) for running in started]
    finally:
        for running in started:
            running.process.kill()
    text = "".join(said for _, said, _ in ends)
    assert [code for code, _, _ in ends] == [75] * world, text
    why = "SIGTERM" if world == 1 else "a signal to another rank"
    assert f"stopped by {why} before the first step; run folder {tmp_path / 'runs' / 'tuned'}" in text
    last = [int(found) for found in re.findall(r"counting tokens of conversations: (\d+) of", text)][-1]
    assert last < count / world and not list(tmp_path.glob("runs/tuned/checkpoints/step_*"))
