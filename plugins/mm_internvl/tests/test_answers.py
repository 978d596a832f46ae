"""Answers in words of a tiny InternVL: `mm sample`, prompts and rows of a file."""

from __future__ import annotations

from pathlib import Path

import internvl_answers as answers
import pytest
import torch
import transformers
from mm_internvl.testing import TOKENS
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

import mm_core
from mm_core.contracts import Decoding, Turn
from mm_core.inference.answer import answer_session
from mm_core.tasks.pretrained.answers import _Listener
from support import warm

Processor = getattr(transformers, "GotOcr2ImageProcessorPil", None) or transformers.GotOcr2ImageProcessor

QUESTIONS, data, lines, mm, place, run = (
    answers.QUESTIONS,
    answers.data,
    answers.lines,
    answers.mm,
    answers.place,
    answers.run,
)


def by_the_library(folder: Path, asked: list[tuple[list[Path], str]]) -> list[str]:
    """The answers of Transformers alone: its tokenizer's template, its image processor, its `generate`."""
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = Processor.from_pretrained(folder, crop_to_patches=True, min_patches=1, max_patches=2)
    answers = []
    for files, prompt in asked:
        content = [*({"type": "image"} for _ in files), {"type": "text", "text": prompt}]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        pixels = [processor(Image.open(file).convert("RGB"), return_tensors="pt") for file in files]
        for found in pixels:
            tiles = "<IMG_CONTEXT >" * TOKENS * len(found["pixel_values"])
            text = text.replace("<IMG_CONTEXT>", f"<img>{tiles}</img>", 1)
        text = text.replace("<IMG_CONTEXT >", "<IMG_CONTEXT>")
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        if pixels:
            inputs["pixel_values"] = torch.cat([found["pixel_values"] for found in pixels])
        with torch.no_grad():
            said = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        new = said[0, inputs["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(new, skip_special_tokens=True).strip())
    return answers


def test_an_exported_folder_generates_what_mm_sample_prints(place, run, tmp_path, capsys):
    mm(capsys, "export", "--run", run, "--to", "transformers", "--out", tmp_path / "out")
    files = place / "files"
    asked = [
        ([files / "a.png"], "what?"),
        ([files / "c.jpg", files / "b.png"], "which?"),
        ([files / "b.png"], "a number?"),
        ([], "what is red?"),
    ]
    wanted = by_the_library(tmp_path / "out", asked)
    assert len(set(wanted)) > 2
    for (images, prompt), answer in zip(asked, wanted, strict=True):
        options = [word for file in images for word in ("--image", file)]
        ours = mm(capsys, "sample", "--run", run, *options, "--prompt", prompt, "--max-new-tokens", 12)
        assert ours == answer + "\n"


def test_an_answer_comes_word_by_word(place, run):
    heard: list[str] = []
    said = mm_core.answer(
        run, "what?", images=[place / "files" / "a.png"], max_new_tokens=12, on_text=heard.append
    )
    assert "".join(heard) == said and len(heard) > 1


def test_half_a_character_and_the_last_white_space_wait(run):
    heard: list[str] = []
    with answer_session(run) as opened:
        tokenizer = opened.task.check_answers().tokenizer
        listener = _Listener(opened.task.check_answers(), heard.append)
        listener.put(torch.tensor([[1, 2]]))  # the prompt
        for token in tokenizer("a 猫 is red \n")["input_ids"]:
            listener.put(torch.tensor([token]))
        listener.put(torch.tensor([tokenizer.eos_token_id]))
        listener.end()
    assert heard == ["a", " ", "猫", " is", " red"]


def test_drawn_answers_follow_the_seed_and_the_number(place, run):
    with answer_session(run) as opened:
        turns = [Turn("user", "what?", (place / "files" / "a.png",))]
        warm = Decoding(max_new_tokens=8, temperature=1.5, seed=3)
        before = torch.random.get_rng_state()
        said = [opened.answer(turns, warm, number) for number in (0, 1, 0)]
        assert torch.equal(before, torch.random.get_rng_state())
        assert said[0] == said[2] != said[1]
        assert said[0] != opened.answer(turns, Decoding(max_new_tokens=8, temperature=1.5, seed=4), 0)
        greedy = opened.answer(turns, Decoding(max_new_tokens=8))
        # Of the likeliest tokens, a share that one token fills alone is that token.
        assert opened.answer(turns, Decoding(max_new_tokens=8, temperature=1.5, top_p=1e-6), 5) == greedy


# -- rows of a file ------------------------------------------------------------------------------


def test_rows_of_a_file_are_answered_in_their_order(place, run, tmp_path, capsys):
    rows = data.write(place / "files" / "questions.jsonl", QUESTIONS)
    out = tmp_path / "answers.jsonl"
    said = mm(capsys, "sample", "--run", run, "--prompts", rows, "--max-new-tokens", 6, "--out", out)
    assert said.startswith(f"3 answers in {out}; 1 row could not be read: ")
    assert "there is no such image" in said and said.count("\n") == 1
    found = lines(out)
    assert [row["row"] for row in found] == [0, 1, 2, 3]
    assert "there is no such image" in found[2]["error"] and "missing.png" in found[2]["error"]
    assert found[1]["references"] == ["a picture", "an image"]
    assert found[3]["prompt"] == "and?" and found[3]["references"] == ["a square"]
    image = place / "files" / "a.png"
    assert found[1]["text"] == mm_core.answer(run, "what is this?", images=[image], max_new_tokens=6)
    assert found[0]["text"] == mm_core.answer(run, "what is red?", max_new_tokens=6)
    first = mm(capsys, "sample", "--run", run, "--prompts", rows, "--max-new-tokens", 1)
    assert str(run / "samples" / "answers.jsonl") in first
    second = mm(capsys, "sample", "--run", run, "--prompts", rows, "--max-new-tokens", 1)
    assert str(run / "samples" / "answers-2.jsonl") in second


BATCHED = [
    *QUESTIONS,
    data.asked("<image><image>\nwhich of these two is blue?", image=["b.png", "c.jpg"]),
    data.asked("why?"),
    data.asked("a question without an image that has many more words than the others here have"),
    data.asked("<image>\nand this?", image="b.png"),
]


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_batch_has_the_answers_of_its_rows_alone(place, run, tmp_path, capsys, temperature):
    """Rows with no, one and two images and a video, of several lengths, one that cannot be read; drawn or
    not. The row 100 of them is a batch of all."""
    rows = data.write(place / "files" / "batched.jsonl", BATCHED)
    options = ["--prompts", rows, "--max-new-tokens", 12, "--temperature", temperature, "--seed", 7]
    said = []
    for size in (1, 3, 100):
        out = tmp_path / f"{size}.jsonl"
        mm(capsys, "sample", "--run", run, *options, "--batch-size", size, "--out", out)
        said.append(lines(out))
    assert said[0] == said[1] == said[2]
    assert [row["row"] for row in said[0]] == list(range(8)) and "error" in said[0][2]
    assert len({row["text"] for row in said[0] if "text" in row}) > 3


def test_rows_of_like_length_share_a_batch(place, run, monkeypatch):
    """Four batches are laid out at once: what is padded is what they differ by within."""
    rows = data.write(place / "files" / "alike.jsonl", [data.asked("a " * n) for n in (9, 1, 8, 2, 7, 3)])
    with answer_session(run) as opened:
        given: list[list[int]] = []
        answer = opened.task.answer

        def noted(questions, decoding, numbers, *others):
            given.append([*numbers])
            return answer(questions, decoding, numbers, *others)

        monkeypatch.setattr(opened.task, "answer", noted)
        found = [each.row for each in opened.rows(rows, Decoding(max_new_tokens=1), batch_size=2)]
    assert given == [[1, 3], [5, 4], [2, 0]] and found == [*range(6)]


@pytest.mark.slow
def test_two_ranks_answer_as_one_does(place, run, tmp_path):
    """Rows with and without images, one that cannot be read, and more rows than a multiple of the ranks."""
    rows = data.write(place / "files" / "shared.jsonl", [*BATCHED, QUESTIONS[0]])
    words = ["sample", "--run", str(run), "--prompts", str(rows), "--max-new-tokens", "6"]
    for nproc in ("1", "2"):
        out = tmp_path / f"{nproc}.jsonl"
        options = ["--nproc", nproc, "--batch-size", nproc, "--out", str(out)]
        ended = warm.mm(*words, *options)
        assert ended.returncode == 0, ended.stderr
    assert lines(tmp_path / "2.jsonl") == lines(tmp_path / "1.jsonl")


# -- sentences -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--steps", 3, "--fps", 2], "the run's task answers in words, so --steps and --fps cannot be used"),
        (["--temperature", -1], "temperature is -1.0"),
        (["--top-p", 0], "top_p is 0.0"),
        (["--max-new-tokens", 0], "max_new_tokens is 0"),
        (["--image", "no.png"], "there is no such image"),
        (["--prompts", "x.jsonl"], "--prompts cannot be used together with --prompt or --image"),
        (["data.train.max_length=8"], "max_length 8 leaves no room for an answer"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-p", "nan"], "top_p is nan"),
        (["--batch-size", 2], "--batch-size works only with --prompts"),
        (["--prompt", " "], "the prompt has no text and no image"),
        (["--prompt", "a\udcff"], "a\\udcff: the prompt is not valid UTF-8 (character 2)"),
        (["--prompt", "<image><image>"], "the text contains <image> <image>, but the turn has 0 images"),
        (["--out", "."], "the file cannot be written: this is a folder"),
        (["--out", "/proc/nowhere/x.jsonl"], "the file cannot be written"),
    ],
)
def test_what_cannot_be_asked_is_a_readable_error(run, capsys, words, what):
    assert what in mm(capsys, "sample", "--run", run, "--prompt", "what is this?", *words, code=1)


def test_a_file_without_rows_is_a_readable_error(place, run, capsys):
    missing = mm(capsys, "sample", "--run", run, "--prompts", place / "none.jsonl", code=1)
    assert "the file of conversations does not exist" in missing
    empty = place / "files" / "none.json"
    empty.write_text("[]")
    out = place / "files" / "none_answers.jsonl"
    said = mm(capsys, "sample", "--run", run, "--prompts", empty, "--out", out, code=1)
    assert "none.json: the file has no rows, so there is nothing to answer" in said


def test_a_file_of_which_no_row_can_be_read_is_a_readable_error(place, run, tmp_path, capsys):
    rows = ["{broken", data.asked(" "), data.asked("<image>"), {"conversations": []}]
    file, out = data.write(tmp_path / "bad.jsonl", rows), tmp_path / "answers.jsonl"
    said = mm(capsys, "sample", "--run", run, "--prompts", file, "--batch-size", 2, "--out", out, code=1)
    assert (
        "none of 4 rows could be read; error of the first: " in said
        and "bad.jsonl:1: this is not JSON" in said
    )
    first, second, third, fourth = (row["error"] for row in lines(out))
    assert "this is not JSON" in first and "line 2: the row has no question and no image" in second
    assert "placeholders for 1 image, but the row lists 0" in third and "is not a list of turns" in fourth


def test_answers_do_not_replace_the_questions(place, run, capsys):
    rows = data.write(place / "files" / "kept.jsonl", QUESTIONS)
    before = rows.read_bytes()
    said = mm(capsys, "sample", "--run", run, "--prompts", rows, "--out", rows, code=1)
    assert "--out is the same file as --prompts: the answers would overwrite the prompts" in said
    assert rows.read_bytes() == before


def test_memory_that_runs_out_is_a_readable_error(place, run, capsys, monkeypatch):
    def full(*given: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(transformers.InternVLForConditionalGeneration, "generate", full)
    rows = data.write(place / "files" / "full.jsonl", QUESTIONS)
    said = mm(capsys, "sample", "--run", run, "--prompts", rows, "--batch-size", 2, code=1)
    assert "out of memory: CUDA out of memory. Tried to allocate 2 GiB" in said
    assert "2 prompts with" in said and "hint: use a smaller --batch-size" in said
