"""A watch over a run that hangs: it names the rank that others wait for, and where that one stands."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
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
"""What a step is made of, in this order. `wait`: for the samples of other ranks."""
_ORDER = ("start", *PHASES)

_MM_CORE = str(Path(__file__).parents[2])
_INSTALLED = ("site-packages", "dist-packages", get_path("stdlib"), "<frozen ")
"""In a path: a library's file, and none that a reader of the sentence would look at first."""


@dataclass(frozen=True)
class Heartbeat:
    """Where a rank stood. seconds: since the epoch, when it last moved on, for people to read: clocks of
    hosts differ, and nothing is judged by them. place: its main thread's line. waits: whether that lies in
    a collective, where it waits for another. process: its id and host."""

    rank: int
    step: int
    phase: str
    moves: int
    seconds: float
    place: str
    waits: bool = False
    process: str = ""


class Watchdog:
    """Ends a run that has not moved on for `stuck_after` seconds.

    The loop only sets two attributes; a thread writes `logs/heartbeat_N.json` now and then, and when
    nothing has moved, all threads' stacks to the rank's log and a sentence that names the rank that is
    furthest behind.

    Args:
        run_dir: the run's folder, shared by all ranks.
        rank, world: this process.
        stuck_after: seconds; None watches nothing.
        log: takes the stacks.
        end: what follows the sentence; by default the process ends with exit code 1.
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
        self._moved = time.monotonic()  # the clock of the wall may be set while a run trains
        self._main = threading.get_ident()
        self._pause = min((stuck_after or 0.0) / 4, 5.0)  # seconds between two looks
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to watch."""
        if self._limit is None:
            return
        self._moved = time.monotonic()
        self._write()  # one of an earlier process may lie there, and be ahead
        self._thread = threading.Thread(target=self._watch, name="mm_core watchdog", daemon=True)
        self._thread.start()

    def step(self, step: int) -> None:
        """Step number `step` (from 1) begins."""
        self._at = step

    def enter(self, phase: str) -> None:
        """A new phase begins; also called within a long one, to say that it moves on."""
        self._phase = phase
        self._moves += 1

    def close(self) -> None:
        """Ends the watch."""
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
                # All ranks leave their stacks before one ends the run; and it may have moved on after all.
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
        """The innermost line of the main thread that lies in no installed library; whether it waits there."""
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return "unknown", False
        frames = traceback.extract_stack(frame)
        waits = any("torch/distributed" in f.filename for f in frames[-6:])
        own = [f for f in frames if not _installed(f.filename)]
        last = (own or list(frames))[-1]
        return f"{last.filename}:{last.lineno} in {last.name}", waits

    def _write(self) -> None:
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_text(self._folder / f"heartbeat_{self._rank}.json", json.dumps(asdict(self._beat())))

    def _read(self) -> list[Heartbeat]:
        """The heartbeats of all ranks, as far as they can be read; this one's as it is now."""
        beats = [self._beat()]
        for rank in range(self._world):
            with suppress(OSError, ValueError, TypeError):
                if rank != self._rank:
                    text = (self._folder / f"heartbeat_{rank}.json").read_text(encoding="utf-8")
                    beats.append(Heartbeat(**json.loads(text)))
        return beats

    def _silence(self, rank: int) -> float:
        """Seconds by which the heartbeat of another rank is older than this one's, by the disk's clock."""
        names = (f"heartbeat_{self._rank}.json", f"heartbeat_{rank}.json")
        with suppress(OSError):
            own, other = ((self._folder / name).stat().st_mtime for name in names)
            return own - other
        return 0.0

    def _leave_stacks(self) -> None:
        if self._log is not None and self._log.descriptor is not None:
            self._log.write(f"stuck in step {self._at}, {self._phase}; the stacks of all threads:")
            faulthandler.dump_traceback(self._log.descriptor, all_threads=True)

    def _stuck(self) -> None:
        beats = self._read()
        silent = [beat for beat in beats if self._silence(beat.rank) > max(3 * self._pause, 3.0)]
        behind = min(silent or beats, key=progress)
        phase = behind.phase.replace("_", " ")
        what = f"nothing has moved for {round(time.monotonic() - self._moved)} s; rank {behind.rank}"
        where = f"rank {self._rank}, step {self._at}, {self._phase.replace('_', ' ')}"
        if silent:
            self._end(
                TrainingError(
                    f"{what} ({behind.process}) has given no sign of life for"
                    f" {round(self._silence(behind.rank))} s, since {phase} of step {behind.step}",
                    where=where,
                    hint="it is stopped (SIGSTOP: ps shows T, kill -CONT lets it go on), holds Python's lock"
                    " in native code, or its host is gone; its log holds no stacks for the same reason",
                )
            )
            return
        self._end(
            TrainingError(
                f"{what} is furthest behind, in {phase} of step {behind.step} at {behind.place}",
                where=where,
                hint=f"{self._folder}/rank_{behind.rank}.log has its stacks; run.stuck_after sets the limit",
            )
        )


def _installed(path: str) -> bool:
    return not path.startswith(_MM_CORE) and any(part in path for part in _INSTALLED)


def progress(beat: Heartbeat) -> tuple[int, int, int, bool]:
    """How far a rank has come; of two at the same place, the one that waits is ahead."""
    return beat.step, _ORDER.index(beat.phase) if beat.phase in _ORDER else 0, beat.moves, beat.waits


def _leave(fault: TrainingError) -> NoReturn:
    """Says the sentence, once over the ranks of this host, and ends the process: the main thread may
    wait in native code, where no exception reaches it."""
    from mm_core.runtime.launch.rank_process import say
    from mm_core.runtime.launch.signals import show_cursor
    from mm_core.runtime.leftovers import end_workers

    say(fault)
    end_workers()
    show_cursor()  # the bar is still open
    os._exit(1)
