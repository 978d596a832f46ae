"""Runs on tables of text: tokenized in workers, by length, resumed exactly; broken rows are listed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import mm_core
from mm_core.errors import ContractError, PlanError
from mm_core.tasks.pretrained.task import PretrainedTask
from support import pretrained_models as tiny
from support import token_rows
from support.logs import log_of


@pytest.fixture
def config(tmp_path) -> Path:
    """A tiny BERT, its tokenizer, 40 rows of uneven length of which one is broken, and the YAML of a run."""
    folder = tiny.save_model("bert_classes", tmp_path)
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *"abcdefghij"])}
    pieces = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    pieces.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, **special).save_pretrained(folder)
    rows = [{"text": " ".join("abcdefghij"[: 1 + i % 9]), "label": "xyz"[i % 3]} for i in range(40)]
    rows[7]["label"] = None
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = {"type": "text_rows", "file": str(tmp_path / "rows.jsonl"), "tokenizer": str(folder)}
    table |= {"label": "label", "labels": "${task.labels}"}
    return tiny.run_config(
        "bert_classes",
        folder,
        tmp_path,
        task={"labels": ["x", "y", "z"]},
        data={
            "train": {**table, "part": [0, 0.8]},
            "validation": {**table, "part": [0.8, 1]},
            "loader": {"workers": 1, "group_by_length": True, "max_failed_share": 0.5},
        },
        train={"steps": 8, "micro_batch_size": 2, "global_batch_size": 8},
        validation={"every": 4, "metrics": [{"type": "accuracy"}]},
    )


@pytest.mark.slow
def test_a_run_is_resumed_exactly_and_lists_the_broken_row(config, tmp_path):
    mm_core.train(mm_core.load_config(config, ["data.loader.workers=0"]))
    for steps in (4, 8):  # the second goes on where the first has stopped
        mm_core.train(mm_core.load_config(config, ["run.name=again", f"train.steps={steps}"]))
    whole, resumed = (log_of(tmp_path / "runs" / name) for name in ("bert_classes", "again"))
    losses, again = ([row["loss"] for row in rows if "loss" in row] for rows in (whole, resumed))
    assert losses == again and len(losses) == 8
    (last,) = (row for row in whole if row["step"] == 8 and "validation/accuracy" in row)
    assert last["validation/rows"] == 8
    (skipped,) = (tmp_path / "runs/bert_classes/skipped.jsonl").read_text().splitlines()
    assert json.loads(skipped)["id"] == f"{tmp_path / 'rows.jsonl'}, line 8"
    assert json.loads(skipped)["reason"] == "the label is empty"


@pytest.mark.parametrize(
    ("split", "names", "sentence"),
    [
        ("train", "[y, x, z]", "class 0 is 'y' in the data, but 'x' in the task"),
        ("validation", "[x, z, y]", "class 1 is 'z' in the data, but 'y' in the task"),
        ("validation", "[x, y, z, a]", "the data have 4 class names, but the task has 3"),
    ],
)
def test_data_that_numbers_the_classes_otherwise_than_the_task_is_refused(config, split, names, sentence):
    overrides = [f"data.{split}.labels={names}", "data.loader.workers=0", "data.loader.group_by_length=false"]
    with pytest.raises(ContractError) as caught:
        mm_core.train(mm_core.load_config(config, overrides))
    assert (caught.value.what, caught.value.where) == (sentence, f"data.{split}")
    assert caught.value.accepted == "x, y, z" and "${task.labels}" in caught.value.hint


def test_names_of_a_models_own_config_count_and_numbers_are_no_names(tmp_path):
    folder = tiny.save_model("bert_classes", tmp_path)
    head = tiny.MODELS["bert_classes"][3]
    with torch.device("meta"):
        assert PretrainedTask(str(folder), head).class_names() == ()
        named = PretrainedTask(str(folder), head, overrides={"id2label": {0: "x", 1: "y", 2: "z"}})
    assert named.class_names() == ("x", "y", "z")


@pytest.mark.parametrize(
    ("key", "what", "accepted"),
    [("group_by_length", "lengths", "text_rows"), ("balance", "work", "conversations")],
)
def test_what_a_dataset_does_not_know_of_its_samples_is_refused(config, key, what, accepted):
    plugin = f"plugins.path=[{token_rows.__file__}]"
    overrides = ["data.train={type: token_rows, kind: classes}", "data.loader.workers=0", plugin]
    overrides += ["data.loader.group_by_length=false", f"data.loader.{key}=true"]
    with pytest.raises(PlanError) as caught:
        mm_core.train(mm_core.load_config(config, overrides))
    assert caught.value.what == f"the dataset TokenRows does not provide the {what} of its samples"
    assert caught.value.where == f"data.loader.{key}" and accepted in caught.value.accepted
