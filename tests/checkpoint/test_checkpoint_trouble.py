"""What the system does to checkpoints while they are read and written: each time a readable error, and
no more than that is lost."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from mm_core.checkpoint.files import dcp
from mm_core.checkpoint.files import layout as files
from mm_core.checkpoint.reading import open_checkpoint, verify
from mm_core.checkpoint.retention import complete_steps
from mm_core.checkpoint.store import CheckpointStore
from mm_core.errors import CheckpointError
from mm_core.runtime.background import BackgroundQueue
from mm_core.runtime.ranks import Ranks
from support.checkpoints import chosen, staged

CONFIG = "run: {name: test}\n"


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "run", 3, asynchronous=True)
    yield store
    store.close()


@pytest.fixture
def path(store, state) -> Path:
    path = store.save(1, state, {}, CONFIG)
    store.wait()
    return path


def failing(monkeypatch, name: str, number: int) -> None:
    """Files of that name cannot be opened: what no file system of a test's does when it is asked to."""
    for owner in (Path, os):

        def open_(path, *arguments, opened=owner.open, **settings):
            if Path(path).name == name:
                raise OSError(number, os.strerror(number))
            return opened(path, *arguments, **settings)

        monkeypatch.setattr(owner, "open", open_)


# -- in the background -----------------------------------------------------------------------------


def test_faults_of_a_thread_are_errors_that_ranks_can_agree_on():
    thread = BackgroundQueue("test", "writing")

    def work():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    thread.give(work)
    thread.finish()
    with pytest.raises(CheckpointError, match=r"^writing failed: \[Errno 5\]") as caught:
        thread.check()
    assert isinstance(caught.value.__cause__, OSError)
    thread.check()


def test_a_host_without_memory_for_the_copy_is_a_readable_error(store):
    store.reserve({"model": {"w": torch.empty(2**50, device="meta")}})
    store._thread.finish()
    with pytest.raises(CheckpointError, match=r"not enough host memory for a copy of model\.w") as caught:
        store.poll()
    assert "checkpoint.async=false, which needs no copy" in str(caught.value)


def test_work_that_is_given_after_a_fault_is_done_as_well():
    """Ranks exchange messages in it: one that left its part out would keep the others waiting."""
    thread = BackgroundQueue("test", "writing")
    done = threading.Event()
    thread.give(lambda: 1 / 0)
    thread.give(done.set)
    assert done.wait(10)
    with pytest.raises(CheckpointError, match="writing failed: ZeroDivisionError"):
        thread.check()
    thread.finish()


def test_an_error_waits_for_the_save_in_flight(store, state, monkeypatch):
    go = held_back(monkeypatch)
    path = store.save(1, state, {}, CONFIG)
    threading.Timer(0.5, go.set).start()
    store.close(after_fault=True)
    assert store.poll() == [path] and path.is_dir()


def test_an_error_does_not_wait_for_what_else_the_thread_does(store):
    """The buffers of a large state, which no save has asked for yet."""
    go = threading.Event()
    store._thread.give(lambda: go.wait(60))
    began = time.monotonic()
    store.close(after_fault=True)
    assert time.monotonic() - began < 10
    go.set()


# -- while reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("name", ["facts.json", "checksums.json", "__0_0.distcp"])
def test_a_file_that_cannot_be_read_now_is_no_damage(name, number, path, store, state, monkeypatch):
    """The checkpoint is neither skipped nor quarantined: it is complete when the disk responds again."""
    newer = store.save(2, state, {}, CONFIG)
    store.wait()
    with monkeypatch.context() as patched:
        failing(patched, name, number)
        with pytest.raises(CheckpointError) as caught:
            store.open("auto")
    assert not isinstance(caught.value, files.DamagedError)
    assert str(caught.value) == (
        f"{newer}: {name} cannot be read now ({os.strerror(number)})\n"
        "  hint: try again when the file system responds; if it does not, resume from another: --resume PATH"
    )
    assert chosen(store, "auto") == (newer, [])
    assert complete_steps(store.folder).keys() == {1, 2}


@pytest.mark.parametrize("name", ["facts.json", ".metadata"])
def test_nor_is_one_that_is_read_again_later(name, path, store, empty, monkeypatch):
    failing(monkeypatch, name, errno.ESTALE)
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read now") as caught:
        open_checkpoint(path).facts if name == "facts.json" else store.load(path, empty, verified=True)
    assert not isinstance(caught.value, files.DamagedError)


# -- what a validation adds ------------------------------------------------------------------------


def held_back(monkeypatch) -> threading.Event:
    """Writing waits until the event is set."""
    go = threading.Event()
    written = dcp.write_tensors

    def write_tensors(*arguments, **settings):
        assert go.wait(30)
        return written(*arguments, **settings)

    monkeypatch.setattr(dcp, "write_tensors", write_tensors)
    return go


@pytest.mark.parametrize("early", [True, False])
def test_figures_join_the_checkpoint_that_they_judge(early, tmp_path, state, monkeypatch):
    """Also where they are there before it is complete."""
    store = CheckpointStore(tmp_path / "run", 1, best="loss", asynchronous=True)
    figures = {1: 0.2, 2: 0.9, 3: 0.5}
    for step, loss in figures.items():
        go = held_back(monkeypatch)
        final = store.save(step, state, {"metrics": {}, "evaluated": False}, CONFIG)
        if not early:
            go.set()
            store.wait()
        store.add(step, {"loss": loss}, evaluated=True)
        assert final.exists() is not early
        go.set()
        store.wait()
        facts = open_checkpoint(final).facts
        assert facts["metrics"] == {"loss": loss} and facts["evaluated"] is True
        assert (store.folder / "BEST").read_text() == "step_00000001\n"
    assert complete_steps(store.folder).keys() == {1, 3}
    verify(final, Ranks.current())
    store.close()


@pytest.mark.parametrize("text", ["", "[]", '{"metrics": 1, "evaluated": true}', '{"metrics": {}}', "\udcff"])
def test_figures_that_are_something_else_are_none(text, path):
    (path / "validation.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    facts = open_checkpoint(path).facts
    assert "metrics" not in facts and "evaluated" not in facts


def test_figures_that_find_no_room_are_a_warning(path, store, caplog):
    staged(path / "validation.json").symlink_to("/dev/full")
    store.add(1, {"loss": 0.5}, evaluated=True)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == f"validation.json of {path} could not be written: [Errno 28] No space left on device"
    assert "metrics" not in open_checkpoint(path).facts


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_folder_that_was_removed_costs_what_was_in_it_and_not_what_is_trained(
    asynchronous, state, tmp_path
):
    run = tmp_path / "run"
    store = CheckpointStore(run, 3, asynchronous=asynchronous)
    store.begin(0)
    store.save(1, state, {}, CONFIG)
    store.wait()
    (run / ".lock").unlink()  # alone it is nothing that anybody would miss
    (run / "config.yaml").write_text(CONFIG)
    store.save(2, state, {}, CONFIG)
    store.wait()
    shutil.rmtree(run)
    store.save(3, state, {}, CONFIG)
    with pytest.raises(CheckpointError, match="folder was removed or renamed during training") as caught:
        store.wait()
    assert caught.value.where == str(run) and "run the command again to resume" in str(caught.value.hint)
    assert [path.name for path in store.poll()][-1] == "step_00000003"
    other = CheckpointStore(run, 3)
    with pytest.raises(CheckpointError, match="this run is being trained by process"):
        other.begin(3)  # the lock is a new one, and held
    store.close()
    assert list(complete_steps(run / "checkpoints")) == [3]
