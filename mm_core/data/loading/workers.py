"""Data workers: how these processes start and end, which signals they ignore, the errors when one dies.

They are forked by a server process without model or threads (multiprocessing's "forkserver"). A fork of the
training process itself, whose threads communicate with other ranks and write checkpoints, may deadlock on a
lock held by one of them.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from mm_core.data.media.limits import DecodeLimit, DecoderHungError
from mm_core.errors import DataError
from mm_core.runtime import leftovers as aftermath

T = TypeVar("T")

_SIGNALS = {signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM}  # requests to save or stop a run
_SERVER_LOST = 255
"""Exit status that multiprocessing sets for a worker whose server was lost."""
_MEMORY = (
    "the machine may be out of memory or of shared memory (/dev/shm): lower data.loader.workers or"
    " data.loader.prefetch, or set data.loader.workers=0 to read in the training process"
)


def start_server(modules: Sequence[str]) -> BaseContext:
    """The multiprocessing context that data workers start in.

    The first call starts the fork server, without waiting for it. The server imports modules once for all
    workers.

    Args:
        modules: names of the modules to import.
    """
    context = multiprocessing.get_context("forkserver")
    modules = [aftermath.__name__, *modules]
    if "transformers" in sys.modules:  # tokenizers are opened in the workers
        modules.append("transformers.models.auto.tokenization_auto")
    context.set_forkserver_preload(modules)
    aftermath.use_short_folder()
    with _quiet_tracker():
        resource_tracker.ensure_running()  # its start unblocks signals, so it goes first
    _end_at_exit()
    with starting():
        forkserver.ensure_running()
    return context


@contextmanager
def starting() -> Iterator[None]:
    """A context in which data workers are started with signals blocked.

    The server keeps them blocked, a worker unblocks them when it is ready (StartWorker), so no signal to the
    process group reaches an unprepared worker.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        with aftermath.pass_to_server():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


@contextmanager
def _quiet_tracker() -> Iterator[None]:
    """A context in which multiprocessing's tracker starts without its warning about leaked semaphores of a
    killed process: the warning comes long after the error message, and explains nothing. It starts with the
    signals blocked that it does not ignore itself: Slurm sends a warning to each process of a task."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [before, "ignore:resource_tracker:UserWarning"]))
    held = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS - {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        del os.environ["PYTHONWARNINGS"]
        if before is not None:
            os.environ["PYTHONWARNINGS"] = before


@cache
def _end_at_exit() -> None:
    """Kills workers before multiprocessing's own exit handler, which sends SIGTERM and waits for them."""
    process = os.getpid()
    atexit.register(lambda: aftermath.kill_workers() if os.getpid() == process else None)


@contextmanager
def script_for(sent: object) -> Iterator[None]:
    """A context in which data workers import the user's training script only if they need it.

    By default multiprocessing imports the script in every worker, which would start training once more
    without `if __name__ == "__main__":`.

    Args:
        sent: the objects that are sent to the workers; they need the script if they refer to it.
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
    except Exception:  # the error is reported when the object is sent
        return True
    return b"__main__" in found.getvalue()


class _WithoutTensors(pickle.Pickler):
    def persistent_id(self, obj: object) -> str | None:
        return "tensor" if isinstance(obj, torch.Tensor) else None


class StartWorker:
    """The first function of every data worker.

    The worker uses one thread, ignores signals to the process group (the run still reads data until it has
    saved), and ends with the training process and with the server, however these end.

    Args:
        limit: how long it may decode one file; None: for ever.
    """

    def __init__(self, limit: DecodeLimit | None = None) -> None:
        self.folder, self.limit = Path(aftermath.folders()[0]), limit
        self.server: int | None = None

    def __getstate__(self) -> dict[str, object]:
        """State for a worker: with the process id of the server that forks it."""
        server: Any = forkserver._forkserver
        return {**self.__dict__, "server": server._forkserver_pid}

    def __call__(self, worker: int) -> None:
        if os.getppid() != self.server:
            os._exit(1)  # the server was killed while this worker started
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        torch.set_num_threads(1)
        sys.excepthook = _report
        _let_server_end()
        aftermath.note_worker(self.folder)
        if self.limit is not None:
            self.limit.hold(self.folder)
        threading.Thread(target=self._end_with_others, name="mm_core parent watch", daemon=True).start()

    def hung_in(self, ended: Sequence[BaseProcess]) -> DecoderHungError | None:
        """The error for workers that the limit has ended, if these have."""
        if self.limit is None:
            return None
        ids = [worker.pid for worker in ended if worker.exitcode == -signal.SIGALRM]
        names = [name for pid in ids if pid and (name := self.limit.take(self.folder, pid))]
        return DecoderHungError(names[0], self.limit.seconds) if names else None

    def _end_with_others(self) -> None:
        """Ends the worker once the training process or the server has ended.

        torch's workers watch only their parent, the server, and every 5 seconds: until then the training
        process, to which a worker without server has ended, makes torch's loop in it fail with a traceback.
        """
        server, parent = self.server, multiprocessing.parent_process()
        assert parent is not None and server is not None
        watched = [parent.sentinel]  # a pipe whose other end only the training process holds
        with suppress(AttributeError, OSError):  # where the system has no such descriptors
            watched.append(os.pidfd_open(server))
        ended = connection.wait(watched)
        if parent.sentinel in ended and os.getppid() != server:  # else the server cleans up after its workers
            shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(1)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An excepthook that hides one useless traceback: that of multiprocessing's thread which sends batches,
    when the training process is killed while it receives one."""
    aside = threading.current_thread() is not threading.main_thread()
    if not (aside and isinstance(error, EOFError | ConnectionError)):
        sys.__excepthook__(kind, error, trace)


def _let_server_end() -> None:
    """Closes the worker's copy of a descriptor: the server ends when all copies are closed, and workers end
    with the server, so neither would end after the training process was killed."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def read_on(reading: Iterator[T], start: Callable[[int], Iterator[T]]) -> Iterator[T]:
    """What workers send; when a decoder hangs, new ones (`start`, given how many came) read on without it."""
    count = 0
    while True:
        try:
            for item in reading:
                count += 1
                yield item
            return
        except DecoderHungError:
            reading = start(count)


def read_by_workers(loader: DataLoader[T], sent: object) -> Iterator[T]:
    """Starts the data workers of a loader, and yields what they send. They end with the iterator.

    Args:
        loader: its workers start by `StartWorker`.
        sent: the objects that are sent to them, see `script_for`.

    Raises (while iterating):
        DecoderHungError: `StartWorker` has a limit, and a file took longer. Workers that are started anew
            refuse it.
        DataError: a worker ended otherwise.
    """
    if not loader.num_workers:
        return _drained(iter(loader))
    with starting(), script_for(sent), starts_explained():
        return _drained(iter(loader), loader.worker_init_fn)


def _drained(reading: Iterator[T], start: object = None) -> Iterator[T]:
    try:
        with deaths_explained(reading, start):
            yield from reading
    finally:
        del reading  # a traceback may keep this frame alive, and with it the workers


@contextmanager
def deaths_explained(reading: object, start: object = None) -> Iterator[None]:
    """A context that turns errors from the death of a data worker into a DataError with the reason.

    Args:
        reading: torch's iterator, which holds the worker processes.
        start: the `StartWorker` of the processes, if it has a limit.
    """
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        if isinstance(error, RuntimeError):
            if "DataLoader worker" in str(error):
                raise _death(reading, start) from error
            if "Pin memory thread exited" not in str(error):
                raise
        # Workers send batches as file descriptors: a death in between breaks the connection before the exit
        # status is available. With pinned memory, torch's pinning thread ends by this error.
        end = time.monotonic() + 2.0
        while not _ended(reading) and time.monotonic() < end:
            time.sleep(0.01)
        if _ended(reading):
            raise _death(reading, start) from error
        raise DataError(
            f"a batch could not be received from its data worker: {type(error).__name__}: {error}",
            hint="raise the limit of open files (ulimit -n), or lower data.loader.workers",
        ) from error


@contextmanager
def starts_explained() -> Iterator[None]:
    """A context that turns errors from the start of data workers into a DataError with the reason."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise DataError(
            f"the data workers could not be started: {type(error).__name__}: {error}",
            hint=f"a worker or its server was killed: {_MEMORY}; if a limit of open files or processes is"
            " reached, raise it (ulimit -n, ulimit -u)",
        ) from error


def _ended(reading: object) -> list[BaseProcess]:
    return [worker for worker in getattr(reading, "_workers", ()) if worker.exitcode is not None]


def _death(reading: object, start: object) -> DataError:
    ended = _ended(reading)
    where = ", ".join(f"process {worker.pid}, exit status {worker.exitcode}" for worker in ended) or None
    _abandon(reading)
    if isinstance(start, StartWorker) and (hung := start.hung_in(ended)):
        return hung
    if ended and all(worker.exitcode == _SERVER_LOST for worker in ended):
        return _killed("the process that starts the data workers was killed, and they ended", None)
    if any((worker.exitcode or 0) > 0 for worker in ended):
        return DataError(
            "a data worker ended unexpectedly",
            where=where,
            hint="read its output above for the reason. If the dataset is defined in the training script, "
            'put the script\'s own work under `if __name__ == "__main__":`, since workers import it; or set '
            "data.loader.workers=0 to read in the training process",
        )
    return _killed("a data worker was killed", where)


def _killed(what: str, where: str | None) -> DataError:
    fault = DataError(what, where=where, hint=_MEMORY)
    fault.passing = True
    return fault


def _abandon(reading: Any) -> None:
    """Kills the other workers. torch would end them by an event, whose lock the dead worker may hold."""
    for worker in getattr(reading, "_workers", ()):
        if worker.exitcode is not None:
            continue  # its pid may belong to another process by now
        with suppress(OSError):
            os.kill(worker.pid, signal.SIGKILL)
    if reading is not None:
        reading._shutdown = True
        if getattr(reading, "_worker_pids_set", False):  # another iterator may get this one's address
            signal_handling._remove_worker_pids(id(reading))  # type: ignore[attr-defined]
            reading._worker_pids_set = False
        if hasattr(reading, "_pin_memory_thread_done_event"):
            reading._pin_memory_thread_done_event.set()
