"""Cleanup after a training process: it ends its data workers itself; if it is killed, they clean up.

multiprocessing keeps its sockets in a folder below TMPDIR, and a launcher has a folder shared by its ranks. A
process that ends normally removes them; if it is killed, the processes that it started remove them.
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
"""Seconds to wait for a folder's other processes to end before they are left to remove it."""
SERVER_ENDS = 2.0
"""Seconds to wait for a killed server to end: one that waits for a disk in the kernel ends later."""

_FOLDERS = "MM_AFTERMATH"  # passes the folders to the server of data workers, which imports this module
_also: list[str] = []
_emptied: list[str] = []  # an unused folder created by multiprocessing
_LONGEST = 107  # bytes of a socket's address


def end_workers(*, orderly: bool = False) -> None:
    """Kills this rank's data workers and their server and removes their sockets, before the process exits.

    The process is about to exit without finalizing its interpreter (`os._exit`).

    Args:
        orderly: nothing hangs, so the other finalizers of multiprocessing run as well. Otherwise its resource
            tracker, which knows every semaphore, cleans up.
    """
    kill_workers()
    if orderly:
        with suppress(Exception):
            util._run_finalizers(0)  # type: ignore[attr-defined]
    for folder in (_sockets(), *_emptied):
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def kill_workers() -> None:
    """Kills the data workers that multiprocessing has started in this process, and their server."""
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
    """The folder of multiprocessing's sockets; None if it has created none."""
    found: str | None = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    return found


def use_short_folder() -> None:
    """Puts the sockets of data workers below /tmp if TMPDIR is too long for a socket's address."""
    folder = util.get_temp_dir()
    if len(os.fsencode(folder)) + len("/listener-12345678") <= _LONGEST:
        return
    with suppress(OSError):  # if it fails, the start of the server reports why
        short = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
        multiprocessing.current_process()._config["tempdir"] = short  # type: ignore[attr-defined]
        util.Finalize(None, shutil.rmtree, args=(short, True), exitpriority=-100)
        _emptied.append(folder)


def clear_after(folder: Path) -> None:
    """Registers a folder that data workers or their server remove if all processes named in it are killed.

    Args:
        folder: contains a file `*.pid` for each process (see `note_process`).
    """
    if str(folder) not in _also:
        _also.append(str(folder))


def folders() -> list[str]:
    """The temporary folders to remove after this process has ended."""
    return [util.get_temp_dir(), *_emptied, *_also]


@contextmanager
def pass_to_server() -> Iterator[None]:
    """Passes this process's temporary folders to a server of data workers started in the block.

    The server removes them after this process has ended.
    """
    os.environ[_FOLDERS] = json.dumps(folders())
    try:
        yield
    finally:
        os.environ.pop(_FOLDERS, None)


def clear(paths: Iterable[str | Path]) -> None:
    """Removes temporary folders of killed processes, each once all processes named in it have ended.

    A folder whose processes are still running after `PATIENCE` seconds is left to them.
    """
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
    """Records this process as a data worker in a folder, until it ends normally."""
    note = folder / f"worker_{os.getpid()}.pid"
    with suppress(OSError):  # the training process may be gone, and its folder with it
        note_process(note, os.getpid())
    util.Finalize(None, note.unlink, kwargs={"missing_ok": True}, exitpriority=0)


def _free_memory(folder: Path) -> None:
    """Removes shared memory of data workers that were killed while creating it: torch unlinks its name only
    a moment later."""
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
    """Writes the id and start time of a process to a file, to identify it later."""
    replace_text(path, f"{pid} {started(pid)}")


def lives(note: Path) -> bool:
    """Whether the process recorded in a file by `note_process` still runs; False if the file is gone."""
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
