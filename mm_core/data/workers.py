"""The processes that read data: how they begin, what they ignore, and what is said when one dies.

They are forked by a server process that holds neither the model nor a thread (multiprocessing's
"forkserver"). A fork of the training process itself, whose threads talk to other ranks and write
checkpoints, can stop for ever on a lock that one of them held.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from multiprocessing.sharedctypes import RawValue
from typing import Any

import torch

from mm_core.errors import DataError

_IGNORED = (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # what asks a run to save, beside SIGTERM
_SIGNALS = {*_IGNORED, signal.SIGTERM}


def start_server(modules: Sequence[str]) -> BaseContext:
    """The context that workers start in. The first call starts the server, without waiting for it;
    the server imports `modules` once, so that no worker has to."""
    context = multiprocessing.get_context("forkserver")
    if "transformers" in sys.modules:  # tokenizers are opened in the workers
        modules = [*modules, "transformers.models.auto.tokenization_auto"]
    context.set_forkserver_preload(list(modules))
    resource_tracker.ensure_running()  # its start lifts the mask, so it goes first
    with signals_held():
        forkserver.ensure_running()
    return context


@contextmanager
def signals_held() -> Iterator[None]:
    """Processes that begin here inherit the mask. The server keeps it, workers lift it when they are
    ready (StartWorker), so no signal to the process group finds them unprepared."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


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
    kept: dict[str, Any] = {name: script.pop(name) for name in ("__file__", "__spec__") if name in script}
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
    """Runs first in every worker: one thread, and no end by a signal to the process group, which
    must not take the readers away before the run has saved. When the training process is at its
    exit, multiprocessing ends its children by SIGTERM and waits for them: then they do end."""

    def __init__(self) -> None:
        self.leaving = _leaving()

    def __call__(self, worker: int) -> None:
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._terminated)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        torch.set_num_threads(1)

    def _terminated(self, number: int, frame: Any) -> None:
        if self.leaving.value:
            os._exit(0)


@cache
def _leaving() -> Any:
    """A flag in shared memory that is raised when this process exits."""
    flag = RawValue(ctypes.c_bool, False)
    atexit.register(setattr, flag, "value", True)  # registered after multiprocessing's, so run before it
    return flag


@contextmanager
def deaths_explained(reading: Any) -> Iterator[None]:
    """Turns what torch and the operating system say of a lost worker into a DataError.

    reading: torch's iterator, which knows its processes.
    """
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise _death(reading) from error
    except (OSError, EOFError) as error:
        # Batches pass as file descriptors that the worker hands over: one that died in between breaks
        # the connection before its end is known.
        end = time.monotonic() + 2.0
        while not _ended(reading) and time.monotonic() < end:
            time.sleep(0.01)
        if _ended(reading):
            raise _death(reading) from error
        raise DataError(
            f"a batch could not be taken from its data worker: {type(error).__name__}: {error}",
            hint="raise the limit of open files (ulimit -n), or lower data.loader.workers",
        ) from error


def _ended(reading: Any) -> list[Any]:
    return [worker for worker in getattr(reading, "_workers", ()) if worker.exitcode is not None]


def _death(reading: Any) -> DataError:
    ended = _ended(reading)
    where = ", ".join(f"process {worker.pid}, exit status {worker.exitcode}" for worker in ended) or None
    if any(worker.exitcode > 0 for worker in ended):
        return DataError(
            "a data worker ended unexpectedly",
            where=where,
            hint="what it printed says why. Where the dataset is written in the script that trains, workers "
            'import it: what it does must stand under `if __name__ == "__main__":`. data.loader.workers=0 '
            "reads in the training process",
        )
    return DataError(
        "a data worker was killed",
        where=where,
        hint="the machine may be out of memory or of shared memory (/dev/shm): lower data.loader.workers "
        "or data.loader.prefetch; data.loader.workers=0 reads in the training process",
    )
