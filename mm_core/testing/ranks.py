"""Runs a function on several gloo ranks, each in a process of its own, for checks that shard a model.

The imports of a rank take longer than most checks. So for each number of a rank a process imports once what
the kit's own process has imported of the libraries, and forks that rank in each call (this file run
as a module). Each such origin has hashes of strings of its own, as ranks have in a run.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from mm_core.errors import ContractError, MMError, plural
from mm_core.plugin.registry import get_registry
from mm_core.runtime.groups import meet_at_file, wait_for_ranks
from mm_core.runtime.launch.rank_process import leave, lost_peer
from mm_core.schema.fields import ComponentConfig
from mm_core.testing.kit import NotApplicable, Probe, sentence_of

A = TypeVar("A")
_PATIENCE = 180.0  # seconds for the imports and the work of all ranks
_WORK, _REQUEST, _MEETING = "work.pickle", "request.json", "meeting"
_LIBRARIES = ("mm_core", "diffusers", "transformers", "peft")
"""What origins import of the modules that this process has: never what an author may have changed since."""
_origins: dict[tuple[int, int], _Origin] = {}
"""By the process that started them, and rank."""
_one_call = threading.Lock()


class ComponentBuild:
    """Builds the small instance of a component, in this process or in another; called with what the core
    passes by position.

    Args:
        probe: the component.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def __call__(self, *args: object) -> Any:
        return self._probe.build(*args)

    def __reduce__(self) -> tuple[object, ...]:
        files = tuple(plugin.file for plugin in self._probe.registry.plugins if plugin.file is not None)
        return _rebuild, (files, self._probe.config)


def _rebuild(files: tuple[str, ...], config: ComponentConfig) -> Callable[..., Any]:
    """Builds a component from its config, with the plugins of another process."""
    return partial(get_registry(files).build, config.kind, config)


def on_ranks(world: int, work: Callable[[A], Any], argument: A, timeout: float = _PATIENCE) -> list[Any]:
    """Calls a function on each of several ranks, which have a process group on the CPU.

    Args:
        world: number of ranks.
        work: a function of a module; what it returns is loaded by `torch.load`, without other objects than
            tensors, numbers, strings and containers.
        argument: picklable, the same for each rank.
        timeout: seconds after which the ranks are ended.

    Returns:
        What each rank returned, by rank.

    Raises:
        NotApplicable: the argument cannot be sent to another process.
        ContractError: a rank failed, with the message of the first that did; or they took too long.
    """
    with _one_call, tempfile.TemporaryDirectory(prefix="mm-ranks-") as name:
        folder = Path(name)
        try:
            (folder / _WORK).write_bytes(pickle.dumps((work, argument)))
        except (pickle.PicklingError, AttributeError, TypeError) as fault:
            raise NotApplicable(
                f"the component cannot be built in another process ({fault}): name a component, or give a"
                " function of a module"
            ) from None
        ranks: list[_Rank] = []
        request = {
            "world": world,
            "timeout": timeout,
            "environment": _environment(),
            "path": sys.path,
            "folder": _working_folder(),
            "modules": [name for name in sys.modules if name.partition(".")[0] in _LIBRARIES],
        }
        (folder / _REQUEST).write_text(json.dumps(request))
        try:
            for rank in range(world):
                ranks.append(_Rank(_origin(rank, folder), folder))
            _wait(ranks, folder, timeout)
        finally:
            for process in ranks:  # one that waits for a rank that failed would wait for ever
                process.end()
        return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def ranks_of(
    probe: Any, what: str, world: int, work: Callable[[A], Any], argument: A, hint: str | None = None
) -> list[Any]:
    """Calls a function on each of several ranks for a check (see `on_ranks`).

    Args:
        probe: the component's; an error has its place.
        what: what fails, for the error.
        world: number of ranks.
        work: a function of a module.
        argument: picklable.
        hint: of an error that has none.
    """
    try:
        return on_ranks(world, work, argument)
    except MMError as fault:
        what = f"on {plural(world, 'rank')}{what} fails: {fault.what}"
        raise ContractError(
            what, where=probe.place, accepted=fault.accepted, hint=fault.hint or hint
        ) from fault


def _environment() -> dict[str, str]:
    """This process's environment for ranks on the CPU, which import from the same folders."""
    path = os.pathsep.join(folder for folder in sys.path if folder)
    # Libraries ask for a GPU when they are imported, and CUDA does not bear a fork after that.
    own = {"MM_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, "PYTHONPATH": path}


def _working_folder() -> str | None:
    try:
        return str(Path.cwd())
    except FileNotFoundError:  # it was removed
        return None


class _Origin:
    """This process's end of a process that forks a rank for each folder that it is given."""

    def __init__(self, rank: int, folder: Path) -> None:
        own = {"PYTHONHASHSEED": str(rank + 1), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        line, theirs = socket.socketpair()
        with theirs, _log(folder, rank).open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(rank)],
                env={**_environment(), **own},
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                start_new_session=True,  # at Ctrl-C, this process ends the ranks
            )
        self._line, self._started_by = line.makefile("rwb", buffering=0), os.getpid()
        line.close()
        atexit.register(self._end_at_exit)

    def _end_at_exit(self) -> None:
        if os.getpid() == self._started_by:  # not in a process that this one forked
            self._line.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
            self._process.kill()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, words: str) -> None:
        with suppress(OSError):  # it has ended, as `answer` finds
            self._line.write(f"{words}\n".encode())

    def end(self) -> None:
        self._process.kill()

    def answer(self, patience: float | None) -> int | None:
        """The exit code of the rank, or of the origin; None if `patience` seconds pass."""
        if not select.select([self._line], [], [], patience)[0]:
            return None
        with suppress(OSError):
            if line := self._line.readline():
                return int(line)
        return self._process.wait() or 1


def _origin(rank: int, folder: Path) -> _Origin:
    key = (os.getpid(), rank)
    if key not in _origins or not _origins[key].alive:
        _origins[key] = _Origin(rank, folder)
    return _origins[key]


def _log(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.log"


class _Rank:
    """A rank under way."""

    def __init__(self, origin: _Origin, folder: Path) -> None:
        self._origin = origin
        self._code: int | None = None
        origin.send(str(folder))

    def poll(self) -> int | None:
        """Its exit code; None while it works."""
        if self._code is None:
            self._code = self._origin.answer(0.0)
        return self._code

    def end(self) -> None:
        """Ends it at once."""
        if self.poll() is None:
            self._origin.send("")
            self._code = self._origin.answer(10.0)
        if self._code is None:  # it is still at its imports
            self._origin.end()
            self._code = self._origin.answer(None)


def _wait(ranks: Sequence[_Rank], folder: Path, timeout: float) -> None:
    """Waits until all ranks have ended; ContractError if one fails or the time is over."""
    end = time.monotonic() + timeout
    while (codes := [process.poll() for process in ranks]).count(0) < len(ranks):
        failed = [rank for rank, code in enumerate(codes) if code and code != -signal.SIGALRM]
        # A rank that lost another one comes after it, or a moment before it.
        causes = [rank for rank in failed if not (folder / f"{rank}.lost").exists()]
        if causes or len(failed) == len(ranks):
            raise _failure(folder, (causes or failed)[0], len(ranks), codes)
        if time.monotonic() > end or -signal.SIGALRM in codes:  # its own clock may be the first to see it
            waiting = next(rank for rank, code in enumerate(codes) if code in (None, -signal.SIGALRM))
            raise ContractError(
                f"{plural(len(ranks), 'rank')} were stopped after {timeout:.0f} s; rank {waiting} still ran",
                hint="all ranks must run the same modules in the same order",
            )
        time.sleep(0.02)


def _failure(folder: Path, rank: int, world: int, codes: Sequence[int | None]) -> MMError:
    error = folder / f"{rank}.error"
    if error.exists():
        found: MMError = pickle.loads(error.read_bytes())
        return found
    lines = _log(folder, rank).read_text(errors="replace").strip().splitlines()
    last = f": {lines[-1]}" if lines else ""
    return ContractError(f"rank {rank} of {world} ended with exit code {codes[rank]}{last}")


def _fork_ranks(rank: int) -> None:
    """An origin: forks a rank for each folder, a line of its standard input, and answers with its exit code.

    A line while the rank works ends it, and so does the end of the input, which ends the origin as well.
    """
    with open(0, "r+b", buffering=0, closefd=False) as caller:
        while line := caller.readline():
            if not line.strip():  # it was to end a rank that had ended by itself
                continue
            folder = Path(os.fsdecode(line).rstrip("\n"))
            log = os.open(_log(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            request = json.loads((folder / _REQUEST).read_text())
            for name in request["modules"]:
                with suppress(Exception, SystemExit):
                    import_module(name)
            child = os.fork()
            if child == 0:
                _become(rank, folder, request)
            while not (ended := os.waitpid(child, os.WNOHANG))[0]:
                if select.select([caller], [], [], 0.02)[0]:
                    os.kill(child, signal.SIGKILL)
                    ended = os.waitpid(child, 0)
                    if not caller.readline():
                        return
                    break
            caller.write(b"%d\n" % os.waitstatus_to_exitcode(ended[1]))


def _become(rank: int, folder: Path, request: dict[str, Any]) -> NoReturn:
    """The rank: calls the function, and leaves its result or its error in the folder."""
    world, timeout = int(request["world"]), float(request["timeout"])
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)  # the caller's line is the origin's alone
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    own["PYTHONHASHSEED"] = os.environ["PYTHONHASHSEED"]
    os.environ.clear()
    os.environ.update({**request["environment"], **own})
    sys.path[:] = request["path"]
    if request["folder"] is not None:
        os.chdir(request["folder"])
    invalidate_caches()
    torch.set_num_threads(1)
    torch.default_generator.seed()  # else each fork draws the same
    np.random.seed()
    signal.alarm(math.ceil(timeout))
    try:
        meet_at_file(folder / _MEETING, rank, world, timeout)
        work, argument = pickle.loads((folder / _WORK).read_bytes())
        torch.save(work(argument), folder / f"{rank}.pt")
        wait_for_ranks()
    except Exception as fault:
        if lost_peer(fault) is not None:
            (folder / f"{rank}.lost").touch()
        own_error = fault if isinstance(fault, MMError) else ContractError(sentence_of(fault))
        (folder / f"{rank}.error").write_bytes(pickle.dumps(own_error))
        leave(1)
    except BaseException:  # it must not go on as an origin
        traceback.print_exc()
        leave(1)
    leave(0)


if __name__ == "__main__":
    _fork_ranks(int(sys.argv[1]))
