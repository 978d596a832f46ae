"""What cannot be printed ends no run; where the output is what was asked for, it is an error."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mm_core.cli.main import main
from mm_core.cli.options import print_json
from mm_core.errors import MMError, printable
from mm_core.runtime.launch.rank_logs import log_path, rank_log
from mm_core.runtime.output import BestEffort, Required


def _gone():
    """A text stream over a pipe whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("make", [_gone, lambda: open("/dev/full", "w")])  # noqa: SIM115, PTH123
def test_a_best_effort_stream_loses_what_it_cannot_write_and_ends_in_order(make):
    stream = make()
    output = BestEffort(stream)
    for text in ("x" * 100_000, "a line\n"):
        assert output.write(text) == len(text)
        output.flush()
    stream.close()  # as the interpreter does at its end: nothing is left that fails
    descriptors = len([*Path("/proc/self/fd").iterdir()])
    output.write("more")
    output.flush()
    assert len([*Path("/proc/self/fd").iterdir()]) == descriptors, "none is opened for each lost line"


def test_a_required_stream_is_a_readable_error_for_a_full_disk_and_a_broken_pipe_for_a_reader_that_left():
    full = open("/dev/full", "w")  # noqa: SIM115, PTH123
    with pytest.raises(MMError) as caught:
        print("x", file=Required(full), flush=True)
    assert str(caught.value) == (
        "standard output: the output cannot be written: No space left on device\n"
        "  hint: free disk space where the output is redirected to, or redirect it elsewhere"
    )
    full.close()
    stream = _gone()
    with pytest.raises(BrokenPipeError):
        print("x", file=Required(stream), flush=True)
    stream.close()


@pytest.mark.parametrize("kind", [BestEffort, Required])
@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "\\xfc \\u2713"), ("latin-1", "ü \\u2713")])
def test_characters_that_the_stream_lacks_are_escapes_and_the_next_lines_come(kind, encoding, shown):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    output = kind(stream)
    print("ü ✓", file=output)
    print("\udc80 next", file=output, flush=True)
    assert stream.buffer.getvalue().decode(encoding) == f"{shown}\n\\udc80 next\n"


@pytest.mark.parametrize(
    ("words", "required"),
    [
        (["eval", "--run", "x", "--json"], True),
        (["evaluate", "--json", "--run", "x"], True),
        (["train", "--config", "x", "--verify-resume", "2"], True),
        (["train", "--config", "x", "--verify-resume=2"], True),
        (["train", "--config", "x", "--dry-run"], True),
        (["eval", "--run", "x"], False),
        (["train", "--config", "x"], False),
    ],
)
def test_a_result_that_is_only_printed_must_be_written(monkeypatch, words, required):
    def printing(arguments, program):
        if "--json" in arguments:
            print_json({"the": "result"})
        else:
            print("the result")
        return 0

    monkeypatch.setattr("mm_core.cli.main._run", printing)
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(words) == (1 if required else 0)


def test_lines_that_nobody_reads_are_in_the_rank_log(tmp_path, monkeypatch):
    stream = _gone()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", None)
    with rank_log(tmp_path, 0, 1):
        print("x" * 100_000)
        print("said", flush=True)
        print("warned", file=sys.stderr, flush=True)
    stream.close()
    text = log_path(tmp_path, 0).read_text()
    assert " said\n" in text and " warned\n" in text


def test_the_streams_of_the_process_are_its_own_after_a_command(capsys):
    before = sys.stdout, sys.stderr
    assert main(["--version"]) == 0
    assert (sys.stdout, sys.stderr) == before and capsys.readouterr().out.startswith("mm ")


@pytest.mark.slow
@pytest.mark.parametrize("command", [["plugins", "list"], ["validate", "--json", "nothing.yaml"], ["--help"]])
def test_a_full_disk_is_an_error_of_a_command_that_prints(command):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mm_core.cli.main", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("mm: error: standard output: the output cannot be written: No space left")
    assert len(done.stderr.splitlines()) == 2


_SHELL = {
    "full": "{} >/dev/full 2>/dev/full",
    "head": "{{ {} 2>&1; echo $? >&3; }} 3>code | head -1 >/dev/null; exit $(cat code)",
    "closed": "{} >&- 2>&- <&-",
}


@pytest.mark.slow
@pytest.mark.parametrize(("where", "ranks"), [("full", 1), ("closed", 1), ("head", 2)])
def test_a_run_whose_output_is_lost_goes_on_to_its_end(tiny, tmp_path, where, ranks):
    run = f"{sys.executable} -m mm_core.cli.main train --config {tiny} --nproc {ranks} run.dir={tmp_path}"
    done = subprocess.run(
        ["bash", "-c", _SHELL[where].format(f"{run} train.steps=4 train.global_batch_size=4")],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=180,
    )
    assert done.returncode == 0
    assert (tmp_path / "tiny/checkpoints/step_00000004").is_dir()
    text = log_path(tmp_path / "tiny", 0).read_text()
    assert all(f"step {step}/4" in text for step in (1, 2, 3, 4)) and "ended by" not in text


@pytest.mark.parametrize("kind", [BestEffort, Required])
def test_a_stream_without_a_progress_bar_passes_no_control_characters(kind):
    """What a command prints anywhere, such as a name that no one thought of, commands no terminal."""
    stream = io.StringIO()
    text = "a\tb\x1b[2J\x9b\x7f\r \u3000\u202fä\n"
    assert kind(stream, live=False).write(text) == len(text)
    assert stream.getvalue() == "a\tb\\x1b[2J\\x9b\\x7f\\x0d \u3000\u202fä\n"
    kind(stream).write("\x1b[2K")
    assert stream.getvalue().endswith("\x1b[2K")


def test_a_name_in_a_line_neither_ends_nor_reorders_it():
    assert printable("a\nb\t\u202ec\u2028\ud800\x1b") == "a\\nb\\t\\u202ec\\u2028\\ud800\\x1b"
    assert printable("plain \u3000 \U0001f600 \\n") == "plain \u3000 \U0001f600 \\n"
    assert MMError("\x1b[1m", hint="two\nlines\x9b").render() == "\\x1b[1m\n  hint: two\nlines\\x9b"


def test_json_with_control_characters_is_json_without_them(capsys):
    held = {"name": "\x1b\x7f\x9b\u2028\u202e\n"}
    print_json(held)
    printed = capsys.readouterr().out
    assert json.loads(printed) == held
    assert not any(mark in printed for mark in "\x1b\x7f\x9b\u2028\u202e")
