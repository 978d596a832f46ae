"""The dataset: what a sample holds, what is refused, what a batch is to the model."""

from __future__ import annotations

import importlib.util
import json
import pickle
from pathlib import Path

import pytest
import torch
from mm_internvl import measuring
from mm_internvl.chat import IGNORED
from mm_internvl.config_data import Source
from mm_internvl.conversations import Conversations
from mm_internvl.testing import TOKENS, make_tiny_checkpoint
from transformers import AutoModelForImageTextToText

from mm_core.contracts import Randomness, SampleKey
from mm_core.data.images import read_image
from mm_core.data.loader import MicroBatchLoader
from mm_core.data.sampler import BatchPlan
from mm_core.data.skipped import SkipLedger
from mm_core.data.workers import StartWorker
from mm_core.errors import CheckpointError, ContractError, DataError
from mm_core.parallel.initialise import initialise
from mm_core.tasks.pretrained import PretrainedTask


def of_tests(name: str):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


data = of_tests("internvl_data")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny model, pictures, and rows about them."""
    top = tmp_path_factory.mktemp("conversations")
    make_tiny_checkpoint(top / "model")
    data.draw(top / "files")
    data.write(top / "files" / "rows.jsonl", data.ROWS)
    return top


def dataset(place: Path, rows: str | list = "files/rows.jsonl", **options) -> Conversations:
    if not isinstance(rows, str):
        data.write(place / "files" / "own.jsonl", rows)
        rows = "files/own.jsonl"
    options = {"max_length": 400, "max_tiles": 4, "frames": 3, **options}
    return Conversations((Source(str(place / rows)),), str(place / "model"), **options)


def said(found: Conversations, sample: dict) -> str:
    """A sample's tokens as text, tiles as their number."""
    text = found.chat.tokenizer.decode(torch.cat([piece["input_ids"] for piece in sample["pieces"]]))
    for tiles in range(8, 0, -1):
        text = text.replace("<IMG_CONTEXT>" * TOKENS * tiles, f"{tiles}")
    return text


# -- samples -------------------------------------------------------------------------------------


def test_images_and_frames_stand_where_their_placeholders_are(place):
    found = dataset(place)
    head, end = "<|im_start|>", "<|im_end|>\n"
    assert (
        said(found, found[1])
        == f"{head}user\n<img>3</img>\nwhat is this?{end}{head}assistant\na picture{end}"
    )
    frames = "\n".join(f"Frame{n}: <img>1</img>" for n in (1, 2, 3))
    assert said(found, found[3]).startswith(f"{head}user\n{frames}\nwhat is in it?{end}")
    assert said(found, found[4]) == (
        f"{head}system\nthe system{end}{head}user\n<img>1</img>\nwhat?{end}{head}assistant\ngreen{end}"
    )
    for index, files in ((0, []), (1, ["a.png"]), (2, ["b.png", "c.jpg", "a.png"])):
        tiles = [found.tiling.cut(read_image(place / "files" / name)) for name in files]
        wanted = torch.cat([torch.empty(0, 3, 56, 56), *tiles])
        assert torch.equal(found[index]["pixel_values"], wanted)
        context = found.chat.tokenizer.context_image_token_id
        assert int((found[index]["pieces"][0]["input_ids"] == context).sum()) == TOKENS * len(wanted)


def test_frames_of_a_video_are_evenly_spread(place):
    pixels = dataset(place)[3]["pixel_values"]
    assert pixels.shape == (3, 3, 56, 56)
    tiling = dataset(place).tiling
    levels = (pixels.mean((2, 3)) * torch.tensor(tiling.std) + torch.tensor(tiling.mean)) * 255 / 20
    # Frames 2, 6 and 10 of 12, as numpy.arange(12 / 3 / 2, 12, 12 / 3) has them.
    assert levels.mean(1).round().tolist() == [2, 6, 10]
    assert len(dataset(place, frames=100)[3]["pixel_values"]) == 12


def test_a_system_prompt_is_given_to_those_that_have_none(place):
    found = dataset(place, system="a system of its own")
    assert said(found, found[0]).startswith(
        "<|im_start|>system\na system of its own<|im_end|>\n<|im_start|>user"
    )
    assert said(found, found[4]).startswith("<|im_start|>system\nthe system<|im_end|>\n<|im_start|>user")


def test_a_json_list_is_read_as_well(place):
    (place / "files" / "rows.json").write_text(json.dumps(data.ROWS), encoding="utf-8")
    lines, whole = dataset(place), dataset(place, "files/rows.json")
    for index in range(len(data.ROWS)):
        assert torch.equal(lines[index]["pieces"][0]["labels"], whole[index]["pieces"][0]["labels"])


def test_weights_say_how_often_an_epoch_sees_a_source(place):
    data.write(place / "files" / "half.jsonl", [data.asked(f"what {n}?", str(n)) for n in range(6)])
    sources = [
        Source(str(place / "files/rows.jsonl"), weight=2),
        Source(str(place / "files/half.jsonl"), weight=0.5),
    ]
    found = Conversations(sources, str(place / "model"))
    names = [found[index]["id"] for index in range(len(found))]
    assert len(names) == 12 + 3
    assert sorted(names[:12]) == sorted([f"{place}/files/rows.jsonl, line {n}" for n in range(1, 7)] * 2)
    assert len(set(names[12:])) == 3 and all("half.jsonl" in name for name in names[12:])


def test_what_is_too_long_is_cut_but_never_in_an_image(place):
    long = data.asked("what?", "the number", "<image>\nand this?", "a digit", image="b.png")
    whole = dataset(place, [long])[0]["pieces"][0]
    context = whole["input_ids"] == dataset(place).chat.tokenizer.context_image_token_id
    start, end = int(context.nonzero()[0]) - 1, int(context.nonzero()[-1]) + 2
    for limit in range(8, len(whole["input_ids"]) + 1):
        found = dataset(place, [long], max_length=limit)
        if start < limit < end:
            with pytest.raises(DataError) as fault:
                found[0]
            assert fault.value.what == (
                f"the row has {len(context)} tokens, and cutting it at {limit} would go through image 1"
            )
        elif not bool((whole["labels"][:limit] != IGNORED).any()):
            with pytest.raises(DataError, match=f"the first {limit} hold nothing that the assistant says"):
                found[0]
        else:
            sample = found[0]
            assert torch.equal(sample["pieces"][0]["input_ids"], whole["input_ids"][:limit])
            assert torch.equal(sample["pieces"][0]["labels"], whole["labels"][:limit])
            assert len(sample["pixel_values"]) == (1 if limit >= end else 0)


def test_it_pickles_without_its_tokenizer(place):
    found = dataset(place, packing=True)
    copied = pickle.dumps(found)
    assert b"TokenizersBackend" not in copied
    assert torch.equal(pickle.loads(copied)[0]["pixel_values"], found[0]["pixel_values"])


# -- what is refused -----------------------------------------------------------------------------

_USER, _SAID = {"role": "user", "content": "what?"}, {"role": "assistant", "content": "red"}


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (data.asked("<image>?", "red", image="gone.png"), "there is no such image"),
        (data.asked("<video>?", "red", video="gone.mp4"), "the video does not exist"),
        (data.asked("<image>?", "red"), "the conversation shows 1 image and the row lists 0"),
        (
            data.asked("what?", "red", images=["a.png", "b.png"]),
            "the conversation shows 0 images and the row lists 2",
        ),
        (data.asked("<video>?", "red", image="a.png"), "the conversation shows 0 images and the row lists 1"),
        ({"messages": [_USER, {"role": "bot", "content": "red"}]}, "turn 2 has the unknown role 'bot'"),
        ({"messages": [_USER]}, "no turn is the assistant's, so there is nothing to learn"),
        (
            {"messages": [_USER, {"role": "system", "content": "s"}, _SAID]},
            "a system prompt stands behind the first turn",
        ),
        ({"messages": [_USER, {"role": "assistant", "content": 7}]}, "turn 2 says a number, not text"),
        ({"messages": [_USER, {"role": "assistant"}]}, "turn 2 has no `role` and `content`"),
        ({"messages": []}, "`messages` is no list of turns"),
        ({"text": "what?"}, "the row has neither `conversations` nor `messages`, but text"),
        ({"messages": [_USER, _SAID], "conversations": []}, "the row has conversations and messages"),
        (["what?"], "a list instead of a row"),
        ('{"messages": [', 'this is not JSON: Expecting value at column 15 of `{"messages": [`'),
        (
            data.asked("what?", "<image>", image="a.png"),
            "turn 2, which is the assistant's, shows an image or a video",
        ),
        (data.asked("<image>", "red", image="../a.png"), "the path '../a.png' leads outside the folder"),
        (data.asked("<image>", "red", image="/a.png"), "the path '/a.png' leads outside the folder"),
        (
            data.asked("say <|im_end|>", "red"),
            "turn 1 says '<|im_end|>', which is a token of the chat template's own",
        ),
        (
            data.asked("what?", "<IMG_CONTEXT>"),
            "turn 2 says '<IMG_CONTEXT>', which is a token of images",
        ),
        (
            json.dumps(data.asked("what \ud83d?", "red")),
            "turn 1 holds half of a surrogate pair, which is no character",
        ),
        (
            json.dumps(data.asked("<image>", "red", image="\ud83d.png")),
            "the path '\\ud83d.png' holds half of a surrogate pair, which is no character",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "sound"}]}, _SAID]},
            "turn 1 has a part that is no text, image or video",
        ),
    ],
)
def test_a_bad_row_is_one_sentence(place, row, what):
    with pytest.raises(DataError) as fault:
        dataset(place, [data.ROWS[0], row])[1]
    assert fault.value.what == what


def test_an_image_bomb_is_a_bad_row(place):
    row = data.asked("<image>?", "red", image="a.png")
    with pytest.raises(DataError, match="an image of 100x60 is larger than max_pixels"):
        dataset(place, [row], max_pixels=5999)[0]


def test_files_without_conversations(place):
    with pytest.raises(DataError, match="the file of conversations does not exist"):
        dataset(place, "files/gone.jsonl")
    with pytest.raises(
        DataError, match="none of 2 conversations can be used; the first: turn 1 has the unknown role 'x'"
    ):
        dataset(place, [{"messages": [{"role": "x", "content": ""}]}] * 2)
    with pytest.raises(
        DataError, match="none of 1 conversations can be read; the first: there is no such image"
    ):
        dataset(place, [data.asked("<image>", "red", image="gone.png")], packing=True)


def test_a_tokenizer_without_a_chat_template(place, tmp_path):
    folder = make_tiny_checkpoint(tmp_path)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError) as fault:
        Conversations((Source(str(place / "files/rows.jsonl")),), str(folder))
    assert str(fault.value) == (
        f"{folder}: the tokenizer has no chat template\n"
        "  accepted: chat_template.jinja, or `chat_template` in tokenizer_config.json\n"
        "  hint: take the folder of a model that was trained to converse, or copy the template of one"
    )


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            ("{{ message['content'] }}", "{{ message['content'][:3] }}"),
            "the chat template changes what the assistant says",
        ),
        (
            ("{{ '<IMG_CONTEXT>\n' }}", ""),
            "the chat template shows 0 images and videos of the conversation's 1",
        ),
        (
            ("{% for message", "{{ raise_exception('no') }}{% for message"),
            "the chat template refuses the conversation: no",
        ),
    ],
)
def test_templates_that_will_not_do(place, tmp_path, change, what):
    folder = make_tiny_checkpoint(tmp_path)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace(*change))
    found = Conversations((Source(str(place / "files/rows.jsonl")),), str(folder))
    with pytest.raises(DataError, match=what):
        found[4]


def test_packed_rows_come_one_at_a_time(place):
    found = dataset(place, packing=True)
    with pytest.raises(ContractError, match="a micro-batch of 2 packed rows"):
        found.collate([{**found[0], "key": SampleKey(0, 0), "weight": 1.0}] * 2)


# -- batches ---------------------------------------------------------------------------------------


def loaded(found: Conversations, size: int, steps: range = range(1), whole: int | None = None, seed: int = 3):
    plan = BatchPlan(len(found), size, whole or size, seed, "random", drop_last=False)
    return MicroBatchLoader(
        found,
        plan,
        batch_transform=None,
        rng=Randomness(seed),
        rank=0,
        data_parallel=1,
        start_step=steps.start,
        end_step=steps.stop,
        workers=0,
        prefetch=2,
        pin_memory=False,
        device_type="cpu",
    )


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


def task_of(place) -> PretrainedTask:
    """The task `pretrained` on the tiny model, in float64."""
    with torch.device("meta"):
        made = PretrainedTask(str(place / "model"), "AutoModelForImageTextToText")
    made.model.to_empty(device="cpu")
    initialise(made.model, "model", Randomness(1))
    weights = AutoModelForImageTextToText.from_pretrained(place / "model").state_dict()
    made.model.load_state_dict(weights)
    return made.double()


def sums(task, batches):
    """(loss as a sum, labels, gradients) over batches."""
    total, weight = 0.0, 0.0
    for batch in batches:
        batch.inputs["pixel_values"] = batch.inputs["pixel_values"].double()
        counted = task.batch_transform()(batch)
        found = task.loss(task.prepare(counted, Randomness(1)))
        found.total.backward()
        total, weight = total + float(found.total.detach()), weight + found.weight
    grads = {name: p.grad.clone() for name, p in task.named_parameters() if p.grad is not None}
    return total, weight, grads


def near(found, wanted):
    assert found[1] == wanted[1]
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    for name, gradient in wanted[2].items():
        error = (found[2][name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
        assert error < 1e-5, name


def test_a_packed_epoch_trains_as_an_unpacked_one(place):
    rows = [*data.ROWS, *(data.asked(f"what is {n}?", "a number " * (n + 1)) for n in range(6))]
    alone, packed = dataset(place, rows), dataset(place, rows, packing=True, max_length=150)
    assert len(packed) < len(alone) and packed.packs.fill > 0.6
    wanted = sums(task_of(place), loaded(alone, 1, range(len(alone))))
    near(sums(task_of(place), loaded(alone, 4, range(3))), wanted)
    near(sums(task_of(place), loaded(packed, 1, range(len(packed)), seed=5)), wanted)
    together = [list(batch.inputs) for batch in loaded(packed, 1, range(len(packed)))]
    assert all(names == ["input_ids", "labels", "pixel_values", "position_ids"] for names in together)


@pytest.mark.parametrize("packing", [False, True])
def test_a_blank_tile_stands_in_where_there_is_no_image(place, packing):
    found = dataset(place, [data.ROWS[0], data.ROWS[5]], packing=packing)
    (batch,) = loaded(found, 1 if packing else 2)
    assert torch.equal(batch.inputs["pixel_values"], found.tiling.blank())
    context = found.chat.tokenizer.context_image_token_id
    assert int((batch.inputs["input_ids"] == context).sum()) == TOKENS
    total, weight, grads = sums(task_of(place), [batch])
    plain = task_of(place)
    logits_loss, count = torch.zeros(()), 0
    for piece in (dataset(place, [row])[0]["pieces"][0] for row in (data.ROWS[0], data.ROWS[5])):
        logits = plain.model(input_ids=piece["input_ids"][None]).logits[0, :-1]
        labels = piece["labels"][1:]
        logits_loss = logits_loss + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        count += int((labels != IGNORED).sum())
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
