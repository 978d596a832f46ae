"""Runs a function on several gloo ranks, each in a process of its own, for checks that shard a model.

Run as a module, it is one of these ranks: `python -m mm_core.testing.ranks FOLDER`.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from mm_core.errors import ContractError, MMError, plural
from mm_core.plugin.registry import get_registry
from mm_core.runtime.groups import meet_at_file, wait_for_ranks
from mm_core.runtime.launch.rank_process import leave, lost_peer
from mm_core.schema.fields import ComponentConfig
from mm_core.testing.kit import NotApplicable, Probe, sentence_of

A = TypeVar("A")
_PATIENCE = 180.0  # seconds for the imports and the work of all ranks
_WORK, _MEETING = "work.pickle", "meeting"


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
    with tempfile.TemporaryDirectory(prefix="mm-ranks-") as name, ExitStack() as stack:
        folder = Path(name)
        try:
            (folder / _WORK).write_bytes(pickle.dumps((work, argument)))
        except (pickle.PicklingError, AttributeError, TypeError) as fault:
            raise NotApplicable(
                f"the component cannot be built in another process ({fault}): name a component, or give a"
                " function of a module"
            ) from None
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):
                out = stack.enter_context((folder / f"{rank}.log").open("wb"))
                command = [sys.executable, "-P", "-m", __name__, name, str(timeout)]
                ranks.append(subprocess.Popen(command, env=_environment(rank, world), stdout=out, stderr=out))
            _wait(ranks, folder, timeout)
        finally:
            for process in ranks:  # one that waits for a rank that failed would wait for ever
                process.kill()
                process.wait()
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


def _environment(rank: int, world: int) -> dict[str, str]:
    """This process's environment for a rank on the CPU, which imports from the same folders."""
    path = os.pathsep.join(folder for folder in sys.path if folder)
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
    own["PYTHONHASHSEED"] = rank + 1  # as in a run, a string has another hash in each process
    return {**os.environ, **{k: str(v) for k, v in own.items()}, "MM_DEVICE": "cpu", "PYTHONPATH": path}


def _wait(ranks: Sequence[subprocess.Popen[bytes]], folder: Path, timeout: float) -> None:
    """Waits until all ranks have ended; ContractError if one fails or the time is over."""
    end = time.monotonic() + timeout
    while (codes := [process.poll() for process in ranks]).count(0) < len(ranks):
        failed = [rank for rank, code in enumerate(codes) if code]
        # A rank that lost another one comes after it, or a moment before it.
        causes = [rank for rank in failed if not (folder / f"{rank}.lost").exists()]
        if causes or len(failed) == len(ranks):
            raise _failure(folder, (causes or failed)[0], len(ranks), codes)
        if time.monotonic() > end:
            waiting = codes.index(None)
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
    lines = (folder / f"{rank}.log").read_text(errors="replace").strip().splitlines()
    last = f": {lines[-1]}" if lines else ""
    return ContractError(f"rank {rank} of {world} ended with exit code {codes[rank]}{last}")


def _main(name: str, timeout: str) -> None:
    """One rank: calls the function, and leaves its result or its error in the folder."""
    folder, rank, world = Path(name), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    signal.alarm(math.ceil(float(timeout)))  # also where the process that started it was killed
    try:
        meet_at_file(folder / _MEETING, rank, world, float(timeout))
        work, argument = pickle.loads((folder / _WORK).read_bytes())
        torch.save(work(argument), folder / f"{rank}.pt")
        wait_for_ranks()
    except Exception as fault:
        if lost_peer(fault) is not None:
            (folder / f"{rank}.lost").touch()
        own = fault if isinstance(fault, MMError) else ContractError(sentence_of(fault))
        (folder / f"{rank}.error").write_bytes(pickle.dumps(own))
        leave(1)
    leave(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
