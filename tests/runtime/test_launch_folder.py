"""The folder of a launch: who lives, and who removes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mm_core.runtime.launch.launch_folder import FAILED, LaunchFolder
from mm_core.runtime.leftovers import alive, clear, lives, note_process


@pytest.fixture
def gone():
    """The id of a process that has ended, and that nobody has asked after until the test is over."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


def test_a_process_that_nobody_has_asked_after_does_not_live(gone):
    os.kill(gone, 0)  # its id is there still
    assert not alive(gone) and alive(os.getpid())


def test_another_process_of_the_same_id_is_not_the_one_that_was_noted(tmp_path):
    note = tmp_path / "rank_0.pid"
    note_process(note, os.getpid())
    assert lives(note)
    note.write_text(f"{os.getpid()} 1")
    assert not lives(note)


def test_a_launcher_whose_note_was_cleared_away_lives_and_a_killed_one_does_not(tmp_path, gone):
    folder = LaunchFolder(tmp_path, has_parent=True)
    folder.open()
    assert folder.launched
    (tmp_path / "launcher.pid").unlink()  # as systemd-tmpfiles does with what is old
    assert folder.launched
    note_process(tmp_path / "launcher.pid", gone)
    assert not folder.launched
    assert not LaunchFolder(tmp_path).launched


def enter(path: Path, *, has_parent: bool, launcher: int) -> LaunchFolder:
    path.mkdir()
    folder = LaunchFolder(path, has_parent=has_parent)
    folder.enter(0)
    note_process(path / "launcher.pid", launcher)
    return folder


def test_the_last_rank_removes_the_folder_where_no_launcher_does(tmp_path, gone):
    kept = enter(tmp_path / "kept", has_parent=True, launcher=os.getpid())
    left = enter(tmp_path / "left", has_parent=True, launcher=gone)
    torchrun = enter(tmp_path / "torchrun", has_parent=False, launcher=os.getpid())
    failed = enter(tmp_path / "failed", has_parent=False, launcher=os.getpid())
    failed.mark(FAILED)  # a rank that is still starting must find it
    for folder in (kept, left, torchrun, failed):
        folder.depart(0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failed", "kept"]


def test_each_start_of_an_agent_has_a_folder_of_its_own_in_that_of_the_agent(tmp_path, monkeypatch):
    start = tmp_path / "agent" / "attempt_0"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(start / "1" / "error.json"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MM_LAUNCH_DIR", raising=False)
    for _ in range(2):
        shutil.rmtree(start, ignore_errors=True)  # as the agent does, whose count says 0 once more
        (start / "1").mkdir(parents=True)
        folder = LaunchFolder.current()
        assert folder.path is not None and folder.path.parent == start
        folder.enter(1)
        assert not folder.failing() and folder.mark(FAILED)


def test_ranks_started_by_hand_forget_what_an_earlier_launch_of_their_shell_left(tmp_path, gone):
    folder = LaunchFolder(tmp_path)
    folder.mark(FAILED)
    note_process(tmp_path / "rank_0.pid", gone)
    note_process(tmp_path / "launcher.pid", os.getppid())
    for name in (FAILED, "rank_0.pid", "launcher.pid"):
        os.utime(tmp_path / name, (1, 1))
    folder.enter(1)
    assert not folder.failing() and folder.mark(FAILED)
    assert {path.name for path in tmp_path.iterdir()} == {FAILED, "launcher.pid", "rank_1.pid"}


def test_a_rank_finds_what_another_of_its_launch_has_left(tmp_path, gone):
    folder = LaunchFolder(tmp_path)
    folder.mark(FAILED)
    folder.enter(1)
    assert folder.failing() and not folder.mark(FAILED)


def test_what_a_killed_launch_leaves_is_cleared_unless_a_rank_goes_on(tmp_path, gone, monkeypatch):
    monkeypatch.setattr("mm_core.runtime.leftovers.PATIENCE", 0.2)
    dead, living = tmp_path / "dead", tmp_path / "living"
    for folder, rank in ((dead, gone), (living, os.getpid())):
        folder.mkdir()
        note_process(folder / "launcher.pid", gone)
        note_process(folder / "rank_1.pid", rank)
    clear([tmp_path / "never", dead, living])
    assert not dead.exists() and living.exists()
