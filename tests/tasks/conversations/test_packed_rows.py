"""Batches of the dataset: packed or padded, with what cannot be read."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from mm_internvl.testing import TOKENS

import mm_core
from mm_core.contracts import IGNORED_LABEL, Randomness, SampleKey
from mm_core.data.datasets.media_report import check
from mm_core.data.loading.skipped import SkipLedger
from mm_core.errors import ContractError, DataError, PartsError
from mm_core.plan import make_plan
from mm_core.tasks.conversations.dataset import Conversations
from support import conversation_sets as sets

pytestmark = pytest.mark.filterwarnings("ignore:rows are packed, but sdpa")  # test_attention.py expects it

data, dataset, loaded, place = sets.data, sets.dataset, sets.loaded, sets.place


def test_packed_rows_come_one_at_a_time(place):
    found = dataset(place, packing=True)
    with pytest.raises(ContractError, match="a micro-batch of 2 packed rows is not supported"):
        found.collate([{**found[0], "key": SampleKey(0, 0), "weight": 1.0}] * 2)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_larger_packed_batches_are_refused_before_rows_are_read(place, tmp_path, monkeypatch, split):
    at = packed(place, 400, 0)
    at |= {name: {**at["train"], "packing": name == split} for name in ("train", "validation")}
    batches = {"steps": 2, "micro_batch_size": 2, "global_batch_size": 2}
    sections = {"data": at, "validation": {"every": 2}}
    config = sets.config_of(tmp_path, place / "model", **sections, train=batches)

    def opened(self, *args, **options):
        raise AssertionError("opened")

    monkeypatch.setattr(Conversations, "__init__", opened)
    for beginning in (lambda: make_plan(config, 1, train=range(9)), lambda: mm_core.train(config)):
        with pytest.raises(ContractError, match="a micro-batch of 2 packed rows is not supported") as fault:
            beginning()
        assert fault.value.where == "train.micro_batch_size"
    batches["micro_batch_size"] = 1
    single = sets.config_of(tmp_path, place / "model", **sections, train=batches)
    assert make_plan(single, 1, train=range(9)).accumulation == 2


def test_it_pickles_without_its_tokenizer(place):
    found = dataset(place, packing=True)
    copied = pickle.dumps(found)
    assert b"TokenizersBackend" not in copied
    assert torch.equal(sets.pixels_of(pickle.loads(copied)[0]), sets.pixels_of(found[0]))


@pytest.mark.parametrize("packing", [False, True])
def test_bad_rows_are_skipped_counted_and_listed(place, tmp_path, packing):
    bad = [data.asked("<image>", "red", image="gone.png"), {"messages": [{"role": "x", "content": ""}]}, "{"]
    found = dataset(place, [*data.ROWS, *bad], packing=packing, max_length=150)
    ledger = SkipLedger(tmp_path, max_failed_share=1.0)
    batches = list(ledger.watch(loaded(found, 1, range(len(found)))))
    listed = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert ledger.failed == (1 if packing else 3)  # they share one row
    assert {entry["reason"] for entry in listed} == {
        "there is no such image", "turn 1 has the unknown role 'x'",
        "this is not JSON: Expecting property name enclosed in double quotes at column 2 of `{`",
    }  # fmt: skip
    assert {entry["id"].rpartition("/")[2] for entry in listed} == {
        "gone.png",
        "own.jsonl, line 8",
        "own.jsonl:9",
    }
    assert len(batches) == len(found)


def test_bad_rows_are_as_large_a_share_of_packed_rows_as_of_conversations(place, tmp_path):
    """Even where a packed row holds many conversations; and each is listed once, whatever the epoch."""
    good = [data.asked(f"what is {n}?", "number " * (n % 7 + 1)) for n in range(190)]
    bad = [data.asked("<image>", "red", image=f"gone_{n}.png") for n in range(10)]
    found = dataset(place, [*good, *bad], packing=True, max_length=80)
    ledger = SkipLedger(tmp_path, max_failed_share=0.1, min_draws=1000)
    for _ in ledger.watch(loaded(found, 1, range(2 * len(found)))):
        pass
    assert 0.04 < ledger.failed / len(found) < 0.08
    listed = [json.loads(line)["id"] for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert len(listed) == len(set(listed)) == 10


def test_a_packed_epoch_trains_as_an_unpacked_one(place):
    rows = [*data.ROWS, *(data.asked(f"what is {n}?", "a number " * (n + 1)) for n in range(6))]
    alone, packed = dataset(place, rows), dataset(place, rows, packing=True, max_length=150)
    assert len(packed) < len(alone) and packed.packs.fill > 0.6
    wanted = sets.sums(sets.task_of(place), loaded(alone, 1, range(len(alone))))
    sets.near(sets.sums(sets.task_of(place), loaded(alone, 4, range(3))), wanted)
    sets.near(sets.sums(sets.task_of(place), loaded(packed, 1, range(len(packed)), seed=5)), wanted)
    together = [list(batch.inputs) for batch in loaded(packed, 1, range(len(packed)))]
    assert all(names == ["input_ids", "labels", "pixel_values", "position_ids"] for names in together)


@pytest.mark.parametrize("packing", [False, True])
def test_a_blank_tile_stands_in_where_there_is_no_image(place, packing):
    found = dataset(place, [data.ROWS[0], data.ROWS[5]], packing=packing)
    (batch,) = loaded(found, 1 if packing else 2)
    assert torch.equal(batch.inputs["pixel_values"], found.chat.processor.blank.vision["pixel_values"])
    context = found.chat.processor.tokenizer.context_image_token_id
    assert int((batch.inputs["input_ids"] == context).sum()) == TOKENS
    total, weight, grads = sets.sums(sets.task_of(place), [batch])
    plain = sets.task_of(place)
    logits_loss, count = torch.zeros(()), 0
    for piece in (dataset(place, [row])[0]["pieces"][0] for row in (data.ROWS[0], data.ROWS[5])):
        logits = plain.model(input_ids=piece.of("input_ids")[None]).logits[0, :-1]
        labels = piece.of("labels")[1:]
        logits_loss = logits_loss + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        count += int((labels != IGNORED_LABEL).sum())
    logits_loss.backward()
    assert weight == count
    assert total == pytest.approx(float(logits_loss.detach()), rel=1e-5)
    for name, parameter in plain.named_parameters():
        if parameter.grad is None or "vision_tower" in name or "projector" in name:
            assert name not in grads or float(grads[name].abs().max()) == 0, name
        else:
            assert (grads[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name


def test_a_resume_reads_what_an_unbroken_run_reads(place):
    rows = [data.asked(f"what is {n}?", "number " * (n % 7 + 1)) for n in range(30)]
    whole = [b.ids for b in loaded(dataset(place, rows, packing=True, max_length=64), 1, range(12), whole=2)]
    first = [b.ids for b in loaded(dataset(place, rows, packing=True, max_length=64), 1, range(5), whole=2)]
    rest = [
        b.ids for b in loaded(dataset(place, rows, packing=True, max_length=64), 1, range(5, 12), whole=2)
    ]
    assert first + rest == whole


# -- damaged images --------------------------------------------------------------------------------


def damage(place: Path, name: str = "torn.png") -> str:
    """An image whose header is whole and whose pixels are not."""
    whole = (place / "files" / "a.png").read_bytes()
    (place / "files" / name).write_bytes(whole[: len(whole) // 2])
    return name


def torn(place: Path, number: int) -> dict:
    return data.asked("<image>?", "a colour", image=damage(place, f"torn_{number}.png"))


def test_a_damaged_image_costs_its_own_conversation(place):
    """Row by row and epoch by epoch, the others of a packed row are as they would be without it."""
    rows = [*data.ROWS, *(data.asked(f"what is {n}?", "a number " * (n + 1)) for n in range(6))]
    found = dataset(place, [*rows[:4], torn(place, 0), *rows[4:]], packing=True, max_length=200)
    whole = dataset(place, rows)
    wanted = {whole[n]["id"]: whole[n] for n in range(len(whole))}
    for epoch in range(3):
        rng = Randomness(3).at("data", epoch, 0)
        samples = [found.sample_at(row, rng) for row in range(len(found))]
        (missing,) = [sample["missing"] for sample in samples if "missing" in sample]
        assert list(missing.faults) == [4] and missing.of > 1
        pieces = [piece.of("input_ids").tolist() for sample in samples for piece in sample["pieces"]]
        alone = [wanted[name]["pieces"][0].of("input_ids").tolist() for name in wanted]
        assert sorted(pieces) == sorted(alone)
        tiles = sum(len(sets.pixels_of(sample)) for sample in samples)
        assert tiles == sum(len(sets.pixels_of(sample)) for sample in wanted.values())


def test_a_damaged_image_is_counted_once_as_its_share_and_listed_once(place, tmp_path):
    """Over epochs that pack it with others, over a resume, and on each of two ranks."""
    rows = [data.asked(f"what is {n}?", "number " * (n % 7 + 1)) for n in range(40)]
    found = dataset(place, [*rows, torn(place, 0), torn(place, 1)], packing=True, max_length=80)
    plan_steps = range(3 * len(found))
    ledger = SkipLedger(tmp_path, max_failed_share=1.0)
    batches = list(ledger.watch(loaded(found, 1, plan_steps)))
    shares = {failure.part: failure.parts for failure in batches[0].failures}
    for batch in batches:
        for failure in batch.failures:
            shares.setdefault(failure.part, failure.parts)
    assert set(shares) == {40, 41} and ledger.failed == pytest.approx(sum(1 / n for n in shares.values()))
    listed = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert sorted((entry["index"], Path(entry["id"]).name) for entry in listed) == [
        (40, "torn_0.png"),
        (41, "torn_1.png"),
    ]
    assert all(entry["reason"].startswith("the image cannot be read: ") for entry in listed)
    again = list(ledger.watch(loaded(found, 1, range(len(found), len(plan_steps)))))
    same = [[(b.ids, b.failures) for b in part] for part in (batches[len(found) :], again)]
    assert same[0] == same[1]
    assert len((tmp_path / "skipped.jsonl").read_text().splitlines()) == 2
    ranks = [loaded(found, 1, range(4), whole=2, rank=rank, ranks=2) for rank in range(2)]
    shared = [(b.ids, b.failures) for pair in zip(*ranks, strict=True) for b in pair]
    assert shared == [(b.ids, b.failures) for b in loaded(found, 1, range(4), whole=2)]


def test_a_check_lists_each_conversation_of_a_packed_row_that_cannot_be_read(place):
    rows = [*(torn(place, n) for n in range(3)), *(data.asked(f"what is {n}?", "a") for n in range(2))]
    states = [*check(dataset(place, rows, packing=True, max_length=400), 1)]
    assert {Path(state.name).name for state in states if state.fault} == {f"torn_{n}.png" for n in range(3)}
    assert states[-1].done == states[-1].of < len(states)


def test_a_row_of_which_nothing_can_be_read_is_replaced(place):
    found = dataset(place, [torn(place, 0), torn(place, 1), data.asked("what?", "x" * 150)], packing=True)
    with pytest.raises(PartsError) as fault:
        dataset(place, [torn(place, 0), torn(place, 1)], packing=True)[0]
    assert set(fault.value.faults) == {0, 1} and fault.value.of == 2
    assert "torn_" in str(fault.value) and "(and 1 other part of the same sample)" in str(fault.value)
    assert len(found) == 1 and set(found[0]["missing"].faults) == {0, 1}


def run_of(place: Path, folder: Path, rows: list, **sections) -> Path:
    """A run over packed rows; its folder."""
    file = data.write(place / "files" / "run.jsonl", rows)
    folder.mkdir(exist_ok=True)
    config = sets.config_of(folder, place / "model", file, **sections)
    folder = Path(config.run.dir) / config.run.name
    mm_core.train(config)
    return folder


def packed(place: Path, limit: int, workers: int = 0, **loader) -> dict:
    train = {"type": "conversations", "processor": str(place / "model")}
    train |= {"sources": [{"annotations": str(place / "files" / "run.jsonl")}], "packing": True}
    return {"train": train | {"max_length": limit}, "loader": {"workers": workers, **loader}}


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_trains_on_what_is_left_of_a_pack(place, tmp_path, capsys, workers):
    """Two epochs of one packed row: its losses are those of the row without the damaged image, also held
    out."""
    steps = {"steps": 2, "micro_batch_size": 1, "global_batch_size": 1}
    good = [data.ROWS[1], data.ROWS[0], data.ROWS[5]]
    losses = {}
    for name, rows in (("whole", good), ("torn", [good[0], torn(place, 0), *good[1:]])):
        read = packed(place, 400, workers if name == "torn" else 0, max_failed_share=0.5)
        read["validation"] = read["train"]
        folder = run_of(place, tmp_path / name, rows, data=read, train=steps, validation={"every": 2})
        logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [line[key] for line in logged for key in ("loss", "validation/loss") if key in line]
    assert len(losses["torn"]) == 3 and losses["torn"] == pytest.approx(losses["whole"], rel=1e-6)
    (listed,) = (folder / "skipped.jsonl").read_text().splitlines()  # once, of two epochs
    assert json.loads(listed)["index"] == 1 and json.loads(listed)["id"].endswith("torn_0.png")
    assert not (tmp_path / "whole" / "runs" / "tuned" / "skipped.jsonl").exists()
    said = capsys.readouterr().err
    assert "warning: parts of rows of data.validation could not be read and are left out: " in said
    assert "torn_0.png: the image cannot be read: " in said and "are not counted" not in said
    replaced = "samples that could not be read were replaced, or parts of them skipped"
    assert f"{replaced}; see {folder}/skipped.jsonl for the list" in said


def test_too_many_damaged_images_end_a_run(place, tmp_path):
    good = data.asked("<image>?", "a colour", image="a.png")
    rows = [row for n in range(20) for row in (good, good, torn(place, n))]
    steps = {"steps": 40, "micro_batch_size": 1, "global_batch_size": 1}
    length = int(dataset(place, [good]).lengths()[0])
    with pytest.raises(DataError) as fault:
        run_of(place, tmp_path, rows, data=packed(place, 3 * length), train=steps)
    assert "more than data.loader.max_failed_share=0.1 allows" in fault.value.what
    seen, share = re.match(r"[\d.]+ of (\d+) samples could not be read \((\d+)%\)", fault.value.what).groups()
    assert 15 <= int(seen) <= 20 and 20 <= int(share) <= 50
