"""Kills each part of a run at several moments with SIGKILL; checks leftovers and the resumed run.

    python benchmarks/kill_matrix.py [--runs 2] [--only KILLED/MOMENT ...]

{rank 0, rank 1, the launcher, the launcher and all ranks, a data worker, the server that starts the workers}
x {before the first save, in a step, in a save, in validation}, on two ranks with two workers each. Checks
for each case: how the run ended and what it printed; which processes, shared memory and temporary files
remain 15 s after its last rank ended; and whether a resumed run is bit-equal with an undisturbed run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = Path(__file__).parent / "plugins/kill_matrix_parts.py"
VICTIMS = ("rank 0", "rank 1", "launcher", "launcher and ranks", "data worker", "worker server")
MOMENTS = ("before the first save", "in a step", "in a save", "in validation")
NEWEST = {"before the first save": 0, "in a step": 4, "in a save": 4, "in validation": 4}
"""The newest complete checkpoint at the moment of the kill."""
REACHED = {"before the first save": 1, "in a step": 5, "in a save": 8, "in validation": 6}
"""Smallest number of steps completed at the moment of the kill."""
STEPS = 16
LEFT_AFTER = 15.0
TORCH_S_OWN = "_remote_module_non_scriptable.py"
"""torch 2.7 writes this file into a temporary folder at its import, and removes it at a normal exit alone."""
MARK = "KILL_MATRIX_RUN"


def write_config(folder: Path) -> Path:
    """Writes the config of a tiny run that saves every 4 steps and validates every 6."""
    clips = folder / "clips"
    render = [sys.executable, str(ROOT / "examples/shapes/render.py"), "--out", str(clips), "--clips", "32"]
    subprocess.run(render, check=True, capture_output=True)
    predictor = {
        "type": "custom_dit",
        "num_layers": 2,
        "num_heads": 2,
        "head_dim": 12,
        "patch_size": [2, 2, 2],
        "in_channels": 12,
        "out_channels": 12,
        "text_dim": 32,
        "freq_dim": 32,
        "ffn_dim": 48,
        "rope_max_seq_len": 64,
    }
    rows = {
        "type": "video_text",
        "annotations": str(clips / "data.json"),
        "num_frames": 8,
        "height": 16,
        "width": 16,
    }
    config = {
        "plugins": {"path": [str(PARTS)]},
        "task": {
            "type": "text_to_video",
            "predictor": predictor,
            "autoencoder": {"type": "pixel", "spatial": 2},
            "text_encoder": {"type": "bytes", "hidden_size": 32},
            "scheduler": {"type": "flow_match", "shift": 5},
            "caption_dropout": 0.2,
        },
        "data": {"train": rows, "validation": rows, "loader": {"workers": 2, "prefetch": 1}},
        "train": {"steps": STEPS, "micro_batch_size": 1, "global_batch_size": 4},
        "checkpoint": {"every": 4},
        "validation": {"every": 6, "metrics": [{"type": "local/held"}]},
        "callbacks": [{"type": "local/holding"}],
        "ema": {"decay": 0.9},
        "log": {"every": 1, "trackers": []},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


@dataclass
class Run:
    """A training command with its own TMPDIR and an environment mark that identifies all of its processes."""

    config: Path
    folder: Path
    moment: str | None = None
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    pids: set[int] = field(default_factory=set)
    semaphores: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.temporary = self.folder / f"tmp-{self.mark[:8]}"
        self.temporary.mkdir(parents=True)
        self.shared = set(Path("/dev/shm").iterdir())
        environment = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary), MARK: self.mark}
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(
            self.folder / "compiled"
        )  # a cache, by default in TMPDIR
        if self.moment is not None:
            environment |= {"KILL_MOMENT": self.moment, "KILL_FOLDER": str(self.folder)}
        command = [sys.executable, "-m", "mm_core.cli.main", "train", "--config", str(self.config)]
        self.output = self.folder / f"output-{self.mark[:8]}"
        with self.output.open("wb") as stream:
            self.process = subprocess.Popen(
                [*command, f"run.dir={self.folder}", "run.name=run", "--nproc", "2"],
                stdout=stream,
                stderr=stream,
                env=os.environ | environment,
                start_new_session=True,
            )

    # -- its processes -------------------------------------------------------------------------

    def processes(self) -> dict[int, int]:
        """Ids of the run's processes (those with its mark) and of their parents. Zombies do not count."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{MARK}={self.mark}\0".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = parent_of(int(entry.name))
        self.pids |= found.keys()
        return found

    def ranks(self) -> dict[int, int]:
        """Process id of each rank: the launcher's direct children."""
        found = {}
        for pid, parent in self.processes().items():
            if parent == self.process.pid:
                with suppress(OSError):
                    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    found |= {int(v[5:]): pid for v in variables if v.startswith(b"RANK=")}
        return found

    def server(self, rank: int) -> int:
        """Id of the server process that starts a rank's data workers."""
        for pid, parent in self.processes().items():
            if parent == rank and b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        raise RuntimeError(f"process {rank} has no server process for data workers")

    def worker(self, rank: int) -> int:
        """Id of the newest data worker of a rank; during validation, one of the validation's workers."""
        server = self.server(rank)
        return max(pid for pid, parent in self.processes().items() if parent == server)

    # -- its end -------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def at_its_moment(self) -> bool:
        """Waits until both ranks have reached the moment of the kill."""
        here = [self.folder / "rank_0", self.folder / "rank_1"]
        met = self.wait(lambda: self.process.poll() is not None or all(p.exists() for p in here), 120)
        self.note_semaphores()
        return met and self.process.poll() is None

    def left(self) -> dict[str, list[str]]:
        """What remains of the run 15 seconds later, by kind."""
        self.wait(lambda: not any(self._left().values()), LEFT_AFTER)
        return {kind: what for kind, what in self._left().items() if what}

    def _left(self) -> dict[str, list[str]]:
        processes = [f"{pid} {command_of(pid)}" for pid in self.processes() if running(pid)]
        # os.walk skips folders that vanish meanwhile; Path.rglob raises an error.
        found = [Path(at, name) for at, folders, names in os.walk(self.temporary) for name in folders + names]
        spared = {path for file in found if file.name == TORCH_S_OWN for path in (file, file.parent)}
        files = sorted(str(path.relative_to(self.temporary)) for path in found if path not in spared)
        new = {path for path in Path("/dev/shm").iterdir() if path not in self.shared}
        return {
            "processes": processes,
            "files": files,
            "memory": sorted(p.name for p in new if self._owns(p)),
        }

    def _owns(self, segment: Path) -> bool:
        """Whether new shared memory belongs to this run: other runs may be active."""
        if segment.name.startswith(("torch_", "pym-")):
            return int(segment.name.replace("-", "_").split("_")[1]) in self.pids
        with suppress(FileNotFoundError):
            return segment.stat().st_ino in self.semaphores
        return False

    def note_semaphores(self) -> None:
        """Records the inodes of the run's semaphores, whose names contain no process id."""
        for pid in self.processes():
            with suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text()
                self.semaphores |= {int(inode) for inode in re.findall(r" (\d+) +/dev/shm/", maps)}

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def kill_all(self) -> None:
        """Kills all processes of the run, so that none disturbs the next case."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:100]
    return "?"


def adopt_orphans() -> None:
    """Makes this process the parent of ranks that lose their launcher, so that it receives their exit
    codes."""
    ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def newest(folder: Path) -> int:
    from mm_core.checkpoint.retention import complete_steps

    return max(complete_steps(folder / "run/checkpoints"), default=0)


def strike(run: Run, victim: str, ranks: dict[int, int]) -> None:
    """Kills the victim with SIGKILL; for data workers, one of rank 1."""
    if victim in ("rank 0", "rank 1"):
        victims = [ranks[int(victim[-1])]]
    elif victim == "launcher":
        victims = [run.process.pid]
    elif victim == "launcher and ranks":
        victims = [run.process.pid, *ranks.values()]
    elif victim == "data worker":
        victims = [run.worker(ranks[1])]
    else:
        victims = [run.server(ranks[1])]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)


@dataclass
class Outcome:
    """Result of one case; `faults` is empty if everything is as expected."""

    left: dict[str, list[str]]
    step: int
    seconds: float
    faults: list[str]


def case(config: Path, folder: Path, untouched: Path, victim: str, moment: str) -> Outcome:
    """Runs one case: a kill, checks, and the resumed run."""
    folder.mkdir()
    run = Run(config, folder, moment)
    codes: dict[int, int] = {}
    try:
        if not run.at_its_moment():
            return Outcome({}, 0, 0.0, [f"the run did not reach the moment {moment!r}: {run.text()[-1500:]}"])
        ranks = run.ranks()
        began = time.monotonic()
        strike(run, victim, ranks)
        faults = [] if end_of(run, ranks, codes) else ["the run had not ended after 90 s"]
        seconds = time.monotonic() - began
        left = run.left()
        faults += reported(run, victim, moment, newest(folder), [codes.get(ranks[n]) for n in (0, 1)])
    finally:
        run.kill_all()
    step = newest(folder)
    faults += [f"left: {kind}: {', '.join(what)}" for kind, what in left.items()]
    if step or victim not in ("data worker", "worker server", "launcher"):
        faults += resumed(config, folder, untouched, step)
    if faults:
        faults.append(run.text()[-3000:])
    return Outcome(left, step, seconds, faults)


def end_of(run: Run, ranks: dict[int, int], codes: dict[int, int]) -> bool:
    """Waits for launcher and ranks to end; stores exit codes of orphaned ranks in `codes`."""

    waiting = set(ranks.values())
    noted = 0.0

    def ended() -> bool:
        nonlocal noted
        if time.monotonic() - noted > 0.25:  # processes started after the kill may remain as well
            run.note_semaphores()  # also records the processes
            noted = time.monotonic()
        launched = run.process.poll() is None
        for pid in list(waiting):
            try:
                found, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # a child of the launcher, which has collected its exit code
                if not running(pid):
                    waiting.discard(pid)
                continue
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
                waiting.discard(pid)
        return not launched and not waiting

    return run.wait(ended, 90)


def reported(run: Run, victim: str, moment: str, step: int, codes: list[int | None]) -> list[str]:
    """Errors in exit code, output and checkpoint of a killed run."""
    code, text = run.process.returncode, run.text()
    faults = []

    def expect(true: bool, what: str) -> None:
        if not true:
            faults.append(what)

    expect("Traceback" not in text and "leaked" not in text, "a traceback or a warning of leaks")
    if victim in ("rank 0", "rank 1"):
        expect(code == 137, f"exit code {code} instead of 137")
        expect(text.count("mm: error:") == 1, "not exactly one error message")
        expect(f"mm: error: {victim} was killed (SIGKILL)" in text, "no error message names the rank")
        expect(step == NEWEST[moment], f"the newest checkpoint is {step} instead of {NEWEST[moment]}")
    elif victim == "launcher":
        expect(codes == [75, 75], f"the ranks left with {codes} instead of 75")
        expect(step >= REACHED[moment], f"saved step {step} of at least {REACHED[moment]}")
    elif victim == "launcher and ranks":
        expect(step == NEWEST[moment], f"the newest checkpoint is {step} instead of {NEWEST[moment]}")
    else:
        what = "a data worker was killed"
        if victim == "worker server":
            what = "the process that starts the data workers was killed"
        expect(code == 1, f"exit code {code} instead of 1")
        expect(
            text.count("mm: error:") == 1 and "mm: error: rank 1: " in text,
            "not exactly one error message, from rank 1",
        )
        expect(what in text, f"no {what!r}")
        expect(step >= REACHED[moment], f"saved step {step} of at least {REACHED[moment]}")
    return faults


def resumed(config: Path, folder: Path, untouched: Path, step: int) -> list[str]:
    """Errors of the resumed run: exit code, leftovers, first step, bits."""
    from mm_core.training.verify_resume import compare_runs, render

    run = Run(config, folder)
    try:
        until = time.monotonic() + 180
        while run.process.poll() is None and time.monotonic() < until:
            run.note_semaphores()
            time.sleep(0.5)
        if run.process.poll() != 0:
            return [f"the resumed run exited with code {run.process.returncode}: {run.text()[-1500:]}"]
        faults = [f"left by the resumed run: {kind}: {what}" for kind, what in run.left().items()]
        if step and f"at step {step} of {STEPS}" not in run.text():
            faults.append(f"the resumed run did not start at step {step}")
        results, remarks = compare_runs(folder / "run", untouched / "run")
        if remarks or not all(result.ok for result in results):
            faults.append(f"not bit-equal: {render(results, remarks)}")
        return faults
    finally:
        run.kill_all()


def matrix(config: Path, folder: Path, cases: list[tuple[str, str]]) -> tuple[int, int]:
    """Runs the cases; returns the number of cases as expected and the number of leftovers."""
    good = left = 0
    untouched = folder / "untouched"
    untouched.mkdir()
    run = Run(config, untouched)
    if run.process.wait(300):
        raise RuntimeError(run.text())
    print(f"{'killed':<20}{'moment':<24}{'ended after':>12}{'left':>6}{'checkpoint':>12}", flush=True)
    for number, (victim, moment) in enumerate(cases, 1):
        place = folder / f"case_{number}"
        outcome = case(config, place, untouched, victim, moment)
        things = sum(map(len, outcome.left.values()))
        row = f"{victim:<20}{moment:<24}{outcome.seconds:>10.1f} s{things:>6}{outcome.step:>12}"
        print(row + ("" if not outcome.faults else "  WRONG"), flush=True)
        for fault in outcome.faults:
            print(f"    {fault}", flush=True)
        good += not outcome.faults
        left += things
        shutil.rmtree(place, ignore_errors=True)
    return good, left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], metavar="KILLED/MOMENT", help="run only these cases")
    args = parser.parse_args()
    cases = [(victim, moment) for moment in MOMENTS for victim in VICTIMS]
    if args.only:
        cases = [case for case in cases if "/".join(case) in args.only]
    adopt_orphans()
    ok = True
    lines = []
    for number in range(1, args.runs + 1):
        with tempfile.TemporaryDirectory(prefix="kill_matrix-") as scratch:
            folder = Path(scratch)
            good, left = matrix(write_config(folder), folder, cases)
        right = good == len(cases) and not left
        ok = ok and right
        name = f"kill_matrix_{number}"
        lines += [
            f"RESULT {name} {good}/{len(cases)} {len(cases)}/{len(cases)} {'ok' if right else 'short'}",
            f"RESULT {name}_left {left} 0 {'ok' if not left else 'short'}",
        ]
    print("\n".join(lines))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
