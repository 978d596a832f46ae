"""What is left of a training process: it ends its data workers itself or, where it is killed, they follow.

multiprocessing keeps its sockets in a folder below TMPDIR, and a launcher has a folder in which its ranks
meet. A process that ends in good order removes them; what a killed one leaves, those that it started remove.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util
from pathlib import Path

from mm_core.files import replace_text
from mm_core.processes import alive, started

PATIENCE = 10.0
"""Seconds for which a folder's other processes may still live before it is left to them."""
SERVER_ENDS = 2.0
"""Seconds for which a killed server is waited for: one that the kernel holds, for a disk, ends later."""

_FOLDERS = "MM_AFTERMATH"  # names the folders to the server of data workers, which imports this module
_also: list[str] = []
_emptied: list[str] = []  # a folder that multiprocessing has made and nobody uses
_LONGEST = 107  # bytes of a socket's address


def end_workers(*, orderly: bool = False) -> None:
    """Kills the data workers and their server, and removes their sockets: this process leaves at once,
    without the end of its interpreter.

    orderly: nothing hangs and nobody waits, so everything else that multiprocessing has to undo is undone, as
    that end would. Else its tracker, which is told of every semaphore, sees to it.
    """
    kill_workers()
    if orderly:
        with suppress(Exception):
            util._run_finalizers(0)  # type: ignore[attr-defined]
    for folder in (_sockets(), *_emptied):
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def kill_workers() -> None:
    """Kills the processes that multiprocessing has started here, and their server."""
    for child in multiprocessing.active_children():
        child.kill()
    module = sys.modules.get("multiprocessing.forkserver")
    server = getattr(module, "_forkserver", None)
    pid = getattr(server, "_forkserver_pid", None)
    if server is not None and pid is not None:
        server._forkserver_pid = None
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            until = time.monotonic() + SERVER_ENDS
            while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < until:
                time.sleep(0.005)
        if (folder := _sockets()) is not None:
            _free_memory(Path(folder))


def _sockets() -> str | None:
    """Where multiprocessing keeps its sockets; None where it has not needed any."""
    found: str | None = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    return found


def use_short_folder() -> None:
    """Keeps sockets below /tmp where TMPDIR is longer than the address of a socket may be."""
    folder = util.get_temp_dir()
    if len(os.fsencode(folder)) + len("/listener-12345678") <= _LONGEST:
        return
    with suppress(OSError):  # else the server's start tells what is wrong
        short = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
        multiprocessing.current_process()._config["tempdir"] = short  # type: ignore[attr-defined]
        util.Finalize(None, shutil.rmtree, args=(short, True), exitpriority=-100)
        _emptied.append(folder)


def clear_after(folder: Path) -> None:
    """Has `folder` removed by data workers or their server, should all its processes be killed: those that
    its files `*.pid` name (see `note_process`)."""
    if str(folder) not in _also:
        _also.append(str(folder))


def folders() -> list[str]:
    """What is to be removed when this process is gone."""
    return [util.get_temp_dir(), *_emptied, *_also]


@contextmanager
def told() -> Iterator[None]:
    """A server of data workers that starts in the block clears up when this process is gone."""
    os.environ[_FOLDERS] = json.dumps(folders())
    try:
        yield
    finally:
        os.environ.pop(_FOLDERS, None)


def clear(paths: Iterable[str | Path]) -> None:
    """Removes folders, each once no process that it names lives; one whose processes go on is theirs."""
    until = time.monotonic() + PATIENCE
    for path in map(Path, paths):
        while path.is_dir():
            if not any(lives(note) for note in path.glob("*.pid")):
                _free_memory(path)
                shutil.rmtree(path, ignore_errors=True)
            elif time.monotonic() > until:
                break
            time.sleep(0.05)


def note_worker(folder: Path) -> None:
    """Notes this process as a data worker, for as long as it does not end in good order."""
    note = folder / f"worker_{os.getpid()}.pid"
    with suppress(OSError):  # the training process may be gone, and its folder with it
        note_process(note, os.getpid())
    util.Finalize(None, note.unlink, kwargs={"missing_ok": True}, exitpriority=0)


def _free_memory(folder: Path) -> None:
    """Removes the shared memory of data workers that were killed while they made it: torch removes its name
    a moment after it has appeared."""
    until = time.monotonic() + 2.0
    for note in folder.glob("worker_*.pid"):
        while lives(note) and time.monotonic() < until:
            time.sleep(0.005)
        pid = int(note.stem.removeprefix("worker_"))
        if alive(pid):
            continue
        for segment in Path("/dev/shm").glob(f"torch_{pid}_*"):
            with suppress(OSError):
                if segment.stat().st_uid == os.getuid():
                    segment.unlink()


def note_process(path: Path, pid: int) -> None:
    """Writes who a process is."""
    replace_text(path, f"{pid} {started(pid)}")


def lives(note: Path) -> bool:
    """Whether the process that was noted still runs; False where the note is gone."""
    try:
        pid, _, when = note.read_text().partition(" ")
        return alive(int(pid)) and when in ("", started(int(pid)))
    except (OSError, ValueError):
        return False


def _clear_at_exit(paths: list[str], server: int) -> None:
    if os.getpid() == server:
        clear(paths)


if _FOLDERS in os.environ:  # this process is a server of data workers
    atexit.register(_clear_at_exit, json.loads(os.environ.pop(_FOLDERS)), os.getpid())
