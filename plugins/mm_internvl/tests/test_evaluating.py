"""`mm eval` of a tiny InternVL that answers."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import internvl_answers as answers
import pytest
import yaml

from support import warm

data, lines, mm, place, run = answers.data, answers.lines, answers.mm, answers.place, answers.run


def evaluated(capsys, run: Path, rows: Path, out: Path, *words: object) -> tuple[dict, list[dict]]:
    """(figures, predictions) of the run on other rows."""
    held = {"annotations": str(rows)}
    options = [f"data.validation={json.dumps(_train(run) | {'sources': [held]})}", "task.max_new_tokens=6"]
    metrics = ["exact_match", "anls", "internvl/relaxed_accuracy", "internvl/multiple_choice"]
    words = (*options, *words, *(f"--metric={name}" for name in metrics), "--json", "--predictions", out)
    return json.loads(mm(capsys, "eval", "--run", run, *words))["metrics"], lines(out)


def _train(run: Path) -> dict:
    stored = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["data"]["train"]
    return {key: value for key, value in stored.items() if value is not None}


@pytest.mark.slow
def test_two_ranks_find_what_one_finds(place, run, tmp_path, capsys):
    """An evaluation in which each rank has another number of images, and one of them none in a batch."""
    rows = [data.ROWS[n] for n in (0, 2, 5, 3, 1)]
    file = data.write(place / "files" / "ranks.jsonl", rows)
    options = ["data.validation=" + json.dumps(_train(run) | {"sources": [{"annotations": str(file)}]})]
    options += ["task.max_new_tokens=6", "train.micro_batch_size=1", "--metric=exact_match", "--metric=anls"]
    command = ["eval", "--run", str(run), *options, "--json", "--predictions"]
    one = json.loads(mm(capsys, *command, tmp_path / "one.jsonl"))["metrics"]
    words = [*command, str(tmp_path / "two.jsonl"), "--nproc", "2"]
    ended = warm.mm(*words)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["metrics"] == pytest.approx(one, rel=1e-5)
    said = [[row["text"] for row in lines(tmp_path / name)] for name in ("one.jsonl", "two.jsonl")]
    assert said[0] == said[1] and len(said[0]) == 5


def test_an_evaluation_answers_the_last_question_of_each_row_as_mm_sample_does(place, run, tmp_path, capsys):
    """Alone and in one batch: rows without an image, with several, with images asked about before."""
    rows = [*data.ROWS, {**data.ROWS[5], "answers": ["12", "twelve"]}]
    files = data.write(place / "files" / "held.jsonl", rows)
    alone, one = evaluated(capsys, run, files, tmp_path / "1.jsonl", "train.micro_batch_size=1")
    out = tmp_path / "asked.jsonl"
    mm(capsys, "sample", "--run", run, "--prompts", files, "--max-new-tokens", 6, "--out", out)
    asked = lines(out)
    for name in ("text", "references"):
        assert [row[name] for row in one] == [row[name] for row in asked]
    assert len({row["text"] for row in one}) > 2
    assert [row["references"] for row in one][:3] == [["a colour"], ["a picture"], ["red"]]
    assert one[6]["references"] == ["12", "twelve"] and one[6]["text"] == one[5]["text"]
    together, all_ = evaluated(capsys, run, files, tmp_path / "4.jsonl", "train.micro_batch_size=4")
    assert [row["text"] for row in all_] == [row["text"] for row in one]
    assert together == pytest.approx(alone, rel=1e-5)


def test_the_hint_for_a_run_on_packed_rows_names_rows_that_can_be_answered(run, capsys):
    said = mm(capsys, "eval", "--run", run, "data.train.packing=true", code=1)
    assert "the run's config has no data.validation" in said
    (command,) = (line.partition(": mm ")[2] for line in said.splitlines() if ": mm " in line)
    assert "packing: false" in command and "packing: true" not in command
    words = (*shlex.split(command), "task.max_new_tokens=2", "train.micro_batch_size=1", "--clips", 2)
    assert "exact_match" in mm(capsys, *words, "--metric=exact_match")


def test_a_packed_evaluation_has_a_loss_and_no_answers(place, run, tmp_path, capsys):
    rows = data.write(place / "files" / "packed.jsonl", [data.ROWS[0], data.ROWS[5]] * 2)
    held = {**_train(run), "sources": [{"annotations": str(rows)}], "packing": True}
    words = ("eval", "--run", run, f"data.validation={json.dumps(held)}", "train.micro_batch_size=1")
    said = mm(capsys, *words, "task.max_new_tokens=6", "--metric=exact_match", "--json", code=1)
    assert "rows packed into one sequence cannot be answered one by one" in said
    assert "packing: false in data.validation" in said and "Traceback" not in said
    figures = json.loads(mm(capsys, *words, "--json"))["metrics"]
    assert 0 < figures["loss"] < 20


def test_answers_belong_to_what_is_asked_last_and_no_cut_takes_that_away(place, run, tmp_path, capsys):
    """A row cut before its last answer, and one that ends with a question without answers, are asked the one
    before."""
    long = data.asked("what is red?", "a colour", "and this?", "a number " * 200, answers=["no"])
    open_ = data.asked("what is red?", "a colour", "and blue?")
    file = data.write(place / "files" / "cut.jsonl", [long, open_, data.ROWS[0]])
    _, found = evaluated(capsys, run, file, tmp_path / "c.jsonl", "data.validation.max_length=32")
    assert found[1]["text"] == found[2]["text"]
    assert found[1]["references"] == found[2]["references"] == ["a colour"]
    assert found[0]["references"] != ["no"]


def test_a_question_with_answers_needs_no_turn_of_the_assistant(place, run, tmp_path, capsys):
    """As data sets publish what is held out; the answer is that of the same question with a turn."""
    picture, right = "<image>\nwhat is this?", ["a picture", "an image"]
    rows = [
        data.asked(picture, image="a.png", answers=right),
        data.asked(picture, "a picture", image="a.png", answers=right),
        data.asked("what is red?", "a colour", "and blue?", answers=["no"]),
    ]
    file = data.write(place / "files" / "open.jsonl", rows)
    _, found = evaluated(capsys, run, file, tmp_path / "o.jsonl")
    assert [row["references"] for row in found] == [right, right, ["no"]]
    assert found[0]["text"] == found[1]["text"]
    out = tmp_path / "asked.jsonl"
    mm(capsys, "sample", "--run", run, "--prompts", file, "--max-new-tokens", 6, "--out", out)
    for name in ("text", "references"):
        assert [row[name] for row in lines(out)] == [row[name] for row in found]


def test_images_behind_the_question_change_no_answer(place, run, tmp_path, capsys):
    """A row that ends with a question about an image, alone and beside one that does not."""
    asked = ["<image>\nwhat is red?", "a colour"]
    behind = data.asked(*asked, "<image> and blue?", image=["a.png", "c.jpg"])
    file = data.write(
        place / "files" / "behind.jsonl", [behind, data.asked(*asked, image="a.png"), data.ROWS[2]]
    )
    said = {}
    for size in (1, 4):
        out = tmp_path / f"{size}.jsonl"
        _, found = evaluated(capsys, run, file, out, f"train.micro_batch_size={size}")
        said[size] = [row["text"] for row in found]
        assert said[size][0] == said[size][1] != said[size][2]
    assert said[1] == said[4]


def test_any_of_several_answers_is_right(place, run, tmp_path, capsys):
    rows = [data.asked("what is red?", "x"), data.asked("<image>\nwhat is this?", "x", image="a.png")]
    file = data.write(place / "files" / "several.jsonl", rows)
    _, found = evaluated(capsys, run, file, tmp_path / "x.jsonl", "train.micro_batch_size=2")
    for row, answer in zip(rows, found, strict=True):
        row["answers"] = ["nothing like it, and far longer", answer["text"]]
    rows[1]["answers"] = rows[1]["answers"][:1]
    file = data.write(place / "files" / "several.jsonl", rows)
    figures, found = evaluated(capsys, run, file, tmp_path / "x.jsonl", "train.micro_batch_size=2")
    assert found[0]["references"] == rows[0]["answers"]
    for name in ("exact_match", "anls", "relaxed_accuracy", "multiple_choice"):
        assert figures[name] == 0.5, name
