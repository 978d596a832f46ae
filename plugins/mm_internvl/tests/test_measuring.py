"""The lengths of conversations: measured by several processes and ranks, kept in a file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from mm_internvl import measuring
from mm_internvl.conversations import Conversations

from mm_core.data.workers import StartWorker
from mm_core.errors import DataError


def of_tests(name: str):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sets = of_tests("internvl_sets")
data, dataset, loaded, said = sets.data, sets.dataset, sets.loaded, sets.said


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return sets.make(tmp_path_factory.mktemp("conversations"))


def test_lengths_group_batches_and_are_kept_in_a_file(place, tmp_path, monkeypatch):
    file = tmp_path / "kept" / "lengths.json"
    found = dataset(place, lengths=str(file))
    wanted = [len(found[index]["pieces"][0]["input_ids"]) for index in range(len(found))]
    assert found.lengths().tolist() == wanted
    packed = dataset(place, packing=True)
    assert packed.lengths().tolist() == [
        sum(len(piece["input_ids"]) for piece in packed[index]["pieces"]) for index in range(len(packed))
    ]

    def measured(self, row):
        raise AssertionError("measured again")

    monkeypatch.setattr(Conversations, "_length", measured)
    assert dataset(place, lengths=str(file)).lengths().tolist() == wanted
    with pytest.raises(AssertionError, match="measured again"):
        dataset(place, lengths=str(file), system="another").lengths()


@pytest.mark.slow
def test_many_rows_are_measured_by_several_processes(place, monkeypatch):
    rows = [data.asked(f"what is {n}?", "number " * (n % 7 + 1)) for n in range(30)]
    rows[7] = data.asked("<image>", "red", image="gone.png")
    wanted = dataset(place, rows).lengths()
    monkeypatch.setattr(measuring, "ALONE", 10)
    monkeypatch.setattr(measuring, "CHUNK", 8)
    monkeypatch.setattr(measuring, "_processes", lambda: 2)
    started = []
    monkeypatch.setattr(measuring, "StartWorker", lambda: started.append(1) or StartWorker())
    assert dataset(place, rows).lengths().equal(wanted) and started
    assert len(dataset(place, rows, packing=True, max_length=64)) > 1
    with pytest.raises(DataError, match="none of 30 conversations can be read; the first: there is no such"):
        dataset(place, [rows[7]] * 30, packing=True)


def test_lengths_that_can_not_be_kept_stop_nothing(place, tmp_path):
    (tmp_path / "a file").touch()
    with pytest.warns(UserWarning, match="the lengths of conversations can not be kept: "):
        found = dataset(place, lengths=str(tmp_path / "a file" / "lengths.json")).lengths()
    assert found.equal(dataset(place).lengths())
