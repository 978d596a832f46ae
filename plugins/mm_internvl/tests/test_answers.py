"""Answers in words of a tiny InternVL: `mm sample`, `mm chat`, rows of a file, evaluations."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import os
import pty
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from mm_internvl.testing import TOKENS, make_tiny_checkpoint
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

import mm_core
from mm_core.cli.main import main
from mm_core.contracts import Decoding, Turn
from mm_core.errors import DataError
from mm_core.tasks.pretrained_answers import _Listener
from mm_core.train.answering import speaker


def of_tests(name: str):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Processor = getattr(transformers, "GotOcr2ImageProcessorPil", None) or transformers.GotOcr2ImageProcessor

data, runs = of_tests("internvl_data"), of_tests("internvl_runs")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run of few steps about tiny pictures: what it says depends on them, and is hardly words."""
    top = tmp_path_factory.mktemp("answers")
    model = make_tiny_checkpoint(top / "model")
    data.draw(top / "files")
    rows = data.write(top / "files" / "rows.jsonl", data.ROWS)
    train = {"type": "internvl/conversations", "processor": str(model), "max_length": 400, "max_tiles": 2}
    train |= {"frames": 3, "sources": [{"annotations": str(rows)}]}
    sections = {"data": {"train": train, "loader": {"workers": 0}}, "optimizer": {"lr": 2e-3}}
    mm_core.train(runs.config_of(top, model, train={"steps": 2}, **sections))
    return top


@pytest.fixture
def run(place):
    return place / "runs" / "tuned"


def mm(capsys, *words: object, code: int = 0) -> str:
    """What the command prints; of one that fails, on stderr."""
    capsys.readouterr()
    found = main([str(word) for word in words])
    said = capsys.readouterr()
    assert found == code, said.err
    return said.err if code else said.out


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


# -- mm sample -----------------------------------------------------------------------------------


def by_the_library(folder: Path, asked: list[tuple[list[Path], str]]) -> list[str]:
    """What Transformers alone says: its tokenizer's template, its image processor, its `generate`."""
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


def test_an_exported_folder_generates_what_mm_sample_says(place, run, tmp_path, capsys):
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
        run, "what?", images=[place / "files" / "a.png"], max_new_tokens=12, heard=heard.append
    )
    assert "".join(heard) == said and len(heard) > 1


def test_half_a_character_and_the_last_white_space_wait(run):
    heard: list[str] = []
    with speaker(run) as opened:
        tokenizer = opened.task._asked.tokenizer
        listener = _Listener(opened.task._asked, heard.append)
        listener.put(torch.tensor([[1, 2]]))  # the prompt
        for token in tokenizer("a 猫 is red \n")["input_ids"]:
            listener.put(torch.tensor([token]))
        listener.put(torch.tensor([tokenizer.eos_token_id]))
        listener.end()
    assert heard == ["a", " ", "猫", " is", " red"]


def test_drawn_answers_follow_the_seed_and_the_number(place, run):
    with speaker(run) as opened:
        turns = [Turn("user", "what?", (place / "files" / "a.png",))]
        warm = Decoding(max_new_tokens=8, temperature=1.5, seed=3)
        before = torch.random.get_rng_state()
        said = [opened.say(turns, warm, number) for number in (0, 1, 0)]
        assert torch.equal(before, torch.random.get_rng_state())
        assert said[0] == said[2] != said[1]
        assert said[0] != opened.say(turns, Decoding(max_new_tokens=8, temperature=1.5, seed=4), 0)
        greedy = opened.say(turns, Decoding(max_new_tokens=8))
        # Of the likeliest tokens, a share that one token fills alone is that token.
        assert opened.say(turns, Decoding(max_new_tokens=8, temperature=1.5, top_p=1e-6), 5) == greedy


# -- rows of a file ------------------------------------------------------------------------------

QUESTIONS = [
    data.asked("what is red?", "a colour"),
    data.asked("<image>\nwhat is this?", image="a.png", answers=["a picture", "an image"]),
    data.asked("<image>\nwhat?", image="missing.png"),
    data.asked("<video>\nwhat is in it?", "a circle", "and?", "a square", video="clip.mp4"),
]


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
def test_a_batch_says_what_its_rows_say_alone(place, run, tmp_path, capsys, temperature):
    """Rows with no, one and two images and a video, of several lengths, one that can not be read; drawn or
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
    with speaker(run) as opened:
        given: list[list[int]] = []
        answer = opened.task.answer

        def noted(questions, decoding, numbers, *others):
            given.append([*numbers])
            return answer(questions, decoding, numbers, *others)

        monkeypatch.setattr(opened.task, "answer", noted)
        found = [each.row for each in opened.rows(rows, Decoding(max_new_tokens=1), batch_size=2)]
    assert given == [[1, 3], [5, 4], [2, 0]] and found == [*range(6)]


@pytest.mark.slow
def test_two_ranks_say_what_one_says(place, run, tmp_path):
    """Rows with and without images, one that can not be read, and more rows than a multiple of the ranks."""
    rows = data.write(place / "files" / "shared.jsonl", [*BATCHED, QUESTIONS[0]])
    words = ["sample", "--run", str(run), "--prompts", str(rows), "--max-new-tokens", "6"]
    for nproc in ("1", "2"):
        out = tmp_path / f"{nproc}.jsonl"
        options = ["--nproc", nproc, "--batch-size", nproc, "--out", str(out)]
        command = [sys.executable, "-m", "mm_core.cli.main", *words, *options]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert ended.returncode == 0, ended.stderr
    assert lines(tmp_path / "2.jsonl") == lines(tmp_path / "1.jsonl")


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
    ended = subprocess.run(
        [sys.executable, "-m", "mm_core.cli.main", *words], capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["metrics"] == pytest.approx(one, rel=1e-5)
    said = [[row["text"] for row in lines(tmp_path / name)] for name in ("one.jsonl", "two.jsonl")]
    assert said[0] == said[1] and len(said[0]) == 5


# -- mm chat -------------------------------------------------------------------------------------


def chat(capsys, monkeypatch, text: str, *words: object, code: int = 0) -> tuple[list[str], str]:
    """(lines of the answers, what stands on stderr)."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    capsys.readouterr()
    assert main(["chat", *map(str, words), "--max-new-tokens", "6"]) == code
    said = capsys.readouterr()
    return said.out.split("\n")[:-1], said.err


def test_chat_keeps_the_conversation(place, run, capsys, monkeypatch):
    image = place / "files" / "a.png"
    text = f"what is red?\n/image {image}\nand this?\n/new\nwhat is red?\n/quit\nnever read\n"
    said, _ = chat(capsys, monkeypatch, text, "--run", run)
    with speaker(run) as opened:
        shown = Decoding(max_new_tokens=6)
        turns = [Turn("user", "what is red?")]
        first = opened.say(turns, shown)
        turns += [Turn("assistant", first), Turn("user", "and this?", (image,))]
        second = opened.say(turns, shown)
        alone = opened.say(turns[2:], shown)
    assert "\n".join(said) == f"{first}\n{second}\n{first}"
    assert second != alone, "what was said before changes nothing"


def test_a_line_that_can_not_be_answered_ends_no_chat(place, run, capsys, monkeypatch):
    text = "/image nowhere.png\n/draw\n<image> what?\nwhat is red?\n"
    said, faults = chat(capsys, monkeypatch, text, "--run", run, code=1)
    assert len(said) >= 1 and said[0]
    assert "there is no such image" in faults and "nowhere.png" in faults
    assert "there is no command /draw" in faults and "accepted: /image, /new, /quit, /help" in faults
    assert "<image> what?: the text says <image>, and no images are shown" in faults
    assert "accepted: one <image> for each image, or none: then they stand before the text" in faults


def test_lines_that_are_no_text_end_no_chat(place, run, capsys, monkeypatch):
    text = b"what is \xff?\n/image a\0b\n/image\n<video> what?\nwhat is red?\n"
    typed = io.TextIOWrapper(io.BytesIO(text), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", typed)
    assert main(["chat", "--run", str(run), "--max-new-tokens", "2"]) == 1
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 1 and said.out.strip()
    for fault in (
        "what the user says is not UTF-8 text (character 9)",
        "a\\x00b: there is no such image",
        "/image: there is no such image",
        "the text says <video>, and no images are shown",
        "hint: videos are shown by rows of a file",
    ):
        assert fault in said.err


def test_a_placeholder_that_the_model_says_is_a_sentence(run):
    turns = [Turn("user", "what?"), Turn("assistant", "an <image>"), Turn("user", "why?")]
    with speaker(run) as opened, pytest.raises(DataError, match="says <image>") as fault:
        opened.say(turns, Decoding(max_new_tokens=2))
    assert fault.value.hint == "begin anew: the model itself has said it"


def test_nobody_to_answer_is_a_sentence(run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert "standard input is closed, so there is nobody to answer" in mm(
        capsys, "chat", "--run", run, code=1
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("what?\n"))
    missing = mm(capsys, "chat", "--run", run, "--image", "no.png", code=1)
    assert "no.png: there is no such image" in missing and "accepted: --image FILE" in missing

    class Lost(io.StringIO):
        def readline(self, size: int = -1) -> str:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("sys.stdin", Lost())
    lost = mm(capsys, "chat", "--run", run, "--max-new-tokens", 2, code=1)
    assert lost == "mm: error: standard input can not be read: Input/output error\n"


@pytest.fixture
def endless(place, tmp_path) -> str:
    """The override for a model that ends no answer by itself."""
    shutil.copytree(place / "model", tmp_path / "endless")
    own = {"eos_token_id": 309, "pad_token_id": 307, "suppress_tokens": [309]}
    (tmp_path / "endless" / "generation_config.json").write_text(json.dumps(own))
    return f"task.from_pretrained={tmp_path / 'endless'}"


def test_an_answer_is_stopped_at_a_token_and_the_pipe_with_it(run, endless, capsys, monkeypatch):
    """Ctrl-C in the midst of an answer: it ends there, or one token later where the library tells behind."""
    monkeypatch.setattr("sys.stdin", io.StringIO("what is red?\nwhat is red?\n"))
    put, count = _Listener.put, itertools.count()

    def interrupted(listener: _Listener, tokens: torch.Tensor) -> None:
        put(listener, tokens)
        if next(count) == 12:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(_Listener, "put", interrupted)
    said = mm(capsys, "chat", "--run", run, endless, "--max-new-tokens", 300, code=130)
    assert said == "mm: interrupted\n" and next(count) in (13, 14)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_two_ranks_converse_as_one_does(place, run):
    image = place / "files" / "a.png"
    text = f"what is red?\n/image {image}\nand this?\n/image no.png\n<image>\n/new\nwhat is red?\n"
    found = []
    for nproc in ("1", "2"):
        command = ["chat", "--run", str(run), "--max-new-tokens", "20", "--nproc", nproc]
        ended = subprocess.run(
            [sys.executable, "-m", "mm_core.cli.main", *command],
            input=text,
            capture_output=True,
            text=True,
            timeout=200,
        )
        found.append((ended.returncode, ended.stdout, ended.stderr))
    assert found[0] == found[1]
    code, said, faults = found[0]
    assert code == 1 and len(said.splitlines()) >= 3
    assert faults.count("mm: ") == 2 and "no.png: there is no such image" in faults


@pytest.mark.slow
def test_two_ranks_go_on_after_ctrl_c_and_leave_by_it(run, endless):
    """In a terminal: an answer is stopped, so is another one, and at the prompt the command ends."""
    ours, theirs = pty.openpty()
    command = ["chat", "--run", str(run), endless, "--max-new-tokens", "350", "--nproc", "2"]
    ended = subprocess.Popen(
        [sys.executable, "-m", "mm_core.cli.main", *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "dumb"},
        # A test run in a shell's background ignores it, and children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    shown = b""

    def until(text: bytes) -> None:
        nonlocal shown
        end = time.monotonic() + 60
        while text not in shown:
            assert time.monotonic() < end, shown
            if select.select([ours], [], [], 0.1)[0]:
                shown += os.read(ours, 4096)
        shown = shown.partition(text)[2]

    try:
        until(b"> ")
        for _ in range(2):
            os.write(ours, b"what is red?\n")
            until(b"is red?\r\n")
            until(b" ")  # of the answer, which takes seconds
            ended.send_signal(signal.SIGINT)
            until(b"(stopped; this turn is forgotten)")
            until(b"> ")
            time.sleep(1.1)  # what comes sooner is an echo to mm train
        ended.send_signal(signal.SIGINT)
        until(b"mm: interrupted")
        assert ended.wait(30) == 130
    finally:
        ended.kill()


def test_a_terminal_is_asked_line_by_line(place, run, capsys, monkeypatch):
    lines = iter(["/help", "what is red?", f"/image {place / 'files' / 'b.png'}", "/nothing", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    said = mm(capsys, "chat", "--run", run, "--max-new-tokens", 6, "--system", "a system")
    with speaker(run) as opened:
        turns = [Turn("system", "a system"), Turn("user", "what is red?")]
        wanted = opened.say(turns, Decoding(max_new_tokens=6))
    assert said.count("/image FILE   shows an image") == 2 and said.endswith(f"{wanted}\n")


# -- sentences -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--steps", 3, "--fps", 2], "the run's task answers in words, which takes no --steps and no --fps"),
        (["--temperature", -1], "temperature is -1.0"),
        (["--top-p", 0], "top_p is 0.0"),
        (["--max-new-tokens", 0], "max_new_tokens is 0"),
        (["--image", "no.png"], "there is no such image"),
        (["--prompts", "x.jsonl"], "--prompts is given beside --prompt or --image"),
        (["data.train.max_length=8"], "max_length 8 leaves no room for an answer"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-p", "nan"], "top_p is nan"),
        (["--batch-size", 2], "--batch-size is given without --prompts"),
        (["--prompt", " "], "the prompt is empty, and shows nothing"),
        (["--prompt", "a\udcff"], "a\\udcff: what the user says is not UTF-8 text (character 2)"),
        (["--prompt", "<image><image>"], "the text says <image> <image>, and no images are shown"),
        (["--out", "."], "the file can not be written: this is a folder"),
        (["--out", "/proc/nowhere/x.jsonl"], "the file can not be written"),
    ],
)
def test_what_can_not_be_asked_is_a_sentence(run, capsys, words, what):
    assert what in mm(capsys, "sample", "--run", run, "--prompt", "what is this?", *words, code=1)


def test_a_file_without_rows_is_a_sentence(place, run, capsys):
    missing = mm(capsys, "sample", "--run", run, "--prompts", place / "none.jsonl", code=1)
    assert "the file of conversations does not exist" in missing
    empty = place / "files" / "none.json"
    empty.write_text("[]")
    out = place / "files" / "none_answers.jsonl"
    said = mm(capsys, "sample", "--run", run, "--prompts", empty, "--out", out, code=1)
    assert "none.json: the file has no rows, so there is nothing to answer" in said


def test_a_file_of_which_no_row_can_be_read_is_a_sentence(place, run, tmp_path, capsys):
    rows = ["{broken", data.asked(" "), data.asked("<image>"), {"conversations": []}]
    file, out = data.write(tmp_path / "bad.jsonl", rows), tmp_path / "answers.jsonl"
    said = mm(capsys, "sample", "--run", run, "--prompts", file, "--batch-size", 2, "--out", out, code=1)
    assert "no row could be read, of 4:" in said and "bad.jsonl:1: this is not JSON" in said
    first, second, third, fourth = (row["error"] for row in lines(out))
    assert "this is not JSON" in first and "line 2: the prompt is empty, and the row shows nothing" in second
    assert "shows 1 image and the row lists 0" in third and "is no list of turns" in fourth


def test_answers_do_not_replace_the_questions(place, run, capsys):
    rows = data.write(place / "files" / "kept.jsonl", QUESTIONS)
    before = rows.read_bytes()
    said = mm(capsys, "sample", "--run", run, "--prompts", rows, "--out", rows, code=1)
    assert "--out is the file of --prompts, whose rows the answers would replace" in said
    assert rows.read_bytes() == before


def test_memory_that_runs_out_is_a_sentence(place, run, capsys, monkeypatch):
    def full(*given: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(transformers.InternVLForConditionalGeneration, "generate", full)
    rows = data.write(place / "files" / "full.jsonl", QUESTIONS)
    said = mm(capsys, "sample", "--run", run, "--prompts", rows, "--batch-size", 2, code=1)
    assert "out of memory: CUDA out of memory. Tried to allocate 2 GiB" in said
    assert "2 prompts of" in said and "hint: a smaller --batch-size" in said


# -- mm eval -------------------------------------------------------------------------------------


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
    assert "rows that are packed into one sequence can not be answered one by one" in said
    assert "packing: false of data.validation" in said and "Traceback" not in said
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
