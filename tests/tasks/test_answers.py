"""What a model answers in words: its greedy answers are the library's own, row by row."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from mm_core.contracts import Randomness, SampleKey, TextBatch
from mm_core.errors import CheckpointError, ContractError
from mm_core.plugin.registry import build
from mm_core.tasks.pretrained.task import PretrainedTask
from support import pretrained_models as models

PROMPTS = [[5, 9, 12], [7, 7, 30, 31, 8, 20], [11]]
ANSWERS = [[13, 14, 2], [21, 2], [22, 23, 24, 2]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("models"), {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = models.save_model(name, folder)
            models.save_words(made[name])
        return made[name]

    return of


def task_of(folder: Path, name: str, **options) -> PretrainedTask:
    task = PretrainedTask(str(folder), models.MODELS[name][3], max_new_tokens=6, **options)
    kind = getattr(transformers, models.MODELS[name][1])
    task.model.load_state_dict(kind.from_pretrained(folder).state_dict(), assign=True)
    task.model.tie_weights()
    return task.eval()


def questions(second: tuple[int, ...] = ()) -> TextBatch:
    """Prompts and answers padded on the right; the first row may have a second answer behind a prompt."""
    rows = [(p + a, [-100] * len(p) + a) for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    if second:
        ids, labels = rows[0]
        rows[0] = ([*ids, 3, *second], [*labels, -100, *second])
    length = max(len(ids) for ids, _ in rows)

    def padded(values: list[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([row + [value] * (length - len(row)) for row in values])

    return TextBatch(
        [SampleKey(0, row) for row in range(len(rows))],
        torch.ones(len(rows)),
        [f"row {row}" for row in range(len(rows))],
        inputs={
            "input_ids": padded([ids for ids, _ in rows], 0),
            "attention_mask": padded([[1] * len(ids) for ids, _ in rows], 0),
            "labels": padded([labels for _, labels in rows], -100),
        },
    )


def found_of(task: PretrainedTask, batch: TextBatch):
    return task.evaluate(task.batch_transform()(batch), Randomness(1), ())


def test_answers_of_a_batch_are_those_of_the_library_to_each_prompt_alone(folders):
    folder = folders("qwen3")
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = []
    for prompt in PROMPTS:
        said = theirs.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, len(prompt) :]
        expected.append(tokenizer.decode(said, skip_special_tokens=True))
    found = found_of(task_of(folder, "qwen3"), questions())
    assert found.texts == expected
    assert len(set(expected)) == 3 and all(expected)
    assert found.references == [("w13 w14",), ("w21",), ("w22 w23 w24",)]
    # The figures of the loss are those of a task that says nothing.
    plain = task_of(folder, "qwen3")
    plain._answers = None
    assert torch.equal(found_of(plain, questions()).sums["loss"], found.sums["loss"])


def test_an_answer_ends_at_the_tokens_of_the_folder(folders, tmp_path):
    """Whatever token the first row would begin with is made an end: then its answer is empty."""
    folder = folders("qwen3")
    first = int(found_of(task_of(folder, "qwen3"), questions()).texts[0].split()[0][1:])
    shutil.copytree(folder, tmp_path / "ends")
    (tmp_path / "ends" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, first]}))
    assert found_of(task_of(tmp_path / "ends", "qwen3"), questions()).texts[0] == ""


def test_of_several_answers_the_last_counts_and_a_dataset_may_name_others(folders):
    folder = folders("qwen3")
    task = task_of(folder, "qwen3")
    batch = questions(second=(17, 18))
    found = found_of(task, batch)
    assert found.references[0] == ("w17 w18",)
    # What was said before stays in the prompt.
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(folder).eval()
    prompt = torch.tensor([[*PROMPTS[0], *ANSWERS[0], 3]])
    said = theirs.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert found.texts[0] == tokenizer.decode(said, skip_special_tokens=True)
    assert found.texts[1:] == found_of(task, questions()).texts[1:]
    batch.references = [("one", "two"), (), ("four",)]
    assert found_of(task, batch).references == [("one", "two"), ("w21",), ("four",)]


def test_an_encoder_answers_its_whole_input(folders):
    folder = folders("t5")
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = questions()
    batch.inputs["input_ids"] = batch.inputs["input_ids"].where(batch.inputs["labels"] == -100, 0)
    batch.inputs["attention_mask"] = (batch.inputs["input_ids"] != 0).long()
    expected = [
        tokenizer.decode(
            theirs.generate(torch.tensor([p]), max_new_tokens=6, do_sample=False)[0], skip_special_tokens=True
        )
        for p in PROMPTS
    ]
    found = found_of(task_of(folder, "t5"), batch)
    assert found.texts == expected and found.references[1] == ("w21",)


def test_answers_are_what_metrics_of_texts_compare(folders):
    task = task_of(folders("qwen3"), "qwen3")
    batch = questions()
    said = found_of(task, batch).texts
    batch.references = [("w13", said[0]), (said[1] + "!",), ("nothing like it at all, and far longer",)]
    figures = {}
    for name in ("exact_match", "anls"):
        metric = build("metric", {"type": name})
        metric.batch(batch, found_of(task, batch))
        figures |= metric.result(metric.sums())
    length = len(said[1]) + 1
    assert figures == pytest.approx({"exact_match": 1 / 3, "anls": (1 + (length - 1) / length) / 3})


def test_what_cannot_be_answered_is_a_readable_error(folders, tmp_path):
    head = "AutoModelForSequenceClassification"
    with pytest.raises(ContractError, match="BertForSequenceClassification generates no text") as fault:
        PretrainedTask(str(folders("bert_classes")), head, max_new_tokens=3)
    assert fault.value.where == "task.max_new_tokens"
    wordless = models.save_model("qwen3", tmp_path)
    with pytest.raises(CheckpointError, match="no tokenizer can be opened from this folder"):
        PretrainedTask(str(wordless), "AutoModelForCausalLM", max_new_tokens=3)
    task, batch = task_of(folders("qwen3"), "qwen3"), questions()
    batch.inputs["labels"][1] = batch.inputs["input_ids"][1]
    with pytest.raises(ContractError, match="a row has nothing before its last labels") as fault:
        found_of(task, batch)
    assert fault.value.hint == "remove task.max_new_tokens if the data have no prompts"
    packed = questions()
    packed.inputs["attention_mask"] = packed.inputs["attention_mask"][:, None, None].bool()
    with pytest.raises(ContractError, match="rows packed into one sequence"):
        task._answers.of(packed)


def test_positions_that_begin_anew_are_a_packed_row(folders):
    task = task_of(folders("qwen3"), "qwen3")
    answers = found_of(task, questions()).texts
    batch = questions()
    length = batch.inputs["input_ids"].shape[1]
    batch.inputs["position_ids"] = torch.arange(length).expand(batch.inputs["input_ids"].shape).clone()
    batch.inputs["position_ids"][batch.inputs["attention_mask"] == 0] = 1  # as padding has it in Transformers
    assert task._answers.of(batch)[0] == answers
    del batch.inputs["attention_mask"]
    batch.inputs["position_ids"] = torch.arange(length).expand(batch.inputs["input_ids"].shape).clone()
    batch.inputs["position_ids"][:, 2:] -= 2
    with pytest.raises(ContractError, match="rows packed into one sequence") as fault:
        task._answers.of(batch)
    assert fault.value.hint is not None and "packing: false in data.validation" in fault.value.hint
