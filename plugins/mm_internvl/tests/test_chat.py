"""`mm chat` with a tiny InternVL: in a terminal, by a pipe, on several ranks."""

from __future__ import annotations

import io
import itertools
import json
import os
import pty
import select
import shutil
import signal
import sys
import time

import internvl_answers as answers
import pytest
import torch

from mm_core.cli.main import main
from mm_core.contracts import Decoding, Turn
from mm_core.errors import DataError
from mm_core.inference.answer import answer_session
from mm_core.tasks.pretrained.answers import _Listener
from support import warm

mm, place, run = answers.mm, answers.place, answers.run


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
    with answer_session(run) as opened:
        shown = Decoding(max_new_tokens=6)
        turns = [Turn("user", "what is red?")]
        first = opened.answer(turns, shown)
        turns += [Turn("assistant", first), Turn("user", "and this?", (image,))]
        second = opened.answer(turns, shown)
        alone = opened.answer(turns[2:], shown)
    assert "\n".join(said) == f"{first}\n{second}\n{first}"
    assert second != alone, "what was said before changes nothing"


def test_a_line_that_cannot_be_answered_ends_no_chat(place, run, capsys, monkeypatch):
    text = "/image nowhere.png\n/draw\n<image> what?\nwhat is red?\n"
    said, faults = chat(capsys, monkeypatch, text, "--run", run, code=1)
    assert len(said) >= 1 and said[0]
    assert "there is no such image" in faults and "nowhere.png" in faults
    assert "unknown command /draw" in faults and "accepted: /image, /new, /quit, /help" in faults
    assert "<image> what?: the text contains <image>, but the turn has 0 images" in faults
    assert "accepted: one <image> for each image, or none: images then precede the text" in faults


def test_lines_that_are_no_text_end_no_chat(place, run, capsys, monkeypatch):
    text = b"what is \xff?\n/image a\0b\n/image\n<video> what?\nwhat is red?\n"
    typed = io.TextIOWrapper(io.BytesIO(text), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", typed)
    assert main(["chat", "--run", str(run), "--max-new-tokens", "2"]) == 1
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 1 and said.out.strip()
    for fault in (
        "the prompt is not valid UTF-8 (character 9)",
        "a\\x00b: there is no such image",
        "/image: there is no such image",
        "the text contains <video>, but the turn has 0 images",
        "hint: videos can be used only in rows of a file",
    ):
        assert fault in said.err


def test_a_placeholder_in_an_answer_of_the_model_is_a_readable_error(run):
    turns = [Turn("user", "what?"), Turn("assistant", "an <image>"), Turn("user", "why?")]
    with answer_session(run) as opened, pytest.raises(DataError, match="contains <image>") as fault:
        opened.answer(turns, Decoding(max_new_tokens=2))
    assert fault.value.hint == "start a new conversation: the model itself wrote the placeholder"


def test_nobody_to_answer_is_a_readable_error(run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert "standard input is closed, so there is nothing to answer" in mm(
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
    assert lost.startswith(
        "mm: error: standard input cannot be read: Input/output error\n  hint: pipe text into"
    )


@pytest.fixture
def endless(place, tmp_path) -> str:
    """The override for a model that ends no answer by itself."""
    shutil.copytree(place / "model", tmp_path / "endless")
    own = {"eos_token_id": 309, "pad_token_id": 307, "suppress_tokens": [309]}
    (tmp_path / "endless" / "generation_config.json").write_text(json.dumps(own))
    return f"task.from_pretrained={tmp_path / 'endless'}"


def test_an_answer_is_stopped_at_a_token_and_the_pipe_with_it(run, endless, capsys, monkeypatch):
    """Ctrl-C in the midst of an answer: it ends there, or one token later where the library is late."""
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
        ended = warm.mm(*command, text=text)
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
    with os.fdopen(theirs, "r+b", buffering=0, closefd=False) as terminal:
        ended = warm.Process(
            [sys.executable, "-m", "mm_core.cli.main", *command],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**os.environ, "TERM": "dumb"},
            interruptible=True,
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
            until(b"(stopped; this turn is dropped from the conversation)")
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
    with answer_session(run) as opened:
        turns = [Turn("system", "a system"), Turn("user", "what is red?")]
        wanted = opened.answer(turns, Decoding(max_new_tokens=6))
    assert said.count("/image FILE   adds an image") == 2 and said.endswith(f"{wanted}\n")
