"""The watchdog: ends a run that hangs, and names the rank that the others wait for and its line of code."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from sysconfig import get_path
from typing import NoReturn

from mm_core.errors import TrainingError
from mm_core.files import replace_text
from mm_core.runtime.launch.rank_logs import RankLog

PHASES = ("data", "wait", "encode", "forward_backward", "optimizer", "log", "validation", "checkpoint")
"""The phases of a step, in this order. `wait`: waiting for the samples of other ranks."""
_ORDER = ("start", *PHASES)

_MM_CORE = str(Path(__file__).parents[2])
_INSTALLED = ("site-packages", "dist-packages", get_path("stdlib"), "<frozen ")
"""Parts of the paths of library files, which are not reported as the line where a rank hangs."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
"""A line of faulthandler."""
_DOING = {
    "start": "starting up",
    "data": "loading data",
    "wait": "waiting for the data of other ranks",
    "encode": "encoding the batch",
    "forward_backward": "running forward and backward",
    "optimizer": "updating the weights",
    "log": "logging",
    "validation": "validating",
    "checkpoint": "saving the checkpoint",
}
"""A phase -> what a rank does in it, for messages."""


@dataclass(frozen=True)
class Heartbeat:
    """The progress of a rank, which it writes to a file for the watchdogs of the other ranks.

    Attributes:
        rank: the rank.
        step: the step it is in, from 1.
        phase: the phase of the step.
        moves: how many phases it has entered.
        seconds: time of its last progress, since the epoch. For people only: the clocks of hosts differ.
        place: the line of code of its main thread.
        waits: whether that line is in a collective, where it waits for another rank.
        process: its process id and host.
    """

    rank: int
    step: int
    phase: str
    moves: int
    seconds: float
    place: str
    waits: bool = False
    process: str = ""


class Watchdog:
    """Ends a run that hangs: one without progress for `stuck_after` seconds.

    The loop only sets two attributes; a thread writes `logs/heartbeat_N.json` regularly. If there is no
    progress, it writes the stacks of all threads to the rank's log, and an error that names the rank that is
    furthest behind.

    Args:
        run_dir: the run's folder, shared by all ranks.
        rank: this process.
        world: number of ranks.
        stuck_after: seconds; None turns the watchdog off.
        log: where the stacks are written.
        end: called with the error; by default it is printed and the process ends with exit code 1.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        world: int,
        stuck_after: float | None,
        log: RankLog | None = None,
        end: Callable[[TrainingError], object] | None = None,
    ) -> None:
        self._folder, self._rank, self._world = Path(run_dir) / "logs", rank, world
        self._limit, self._log, self._end = stuck_after, log, end or _leave
        self._at, self._phase, self._moves = 0, "start", 0
        self._moved = time.monotonic()  # the wall clock may be set during a run
        self._main = threading.get_ident()
        self._pause = min((stuck_after or 0.0) / 4, 5.0)  # seconds between two checks
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the watchdog thread."""
        if self._limit is None:
            return
        self._moved = time.monotonic()
        self._write()  # replaces the heartbeat of an earlier process, which may be ahead
        self._thread = threading.Thread(target=self._watch, name="mm_core watchdog", daemon=True)
        self._thread.start()

    def step(self, step: int) -> None:
        """Notes for the watchdog that step number `step` (from 1) begins."""
        self._at = step

    def enter(self, phase: str) -> None:
        """Notes progress for the watchdog: a new phase begins, or a long phase continues."""
        self._phase = phase
        self._moves += 1

    def close(self) -> None:
        """Stops the watchdog thread."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    # -- in the thread -------------------------------------------------------------------------

    def _watch(self) -> None:
        assert self._limit is not None
        seen = -1
        while not self._over.wait(self._pause):
            if self._moves != seen:
                seen, self._moved = self._moves, time.monotonic()
            self._write()
            if time.monotonic() - self._moved > self._limit:
                self._leave_stacks()
                # All ranks write their stacks before one ends the run; and there may be progress after all.
                if self._over.wait(2 * self._pause):
                    return
                if self._moves == seen:
                    self._stuck()
                    return

    def _beat(self) -> Heartbeat:
        place, waits = self._place()
        moved = time.time() - (time.monotonic() - self._moved)
        process = f"process {os.getpid()} on {socket.gethostname()}"
        return Heartbeat(self._rank, self._at, self._phase, self._moves, moved, place, waits, process)

    def _place(self) -> tuple[str, bool]:
        """The innermost line of the main thread outside installed libraries; whether it waits there.

        The frames of a thread that runs on must not be walked in Python: runs that decode videos in the main
        thread ended by SIGSEGV (Python 3.11). What faulthandler does creates no objects.
        """
        text = ""
        with suppress(OSError), tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = file.read().decode(errors="replace")
        stack = text.partition(f"hread 0x{self._main:016x}")[2].partition("\n\n")[0]
        frames: list[tuple[str, str, str]] = _FRAME.findall(stack)  # the innermost first
        if not frames:
            return "unknown", False
        waits = any("torch/distributed" in path for path, _, _ in frames[:6])
        path, line, name = next((frame for frame in frames if not _installed(frame[0])), frames[0])
        return f"{path}:{line} in {name}", waits

    def _write(self) -> None:
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_text(self._folder / f"heartbeat_{self._rank}.json", json.dumps(asdict(self._beat())))

    def _read(self) -> list[Heartbeat]:
        """The heartbeats of all ranks that can be read; this rank's own as of now."""
        beats = [self._beat()]
        for rank in range(self._world):
            with suppress(OSError, ValueError, TypeError):
                if rank != self._rank:
                    text = (self._folder / f"heartbeat_{rank}.json").read_text(encoding="utf-8")
                    beats.append(Heartbeat(**json.loads(text)))
        return beats

    def _silence(self, rank: int) -> float:
        """Seconds by which another rank's heartbeat file is older than this rank's, by the disk's clock."""
        names = (f"heartbeat_{self._rank}.json", f"heartbeat_{rank}.json")
        with suppress(OSError):
            own, other = ((self._folder / name).stat().st_mtime for name in names)
            return own - other
        return 0.0

    def _leave_stacks(self) -> None:
        if self._log is not None and self._log.descriptor is not None:
            self._log.write(f"no progress in step {self._at}, {self._phase}; the stacks of all threads:")
            faulthandler.dump_traceback(self._log.descriptor, all_threads=True)

    def _stuck(self) -> None:
        beats = self._read()
        silent = [beat for beat in beats if self._silence(beat.rank) > max(3 * self._pause, 3.0)]
        behind = min(silent or beats, key=progress)
        doing = f"{_DOING.get(behind.phase, behind.phase)} for step {behind.step}"
        what = f"no progress for {round(time.monotonic() - self._moved)} s; rank {behind.rank}"
        where = f"step {self._at}, {self._phase.replace('_', ' ')}"  # the rank is printed before it
        if silent:
            self._end(
                TrainingError(
                    f"{what} ({behind.process}) has not responded for"
                    f" {round(self._silence(behind.rank))} s; it was last {doing}",
                    where=where,
                    hint="look at it on its host: `ps -o stat= -p PID` shows T for a stopped process, which"
                    " `kill -CONT PID` continues; `py-spy dump --native --pid PID` shows native code that"
                    " holds Python's lock; if the host is down, start the run again without it",
                )
            )
            return
        self._end(
            TrainingError(
                f"{what} is furthest behind, {doing}, at {behind.place}",
                where=where,
                hint=f"read its stacks in {self._folder}/rank_{behind.rank}.log;"
                " run.stuck_after sets the limit",
            )
        )


def _installed(path: str) -> bool:
    return not path.startswith(_MM_CORE) and any(part in path for part in _INSTALLED)


def progress(beat: Heartbeat) -> tuple[int, int, int, bool]:
    """A sort key for the progress of a rank; of two ranks at the same place, the waiting one is ahead."""
    return beat.step, _ORDER.index(beat.phase) if beat.phase in _ORDER else 0, beat.moves, beat.waits


def _leave(fault: TrainingError) -> NoReturn:
    """Prints the error, once for all ranks of this host, and ends the process: the main thread may be waiting
    in native code, where no exception reaches it."""
    from mm_core.runtime.launch.rank_process import print_error
    from mm_core.runtime.launch.signals import PASSING, show_cursor
    from mm_core.runtime.leftovers import end_workers

    fault.passing = True
    print_error(fault)
    end_workers()
    show_cursor()  # the bar is still open
    os._exit(PASSING)
