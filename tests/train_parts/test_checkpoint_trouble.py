"""What the system does to checkpoints while they are read and written: each time a sentence, and no more
than that is lost."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from mm_core.errors import CheckpointError
from mm_core.train import checkpoint_io as files
from mm_core.train.checkpoint import CheckpointStore
from mm_core.train.checkpoint_reading import read_facts
from mm_core.train.checkpoint_retention import complete_steps
from mm_core.train.checkpoint_thread import WriterThread

CONFIG = "run: {name: test}\n"


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "run", 3, asynchronous="thread")
    yield store
    store.close()


@pytest.fixture
def path(store, state) -> Path:
    """A checkpoint with its sha256.json."""
    path = store.save(1, state, {}, CONFIG)
    store._thread.finish()
    assert (path / "sha256.json").exists()
    return path


def failing(monkeypatch, name: str, number: int) -> None:
    """Files of that name can not be opened: what no file system of a test's does when it is asked to."""
    opened = Path.open

    def open_(self, *arguments, **settings):
        if self.name == name:
            raise OSError(number, os.strerror(number))
        return opened(self, *arguments, **settings)

    monkeypatch.setattr(Path, "open", open_)


# -- in the background -----------------------------------------------------------------------------


def test_a_checkpoint_that_is_removed_while_its_sha256_is_checked_is_no_fault(path):
    def names():
        yield "facts.json"
        shutil.rmtree(path)  # retention, once a newer one is there
        yield "config.yaml"

    files.check_digests(path, names())
    assert not path.exists()


def test_a_file_that_is_missing_where_the_rest_is_there_is_one(path):
    (path / "config.yaml").unlink()
    with pytest.raises(files.DamagedError, match=r"config\.yaml is missing"):
        files.check_digests(path, ["facts.json", "config.yaml"])


def test_faults_of_a_thread_are_sentences_that_ranks_can_agree_on():
    thread = WriterThread("test", "checking sha256")

    def work():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    thread.give(work)
    thread.finish()
    with pytest.raises(CheckpointError, match=r"^checking sha256 failed: \[Errno 5\]") as caught:
        thread.check()
    assert isinstance(caught.value.__cause__, OSError)
    thread.check()


def test_a_host_without_memory_for_the_copy_is_told_so(store):
    store.reserve({"model": {"w": torch.empty(2**50, device="meta")}})
    store._thread.finish()
    with pytest.raises(CheckpointError, match=r"the host has no memory for a copy of model\.w") as caught:
        store.poll()
    assert "checkpoint.async=false needs none" in str(caught.value)


def test_an_error_does_not_wait_for_sha256_but_for_the_save_itself(store, state, monkeypatch):
    def endless(path, hurry):
        return None if hurry.wait(30) else "0"

    monkeypatch.setattr("mm_core.train.checkpoint_io.sha256", endless)
    path = store.save(1, state, {}, CONFIG)
    began = time.monotonic()
    store.close(hurry=True)
    assert time.monotonic() - began < 10
    assert store.poll() == [path] and not (path / "sha256.json").exists()


# -- while reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("name", ["facts.json", "checksums.json", "__0_0.distcp"])
def test_a_file_that_can_not_be_read_now_is_no_damage(name, number, path, store, state, monkeypatch):
    """Neither passed over for an older checkpoint nor put aside: it is whole when the disk answers again."""
    newer = store.save(2, state, {}, CONFIG)
    store.wait()
    with monkeypatch.context() as patched:
        failing(patched, name, number)
        with pytest.raises(CheckpointError) as caught:
            store.open("auto")
    assert not isinstance(caught.value, files.DamagedError)
    assert str(caught.value) == (
        f"{newer}: {name} can not be read now ({os.strerror(number)})\n"
        "  hint: try again when the file system answers; if it never does, resume from another: --resume PATH"
    )
    assert store.open("auto") == (newer, [])
    assert complete_steps(store.folder).keys() == {1, 2}


@pytest.mark.parametrize("name", ["facts.json", ".metadata"])
def test_nor_is_one_that_is_read_again_later(name, path, store, empty, monkeypatch):
    failing(monkeypatch, name, errno.ESTALE)
    with pytest.raises(CheckpointError, match=rf"{name} can not be read now") as caught:
        read_facts(path) if name == "facts.json" else store.load(path, empty, verified=True)
    assert not isinstance(caught.value, files.DamagedError)
