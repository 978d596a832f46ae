"""Starts ranks through torch's elastic launcher, forwards signals to them, and tells how they ended."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from mm_core.errors import MMError
from mm_core.train.failure import LAUNCH_DIR
from mm_core.train.signals import STOPPED


@dataclass(frozen=True)
class Nodes:
    """How many processes run where.

    nproc: ranks on this host. least, most: hosts. endpoint: HOST:PORT where hosts meet; none for one
    host. run_id: the same on every host.
    """

    nproc: int
    least: int = 1
    most: int = 1
    endpoint: str | None = None
    run_id: str | None = None


class _Launch:
    """One launch: the elastic agent in a thread, signals in the main thread."""

    def __init__(self, nodes: Nodes, arguments: Sequence[str], folder: Path) -> None:
        self.nodes, self.arguments, self.folder = nodes, arguments, folder
        self.failures: Mapping[int, Any] = {}
        self.fault: BaseException | None = None
        self.interrupted = False

    def work(self) -> None:
        """Runs the agent; torch's kill of all ranks 30 s after a signal needs it in the main thread,
        so here, in another one, a long save completes."""
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        nodes = self.nodes
        config = LaunchConfig(
            min_nodes=nodes.least,
            max_nodes=nodes.most,
            nproc_per_node=nodes.nproc,
            run_id=nodes.run_id or (uuid.uuid4().hex if nodes.endpoint is None else "mm_core"),
            rdzv_endpoint=nodes.endpoint or "localhost:0",
            rdzv_backend="c10d",
            rdzv_configs={"timeout": 900},
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=str(self.folder / "torch")),
            local_addr="localhost" if nodes.endpoint is None else None,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "mm_core.cli.main", *self.arguments)
        except ChildFailedError as error:
            self.failures = error.failures
        except BaseException as error:
            self.fault = error

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Hands a signal to every rank; a second SIGINT ends them."""
        if number == signal.SIGINT and self.interrupted:
            number = signal.SIGKILL
        self.interrupted = self.interrupted or number == signal.SIGINT
        for path in self.folder.glob("rank_*.pid"):
            try:
                os.kill(int(path.read_text()), number)
            except (ProcessLookupError, ValueError):
                continue  # it has ended, or is just starting

    def exit_code(self) -> int:
        """0, the code of a requested stop, or 1 with a sentence where no rank could say one."""
        if self.fault is not None:
            raise MMError(
                f"the ranks could not be started: {' '.join(str(self.fault).split())}",
                hint="check --rdzv-endpoint, and that it is the same on every host",
            ) from self.fault
        codes = {rank: failure.exitcode for rank, failure in self.failures.items()}
        if self.interrupted and -signal.SIGKILL in codes.values():
            return 130
        if codes and set(codes.values()) <= {STOPPED, -signal.SIGTERM}:
            return STOPPED
        if codes and not (self.folder / "failed").exists():
            rank = min(codes, key=lambda r: (codes[r] == -signal.SIGTERM, self.failures[r].timestamp))
            sys.stderr.write(f"mm: error: {_ended(rank, codes[rank])}\n")
        return 1 if codes else 0


def _ended(rank: int, code: int) -> str:
    if code >= 0:
        return f"rank {rank} ended with exit code {code} and said nothing"
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return (
            f"rank {rank} was killed ({name}); the usual reason is that the host ran out of memory\n"
            "  hint: fewer loader workers, smaller micro-batches, or engine.recompute_modules=auto"
        )
    return f"rank {rank} was ended by {name}"


@contextmanager
def _handled(launch: _Launch) -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.signal(number, launch.forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def launch(arguments: Sequence[str], nodes: Nodes) -> int:
    """Runs `mm <arguments>` as the ranks of `nodes` and returns the exit code of the whole.

    MMError when the ranks can not be started. Called from the main thread.
    """
    folder = Path(tempfile.mkdtemp(prefix="mm_core-"))
    os.environ[LAUNCH_DIR] = str(folder)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nodes.nproc)))
    logging.disable(logging.CRITICAL)  # the agent's own account of failures: ranks say it better
    running = _Launch(nodes, arguments, folder)
    thread = threading.Thread(target=running.work, name="elastic agent", daemon=True)
    try:
        with _handled(running):
            thread.start()
            while thread.is_alive():
                thread.join(0.2)  # a join without a limit would keep signals waiting
        return running.exit_code()
    finally:
        logging.disable(logging.NOTSET)
        del os.environ[LAUNCH_DIR]
        shutil.rmtree(folder, ignore_errors=True)
