"""What the machine or the data are the cause of is a sentence, and no report of a fault in code."""

from __future__ import annotations

import errno
import os
import runpy
import subprocess
import sys

import pytest
import torch

from mm_core.cli.main import main
from mm_core.errors import CheckpointError, MMError, outer_fault
from mm_core.runtime.launch import rank_process
from support.pages import ROOT

PLUGIN = """
import torch
from torch.utils.data import Dataset
from mm_core import Component, hookimpl

class Ids(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = torch.tensor([3, 4, 100_000])
        return {"video": torch.zeros(3, 8, 16, 16) - index / 8, "prompt_ids": ids, "prompt_mask": ids > 0}

@hookimpl
def mm_datasets():
    return [Component(name="ids", target="ids:Ids")]
"""


def torchs_own() -> Exception:
    with pytest.raises(IndexError) as caught:
        torch.nn.functional.embedding(torch.tensor([9]), torch.zeros(4, 2))
    return caught.value


@pytest.mark.parametrize(
    ("error", "what", "hint"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files", "ulimit -n"),
        (OSError(errno.ENOSPC, "No space left on device", "/t/x"), "/t/x: No space left", "TMPDIR"),
        (OSError(errno.EROFS, "Read-only file system", "/t"), "/t: Read-only file system", "TMPDIR"),
        (PermissionError(errno.EACCES, "Permission denied", "/t"), "/t: Permission denied", "permissions"),
        (RuntimeError("Too many open files. Communication with"), "Too many open files", "ulimit -n"),
        (
            RuntimeError("[enforce fail at socket.cc:24] rv != -1. socket: Too many open files"),
            "Too many open files ([enforce fail",
            "ulimit -n",
        ),
        (RuntimeError("write failed: No space left on device"), "No space left on device", "TMPDIR"),
        (RuntimeError("can't start new thread"), "Resource temporarily unavailable", "ulimit -u"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "Resource", "ulimit -u"),
        (OSError(errno.EIO, "Input/output error", "/d"), "/d: Input/output error", "dmesg"),
        (IndexError("Target 7 is out of bounds."), "a number in the data is outside", "numbers"),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            "No usable temporary directory found",
            "TMPDIR",
        ),
        (torchs_own(), "a number in the data is outside of a table of the model", "prompt_ids"),
        (
            RuntimeError("CUDA error: device-side assert triggered"),
            "a number in the data is outside",
            "tokenizer",
        ),
    ],
)
def test_limits_of_the_machine_and_numbers_of_the_data_are_sentences(error, what, hint):
    outer = RuntimeError("caused by it")
    outer.__cause__ = error
    for each in (error, outer):
        fault = outer_fault(each, None)
        assert fault.render().startswith(what) and hint in fault.hint


def test_other_errors_are_none_of_these():
    for error in (KeyError("a"), FileNotFoundError(errno.ENOENT, "No such file", "x"), IndexError("list")):
        assert outer_fault(error, None) is None


BUGS = """
import errno, torch

def index(latents):
    return latents.index_select(0, torch.tensor([9]))

def asked(latents):
    raise RuntimeError("the labeller answered: permission denied for row 7")

def wrapped(latents):
    try:
        raise OSError(errno.EACCES, "Permission denied")
    except OSError as error:
        raise TypeError("a wrong argument") from error
"""


@pytest.mark.parametrize("name", ["index", "asked", "wrapped"])
def test_a_fault_in_a_plugins_code_is_none_of_these_whatever_its_words(name, tmp_path):
    (path := tmp_path / "bugs.py").write_text(BUGS)
    module = runpy.run_path(str(path))
    with pytest.raises(Exception) as caught:
        module[name](torch.zeros(4, 2))
    trace = caught.tb
    while trace.tb_next is not None:
        trace = trace.tb_next
    assert outer_fault(caught.value, f"{path}, line {trace.tb_lineno}") is None


def test_tokens_outside_of_the_vocabulary_are_no_fault_of_the_code(tiny, tmp_path, capsys):
    (tmp_path / "ids.py").write_text(PLUGIN)
    own = (f"plugins.path=[{tmp_path / 'ids.py'}]", "data.train={type: local/ids}", f"run.dir={tmp_path}")
    loader = "data.loader={mode: base, workers: 0}"
    assert main(["train", "--config", str(tiny), *own, loader]) == 1
    said = capsys.readouterr().err
    assert "a number in the data is outside of a table of the model: a token" in said
    assert "Traceback" not in said and "bug in code" not in said


def test_a_rank_that_an_error_names_is_not_named_twice(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    rank_process._write(CheckpointError("the disk is full", where="rank 0, /runs"))
    rank_process._write(MMError("the file is missing", where="/data"))
    said = capsys.readouterr().err
    assert "mm: error: rank 0, /runs: the disk is full\n" in said
    assert "mm: error: rank 1: /data: the file is missing\n" in said


@pytest.mark.slow
def test_a_run_without_free_descriptors_names_the_limit(tiny, tmp_path):
    command = f'ulimit -n 40; exec "$@" train --config {tiny} run.dir={tmp_path} data.loader.workers=2'
    started = ["bash", "-c", command, "bash", sys.executable, "-m", "mm_core.cli.main"]
    done = subprocess.run(started, capture_output=True, text=True, cwd=ROOT, env={**os.environ})
    assert done.returncode == 1, done.stderr
    assert "mm: error: Too many open files" in done.stderr and "ulimit -n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_that_may_open_few_files_ends_with_a_sentence(tiny, tmp_path):
    limited = "import resource, runpy; resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16));"
    limited += " runpy.run_module('mm_core.cli.main', run_name='__main__', alter_sys=True)"
    command = [
        sys.executable,
        "-c",
        limited,
        "train",
        "--config",
        tiny,
        "--nproc",
        "1",
        f"run.dir={tmp_path}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "mm: error: Too many open files" in done.stderr and "ulimit -n" in done.stderr
