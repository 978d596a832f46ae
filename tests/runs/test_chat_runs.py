"""Runs of vision-language models on conversations: over ranks, exported, asked and evaluated."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
import yaml

from mm_core.builtin.configs.conversations import ConversationSource
from mm_core.tasks import Conversations
from support.chat_families import FAMILIES
from support.chat_rows import library_inputs, library_processor, messages_of
from support.logs import losses

pytestmark = pytest.mark.slow
MOST = pytest.mark.nightly
CASES = [name if name in ("qwen3_vl", "gemma3") else pytest.param(name, marks=MOST) for name in FAMILIES]


def config(folder, file, **sections):
    data = {"type": "conversations", "sources": [{"annotations": str(file)}], "max_length": 2048}
    wanted = {
        "run": {"name": "chat", "dir": "runs"},
        "task": {
            "type": "pretrained",
            "from_pretrained": str(folder),
            "auto_class": "AutoModelForImageTextToText",
        },
        "data": {"train": data, "loader": {"workers": 0}},
        "engine": {"type": "fsdp2", "sub_modules_to_wrap": "auto"},
        "optimizer": {"type": "adamw", "lr": 1e-3},
        "train": {"steps": 3, "micro_batch_size": 1, "global_batch_size": 6},
        "checkpoint": {"every": 10**6},
        "log": {"every": 1, "trackers": []},
    }
    for name, section in sections.items():
        wanted[name] = {**wanted.get(name, {}), **section}
    return wanted


def trained(name, wanted, mm, tmp_path, *options):
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(wanted))
    done = mm("train", "--config", path, f"run.dir={tmp_path}", f"run.name={name}", *options)
    assert done.code == (75 if "--stop-after" in options else 0), done.err
    return tmp_path / name


@pytest.mark.parametrize("name", CASES)
def test_ranks_and_micro_batches_do_not_change_the_losses(name, chat_model, chat_rows, tmp_path, mm):
    """Rows with and without images on different ranks, in micro-batches of one, two and six."""
    wanted = config(chat_model(name), chat_rows)
    found = [
        losses(
            trained(
                f"r{ranks}_{micro}", wanted, mm, tmp_path, "--nproc", ranks, f"train.micro_batch_size={micro}"
            )
        )
        for ranks, micro in ((1, 6), (1, 2), (2, 1), (3, 2))
    ]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-6)


def test_weights_of_turns_are_those_of_the_whole_step(chat_model, chat_rows, tmp_path, mm):
    """On any rank, in any micro-batch, and in validation."""
    rows = [json.loads(line) for line in chat_rows.read_text().splitlines()]
    for number, row in enumerate(rows):
        for turn in row.get("messages") or row["conversations"]:
            turn["weight"] = (0.25, 1, 3)[number % 3]
    file = chat_rows.parent / "weights.jsonl"  # beside the pictures
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = config(chat_model("qwen3_vl"), file)
    held = {**base["data"], "validation": base["data"]["train"]}
    wanted = config(chat_model("qwen3_vl"), file, data=held, validation={"every": 3})
    runs = [
        trained(f"w{ranks}{micro}", wanted, mm, tmp_path, "--nproc", ranks, f"train.micro_batch_size={micro}")
        for ranks, micro in ((1, 6), (1, 2), (2, 1))
    ]
    for key in ("loss", "validation/loss"):
        found = [losses(run, key) for run in runs]
        assert found[0] and all(each == pytest.approx(found[0], rel=1e-6) for each in found[1:])
    plain = trained("plain", config(chat_model("qwen3_vl"), chat_rows), mm, tmp_path)
    assert losses(plain)[0] != pytest.approx(losses(runs[0])[0], rel=1e-3)


@pytest.mark.parametrize("packing", [False, True])
def test_balanced_ranks_train_as_ranks_that_take_samples_as_they_come(
    packing, chat_model, chat_rows, tmp_path, mm
):
    """Two epochs on two ranks, also stopped and resumed, and on one; at a rate at which the gradients of a
    step move the losses of the next."""
    base = config(chat_model("qwen3_vl"), chat_rows)
    train = {**base["data"]["train"], "packing": packing, "max_length": 300}
    wanted = config(
        chat_model("qwen3_vl"),
        chat_rows,
        data={"train": train, "loader": {"workers": 1, "drop_last": False}},
        train={"steps": 6, "micro_batch_size": 1, "global_batch_size": 8},
    )
    on, two = "data.loader.balance=true", ("--nproc", "2")
    plain = losses(trained("plain", wanted, mm, tmp_path, *two))
    assert len(plain) == 6 and max(plain) - min(plain) > 0.01
    assert losses(trained("even", wanted, mm, tmp_path, *two, on)) == pytest.approx(plain, rel=1e-6)
    assert losses(trained("alone", wanted, mm, tmp_path, on)) == pytest.approx(plain, rel=1e-6)
    trained("cut", wanted, mm, tmp_path, *two, on, "--stop-after", "3")
    resumed = losses(trained("cut", wanted, mm, tmp_path, *two, on))
    assert resumed == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_an_exported_folder_has_the_tokens_of_training_and_answers_alike(
    name, chat_model, chat_rows, tmp_path, mm
):
    rows = chat_rows.parent / f"asked_{name}.jsonl"  # beside the pictures
    rows.write_text("".join(chat_rows.read_text().splitlines(keepends=True)[:8]))
    held = {"type": "conversations", "sources": [{"annotations": str(rows)}], "max_length": 2048}
    base = config(chat_model(name), chat_rows)
    wanted = config(
        chat_model(name),
        chat_rows,
        task={**base["task"], "max_new_tokens": 6},
        data={**base["data"], "validation": held},
        validation={"every": 100},
    )
    run = trained("chat", wanted, mm, tmp_path)
    out = tmp_path / "out"
    done = mm("export", "--run", run, "--to", "transformers", "--out", out)
    assert done.code == 0, done.err
    assert (
        type(transformers.AutoModelForImageTextToText.from_pretrained(out)).__name__ == FAMILIES[name].model
    )
    library, found = (
        library_processor(out),
        Conversations([ConversationSource(str(chat_rows))], str(chat_model(name)), max_length=2048),
    )
    for index, line in enumerate(chat_rows.read_text().splitlines()):
        made = library_inputs(library, messages_of(json.loads(line), chat_rows.parent))
        assert torch.equal(made["input_ids"][0], found[index]["pieces"][0].tokens["input_ids"]), index
    done = mm(
        "sample", "--run", run, "--prompts", rows, "--batch-size", 3, "--out", tmp_path / "answers.jsonl"
    )
    assert done.code == 0, done.err
    done = mm("eval", "--run", run, "--predictions", tmp_path / "predictions.jsonl")
    assert done.code == 0, done.err
    texts = [
        [json.loads(line)["text"] for line in (tmp_path / file).read_text().splitlines()]
        for file in ("answers.jsonl", "predictions.jsonl")
    ]
    # In rows, the first has another head than in prompts; of the other, the head's line break and that of an
    # empty thought are one token.
    assert len(texts[0]) == 8 and (texts[0] == texts[1]) == (name not in ("llava_onevision", "qwen3_5"))
