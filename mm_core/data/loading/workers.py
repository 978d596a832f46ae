"""The processes that read data: how they begin and end, what they ignore, and what is said when one dies.

They are forked by a server process that holds neither the model nor a thread (multiprocessing's
"forkserver"). A fork of the training process itself, whose threads talk to other ranks and write
checkpoints, can stop for ever on a lock that one of them held.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from mm_core.errors import DataError
from mm_core.runtime import leftovers as aftermath

_SIGNALS = {signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM}  # what asks a run to save
_SERVER_LOST = 255
"""Exit status that multiprocessing gives a worker of whose end no server can tell."""


def start_server(modules: Sequence[str]) -> BaseContext:
    """The context that workers start in. The first call starts the server, without waiting for it;
    the server imports `modules` once, so that no worker has to."""
    context = multiprocessing.get_context("forkserver")
    modules = [aftermath.__name__, *modules]
    if "transformers" in sys.modules:  # tokenizers are opened in the workers
        modules.append("transformers.models.auto.tokenization_auto")
    context.set_forkserver_preload(modules)
    aftermath.use_short_folder()
    with _quiet_tracker():
        resource_tracker.ensure_running()  # its start lifts the mask, so it goes first
    _end_at_exit()
    with starting():
        forkserver.ensure_running()
    return context


@contextmanager
def starting() -> Iterator[None]:
    """Processes that begin here inherit the mask. The server keeps it, workers lift it when they are
    ready (StartWorker), so no signal to the process group finds them unprepared."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        with aftermath.told():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


@contextmanager
def _quiet_tracker() -> Iterator[None]:
    """multiprocessing's tracker, started here, removes the semaphores of a process that was killed without a
    warning about the leak: that comes long after the sentence on what happened, and explains nothing."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [before, "ignore:resource_tracker:UserWarning"]))
    try:
        yield
    finally:
        del os.environ["PYTHONWARNINGS"]
        if before is not None:
            os.environ["PYTHONWARNINGS"] = before


@cache
def _end_at_exit() -> None:
    """Before multiprocessing's own end, which asks workers by SIGTERM and waits until they have followed."""
    process = os.getpid()
    atexit.register(lambda: aftermath.kill_workers() if os.getpid() == process else None)


@contextmanager
def script_for(sent: object) -> Iterator[None]:
    """Workers that begin here import the script that trains if something of it is in what they are sent.

    multiprocessing has them import it in any case, by its file's name, and it would train there once
    more but for `if __name__ == "__main__":`.
    """
    script = vars(sys.modules["__main__"])
    if _names_script(sent):
        yield
        return
    kept: dict[str, object] = {name: script.pop(name) for name in ("__file__", "__spec__") if name in script}
    script["__spec__"] = None
    try:
        yield
    finally:
        del script["__spec__"]
        script.update(kept)


def _names_script(sent: object) -> bool:
    pickler = _WithoutTensors(found := io.BytesIO())
    try:
        pickler.dump(sent)
    except Exception:  # what is wrong with it is said when it is sent
        return True
    return b"__main__" in found.getvalue()


class _WithoutTensors(pickle.Pickler):
    def persistent_id(self, obj: object) -> str | None:
        return "tensor" if isinstance(obj, torch.Tensor) else None


class StartWorker:
    """Runs first in every worker: one thread, no end by a signal to the process group, which must not take
    the readers away before the run has saved, and an end with the training process, however that ends."""

    def __init__(self) -> None:
        self.folder = Path(aftermath.folders()[0])

    def __call__(self, worker: int) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        torch.set_num_threads(1)
        sys.excepthook = _report
        _let_server_end()
        aftermath.note_worker(self.folder)
        threading.Thread(target=self._end_with_parent, name="mm_core parent watch", daemon=True).start()

    def _end_with_parent(self) -> None:
        """torch's workers look for the end of their parent, which is the server."""
        server, parent = os.getppid(), multiprocessing.parent_process()
        assert parent is not None
        connection.wait([parent.sentinel])  # a pipe whose other end nobody but the training process holds
        if os.getppid() != server:  # else it clears up once its workers are gone
            shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(1)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A training process that is killed while it takes a batch breaks the connection to multiprocessing's
    thread that hands batches over, which prints a traceback by this function. It explains nothing."""
    aside = threading.current_thread() is not threading.main_thread()
    if not (aside and isinstance(error, EOFError | ConnectionError)):
        sys.__excepthook__(kind, error, trace)


def _let_server_end() -> None:
    """The server ends when nobody holds this descriptor any more. Workers, which end with the server, are
    given it too: neither would end after a training process that was killed."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


@contextmanager
def deaths_explained(reading: object) -> Iterator[None]:
    """Turns what torch and the operating system tell of a lost worker into a DataError.

    reading: torch's iterator, which knows its processes.
    """
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        if isinstance(error, RuntimeError):
            if "DataLoader worker" in str(error):
                raise _death(reading) from error
            if "Pin memory thread exited" not in str(error):
                raise
        # Batches pass as file descriptors that the worker hands over: one that died in between breaks the
        # connection before its end is known. Where torch pins memory, the thread that does so ends by it.
        end = time.monotonic() + 2.0
        while not _ended(reading) and time.monotonic() < end:
            time.sleep(0.01)
        if _ended(reading):
            raise _death(reading) from error
        raise DataError(
            f"a batch could not be taken from its data worker: {type(error).__name__}: {error}",
            hint="raise the limit of open files (ulimit -n), or lower data.loader.workers",
        ) from error


@contextmanager
def starts_explained() -> Iterator[None]:
    """A worker or its server that ends while workers are started breaks a pipe or a socket."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise DataError(
            f"the data workers could not be started: {type(error).__name__}: {error}",
            hint=f"a worker or its server was killed: {_MEMORY}; if it is the limit of open files or of"
            " processes that is reached, raise it (ulimit -n, ulimit -u)",
        ) from error


def _ended(reading: object) -> list[BaseProcess]:
    return [worker for worker in getattr(reading, "_workers", ()) if worker.exitcode is not None]


def _death(reading: object) -> DataError:
    ended = _ended(reading)
    where = ", ".join(f"process {worker.pid}, exit status {worker.exitcode}" for worker in ended) or None
    _abandon(reading)
    if ended and all(worker.exitcode == _SERVER_LOST for worker in ended):
        return DataError(
            "the process that starts the data workers was killed, and they have ended with it", hint=_MEMORY
        )
    if any((worker.exitcode or 0) > 0 for worker in ended):
        return DataError(
            "a data worker ended unexpectedly",
            where=where,
            hint="what it printed says why. Where the dataset is written in the script that trains, workers "
            'import it: what it does must stand under `if __name__ == "__main__":`. data.loader.workers=0 '
            "reads in the training process",
        )
    return DataError("a data worker was killed", where=where, hint=_MEMORY)


_MEMORY = (
    "the machine may be out of memory or of shared memory (/dev/shm): lower data.loader.workers or"
    " data.loader.prefetch; data.loader.workers=0 reads in the training process"
)


def _abandon(reading: Any) -> None:
    """Ends the other workers by force. torch would tell them by an event, whose lock the killed one may have
    held."""
    for worker in getattr(reading, "_workers", ()):
        if worker.exitcode is not None:
            continue  # its number may be another process's
        with suppress(OSError):
            os.kill(worker.pid, signal.SIGKILL)
    if reading is not None:
        reading._shutdown = True
        if hasattr(reading, "_pin_memory_thread_done_event"):
            reading._pin_memory_thread_done_event.set()
