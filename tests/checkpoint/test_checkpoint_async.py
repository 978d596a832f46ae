"""Checkpoints written behind the caller's back: what they hold, how they fail, which of them stay."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mm_core.checkpoint.files.host_copies import HostCopies
from mm_core.checkpoint.reading import find_checkpoint, load_model_only, open_checkpoint
from mm_core.checkpoint.retention import complete_steps
from mm_core.checkpoint.run_lock import RunLock
from mm_core.checkpoint.store import CheckpointStore
from mm_core.errors import CheckpointError
from support import warm
from support.checkpoints import chosen

CONFIG = "run: {name: test}\n"


@pytest.fixture
def make(tmp_path):
    stores = []

    def build(asynchronous=True, keep=2, run_dir=None, **settings) -> CheckpointStore:
        where = run_dir or tmp_path / "run"
        stores.append(CheckpointStore(where, keep, asynchronous=asynchronous, **settings))
        return stores[-1]

    yield build
    for store in stores:
        store.close()


def steps(store: CheckpointStore) -> set[int]:
    return set(complete_steps(store.folder))


@contextmanager
def small_files(size: int):
    """No file of this process may grow further: an error as of a full disk, but for its number."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_save_holds_the_state_of_its_moment(make, state, empty, same):
    """What training changes after `save` has returned does not reach the checkpoint."""
    store = make()
    wanted = {part: {k: v.clone() for k, v in named.items()} for part, named in state.items()}
    store.reserve(state)
    path = store.save(3, state, {"seed": 7}, CONFIG, manifest={"world": 1})
    for named in state.values():
        for tensor in named.values():
            tensor.fill_(-1.0)
    store.wait()
    assert store.poll() == [path] and store.poll() == []
    assert store.load(path, empty)["seed"] == 7
    same(empty, wanted)
    assert open_checkpoint(path).manifest == {"world": 1}


def test_reserving_after_a_copy_leaves_the_copy_alone(state, same):
    """The buffers are reserved in the background: a run's first save may come before."""
    copies = HostCopies()
    taken = copies.take(state)
    copies.reserve(state)
    same(taken, state)


def test_saves_in_a_row_use_the_same_buffers(make, state, empty, same):
    store = make()
    for step in (1, 2, 3):
        state["model"]["blocks.0.weight"].fill_(float(step))
        store.save(step, state, {}, CONFIG)
    store.wait()
    assert steps(store) == {2, 3}
    assert len(store.poll()) == 3
    store.load(store.folder / "step_00000003", empty)
    same(empty, state)


def test_a_full_disk_in_the_background_is_named_by_the_next_call(tmp_path, make, state, empty, same):
    """A real file system of 1 MB. Two saves in a row fail, and the last good checkpoint stays."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a small file system; the test below needs none")
    try:
        store = make(run_dir=disk / "run")
        good = store.save(1, state, {}, CONFIG)
        store.wait()
        large = {"model": {"w": torch.zeros(500_000)}}
        for step in (2, 3):
            store.save(step, large, {}, CONFIG)
            with pytest.raises(CheckpointError) as caught:
                store.wait()
            assert str(caught.value) == (
                "writing the checkpoint failed: [Errno 28] No space left on device\n"
                "  hint: check free space, quota and permissions of the run folder, on every node"
            )
        assert {path.name for path in store.folder.iterdir()} == {"step_00000001", "LATEST"}
        store.load(good, empty)
        same(empty, state)
        store.close()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_failed_write_is_raised_by_poll_and_by_the_next_save(make, state):
    store = make()
    store.save(1, state, {}, CONFIG)
    store.wait()
    large = {"model": {"w": torch.zeros(100_000)}}
    with small_files(100_000):
        store.save(2, large, {}, CONFIG)
        store._thread.finish()
        with pytest.raises(CheckpointError, match=r"writing the checkpoint failed: .*File too large"):
            store.poll()
        store.save(3, large, {}, CONFIG)
        with pytest.raises(CheckpointError, match="File too large"):
            store.save(4, large, {}, CONFIG)
    assert steps(store) == {1}
    assert not list(store.folder.glob("*.tmp-*"))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_weights_that_are_not_finite_are_never_published(asynchronous, make, state):
    store = make(asynchronous)
    state["model"]["blocks.0.weight"][3, 2] = float("nan")
    with pytest.raises(CheckpointError) as caught:
        store.save(2, state, {}, CONFIG)
        store.wait()
    assert str(caught.value) == (
        "step_00000002: blocks.0.weight is not finite, so nothing was saved\n"
        "  hint: resume from the last checkpoint with a lower learning rate"
    )
    assert steps(store) == set()


def test_large_finite_weights_are_saved(make):
    store = make()
    store.save(1, {"model": {"w": torch.full((100,), 3e38)}}, {}, CONFIG)
    store.wait()
    assert steps(store) == {1}


# -- which stay ------------------------------------------------------------------------------------


def test_the_newest_every_nth_and_the_best_stay(make, state):
    store = make(keep=2, keep_every=4, best="validation/loss")
    values = {1: 0.9, 2: 0.3, 3: 0.5, 4: 0.8, 5: float("nan"), 6: None, 7: 0.3}
    for step, value in values.items():
        metrics = {} if value is None else {"validation/loss": value if value == value else "NaN"}
        store.save(step, state, {"metrics": metrics}, CONFIG)
        store.wait()
    assert steps(store) == {2, 4, 6, 7}, "the earlier of equal values is the best"
    assert (store.folder / "BEST").read_text() == "step_00000002\n"
    assert find_checkpoint(store.folder.parent, "best").name == "step_00000002"
    assert find_checkpoint(store.folder.parent).name == "step_00000007"


def test_a_run_without_a_best_is_reported(make, state):
    store = make()
    store.save(1, state, {}, CONFIG)
    store.wait()
    with pytest.raises(CheckpointError, match="this run has recorded no best checkpoint"):
        find_checkpoint(store.folder.parent, "best")


# -- damage ----------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped bit": (lambda c: flip(c / "__0_0.distcp"), "__0_0.distcp does not match its checksum"),
    "truncated shard": (
        lambda c: (c / "__0_0.distcp").write_bytes((c / "__0_0.distcp").read_bytes()[:-7]),
        "__0_0.distcp has",
    ),
    "missing shard": (lambda c: (c / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "torn checksums": (
        lambda c: (c / "checksums.json").write_text((c / "checksums.json").read_text()[:40]),
        "checksums.json cannot be read",
    ),
    "lost checksums": (lambda c: (c / "checksums.json").unlink(), "this checkpoint is incomplete"),
    "flipped bit in the facts": (lambda c: flip(c / "facts.json"), "facts.json does not match its checksum"),
    "flipped bit in .metadata": (lambda c: flip(c / ".metadata"), ".metadata does not match its checksum"),
    "torn manifest": (lambda c: (c / "manifest.json").write_text("{"), "manifest.json has 1 byte"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_newest_checkpoint_is_passed_over_by_name(kind, make, state, empty, same):
    harm, words = DAMAGES[kind]
    store = make(keep=3)
    for step in (1, 2):
        store.save(step, state, {}, CONFIG)
    store.wait()
    newest = store.folder / "step_00000002"
    harm(newest)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        store.load(newest, empty)
    path, refused = chosen(store, "auto")
    assert path == store.folder / "step_00000001"
    assert [fault.where for fault in refused] == [str(newest)] and words in refused[0].what
    store.load(path, empty)
    same(empty, state)
    store.begin(1, [newest])
    assert steps(store) == {1}
    (aside,) = store.folder.glob("step_00000002.damaged-*")
    assert aside.is_dir(), "a damaged checkpoint is quarantined, not deleted"
    store.save(2, state, {}, CONFIG)
    store.wait()
    assert steps(store) == {1, 2}


def test_a_torn_checkpoint_is_in_no_runs_way_however_it_begins(make, state):
    """With `--resume never`, or a path, nobody has looked for damage; the save came too late to find it."""
    store = make()
    path = store.save(2, state, {}, CONFIG)
    store.close()
    (path / "checksums.json").unlink()
    store.begin(0)
    assert not path.exists() and len(list(store.folder.glob("step_00000002.damaged-*"))) == 1
    store.save(2, state, {}, CONFIG)
    store.wait()
    assert steps(store) == {2}


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew_unasked(make, state):
    store = make()
    store.save(1, state, {}, CONFIG)
    store.wait()
    flip(store.folder / "step_00000001" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"every checkpoint of this run is damaged: .*__0_0.distcp"):
        store.open("auto")


# -- averages --------------------------------------------------------------------------------------


def test_the_average_is_a_part_of_its_own(make, state):
    store = make()
    average = {"blocks.0.weight": state["model"]["blocks.0.weight"] * 0.5}
    path = store.save(1, {**state, "ema": average}, {}, CONFIG)
    store.wait()
    for weights, factor in (("model", 1.0), ("ema", 0.5), ("auto", 0.5)):
        target = {k: torch.zeros_like(v) for k, v in state["model"].items()}
        load_model_only(path, target, weights)
        assert torch.equal(target["blocks.0.weight"], state["model"]["blocks.0.weight"] * factor)
        assert torch.equal(target["head"], state["model"]["head"]), "what has no average is the model's own"
    plain = store.save(2, state, {}, CONFIG)
    store.wait()
    with pytest.raises(CheckpointError, match="contains no average of the weights"):
        load_model_only(plain, {k: torch.zeros_like(v) for k, v in state["model"].items()}, "ema")


# -- one job a folder ------------------------------------------------------------------------------


def test_two_jobs_do_not_write_one_run(make):
    store = make()
    store.begin(0)
    script = (
        "import sys; from pathlib import Path; from mm_core.checkpoint.store import CheckpointStore\n"
        "CheckpointStore(Path(sys.argv[1]), 1).begin(0)"
    )
    command = ["-c", script, store.folder.parent]
    done = warm.run(command)
    assert "this run is being trained by process" in done.stderr and done.returncode
    store.close()
    assert warm.run(command).returncode == 0


def test_a_data_worker_that_outlives_its_run_does_not_keep_the_folder_locked(tmp_path):
    """A forked worker inherits the lock's descriptor, and is not always gone when the run is killed."""
    script = (
        "import multiprocessing, os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from mm_core.checkpoint.run_lock import RunLock\n"
        "def work():\n"
        "    print(os.getpid(), flush=True)\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "    time.sleep(60)\n"
        "RunLock(Path(sys.argv[1])).take()\n"
        "multiprocessing.get_context('fork').Process(target=work, daemon=True).start()\n"
        "time.sleep(60)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, text=True)
    worker = int(run.stdout.readline())
    try:
        assert run.wait(30) == -signal.SIGKILL
        os.kill(worker, 0)  # it lives
        lock = RunLock(tmp_path)
        lock.take()
        lock.release()
    finally:
        os.kill(worker, signal.SIGKILL)
        run.stdout.close()


def test_a_data_worker_keeps_its_own_files_when_it_forks(tmp_path):
    """One of them may have the number that the lock's descriptor had."""
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from mm_core.checkpoint.run_lock import RunLock\n"
        "RunLock(Path(sys.argv[1])).take()\n"
        "if os.fork() == 0:\n"
        "    file = open(sys.argv[2])\n"
        "    if os.fork() == 0:\n"
        "        print(file.read(), flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    (tmp_path / "clip.txt").write_text("read")
    command = [sys.executable, "-c", script, tmp_path, tmp_path / "clip.txt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.stdout == "read\n", done.stderr


def test_what_another_live_process_is_writing_is_left_alone(make, state):
    store = make()
    store.save(1, state, {}, CONFIG)
    store.wait()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        import socket

        live = store.folder / f"step_00000009.tmp-0123abcd-{other.pid}@{socket.gethostname()}"
        live.mkdir()
        store.begin(1)
        assert live.is_dir()
    finally:
        other.kill()
        other.wait()
    time.sleep(0.01)
    store.begin(1)
    assert not live.exists()


def test_a_thousand_checkpoints_are_looked_through_in_no_time(make, state):
    """`keep_every: 1` keeps all of them; each save judges them all."""
    store = make(keep=1, keep_every=1, best="loss")
    store.folder.mkdir(parents=True)
    for step in range(1, 1001):
        folder = store.folder / f"step_{step:08d}"
        folder.mkdir()
        (folder / "checksums.json").write_text("{}")
        (folder / "facts.json").write_text(json.dumps({"metrics": {"loss": abs(step - 700)}}))
    began = time.perf_counter()
    store.save(1001, state, {"metrics": {"loss": 900}}, CONFIG)
    store.wait()
    assert time.perf_counter() - began < 2
    assert (store.folder / "BEST").read_text() == "step_00000700\n"
    assert len(steps(store)) == 1001
