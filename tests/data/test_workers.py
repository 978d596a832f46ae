"""However a training process ends, no process, memory or temporary file of its data workers stays."""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mm_core.data.loading import loader, workers
from mm_core.data.media.limits import DecodeLimit, DecoderHungError
from mm_core.errors import DataError
from mm_core.runtime import leftovers as aftermath
from support import ranks

MARK = "MM_TEST_MARK"


def shared_inodes(maps: str) -> set[int]:
    """Of what a process has mapped, the inodes of what lies or lay in shared memory."""
    return {int(line.split()[4]) for line in maps.splitlines() if " /dev/shm/" in line}


@dataclass
class Script:
    """A user's script that reads with two workers, with a TMPDIR of its own; `t` is test_loader.py."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def run(self, *lines: str) -> subprocess.CompletedProcess[str]:
        """Runs it until the last process that holds its output has ended."""
        temporary = self.folder / "tmp"
        temporary.mkdir()
        script = self.folder / "script.py"
        head = ["import os, signal, sys, time", f"sys.path.insert(0, {str(Path(__file__).parent)!r})"]
        body = [f"    {line}" for line in ("import test_loader as t", *lines)]
        script.write_text("\n".join([*head, "if __name__ == '__main__':", *body]) + "\n")
        with subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ranks.environment(TMPDIR=str(temporary), **{MARK: self.mark}),
        ) as process:
            try:
                out, err = process.communicate(timeout=40)
            except subprocess.TimeoutExpired:
                for pid in self.processes():
                    os.kill(pid, signal.SIGKILL)
                out, err = process.communicate()
                pytest.fail(f"processes hold the output of a script that ended: {out}{err}")
        return subprocess.CompletedProcess(script, process.returncode, out, err)

    def processes(self) -> list[int]:
        """Every process that has inherited the script's mark."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def left(self, seconds: float = 5.0) -> dict[str, object]:
        """What is left of it, once it has had some seconds to go."""
        end = time.monotonic() + seconds
        while any(found := self._left().values()) and time.monotonic() < end:
            time.sleep(0.1)
        return {name: what for name, what in self._left().items() if what} if any(found) else {}

    def _left(self) -> dict[str, object]:
        return {
            "processes": self.processes(),
            "temporary files": sorted(str(path) for path in (self.folder / "tmp").rglob("*")),
            "shared memory": [path for path in Path("/dev/shm").iterdir() if self._owns(path)],
        }

    def _owns(self, segment: Path) -> bool:
        """Other tests may run beside this one: what the script has noted of itself shows whose it is."""
        noted = self.folder / "noted"
        text = noted.read_text() if noted.exists() else ""
        worker = re.match(r"(?:torch_|pym-)(\d+)", segment.name)
        if worker:
            return f"worker {worker[1]}\n" in text
        with suppress(FileNotFoundError):  # a semaphore is mapped under another name than it gets
            return segment.stat().st_ino in shared_inodes(text)
        return False


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


READING = (
    "kept = iter(t.loader(t.Numbers(4000), end_step=1000, workers=2))",
    "next(kept)",
    "note = open(os.path.join(os.path.dirname(__file__), 'noted'), 'w')",
    "note.writelines(f'worker {w.pid}\\n' for w in t.multiprocessing.active_children())",
    "note.write(open('/proc/self/maps').read())",
    "note.close()",
)
ENDS = {
    "killed": (*READING, "os.kill(os.getpid(), signal.SIGKILL)"),
    "left at once": (*READING, "os._exit(3)"),  # as the watchdog does
    "left with its workers alive": (*READING, "sys.kept = kept", "raise SystemExit(3)"),
    "left as ranks do": (*READING, "from mm_core.runtime.launch.rank_process import leave", "leave(3)"),
    "ended": ("print(len(list(t.loader(t.Numbers(8), workers=2))))",),
    "broken off": (*READING, "raise KeyError('a bug')"),
    "killed as workers start": (
        "import threading",
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()",
        "kept = [iter(t.loader(t.Numbers(40), workers=2)) for _ in range(50)]",
    ),
    "killed before workers start": (
        "kept = t.loader(t.Numbers(40), workers=2)",
        "os.kill(os.getpid(), signal.SIGKILL)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_of_a_process_that(end: str, script: Script) -> None:
    done = script.run(*ENDS[end])
    assert "leaked" not in done.stderr, done.stderr
    if READING[0] in ENDS[end]:
        assert len(shared_inodes((script.folder / "noted").read_text())) > 2
    assert script.left() == {}
    if end.startswith("killed"):
        assert done.returncode == -signal.SIGKILL
    elif end != "broken off":
        assert done.returncode == (0 if end == "ended" else 3), done.stderr


@pytest.mark.slow
def test_a_long_tmpdir_is_no_hindrance(script: Script) -> None:
    """A socket's address has 107 bytes; what does not fit there is put below /tmp, and goes too."""
    script.folder = script.folder / ("long" * 20)
    script.folder.mkdir()
    done = script.run(
        *READING,
        "from multiprocessing import util",
        "assert str(t.loader(t.Numbers(8), workers=1)._loader.worker_init_fn.folder) == util.get_temp_dir()",
        "print(util.get_temp_dir(), flush=True)",
        "os.kill(os.getpid(), signal.SIGKILL)",
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert script.left() == {}
    sockets = Path(done.stdout.strip())
    assert sockets.parent == Path("/tmp") and not sockets.exists()


def test_workers_note_themselves_where_the_sockets_went(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server's start moves the folder; what workers receive was taken before it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from test_loader import Numbers
    from test_loader import loader as build

    folders = [str(tmp_path / "long")]

    def start(modules: object) -> object:
        folders[:] = [str(tmp_path / "short")]
        return workers.multiprocessing.get_context("forkserver")

    monkeypatch.setattr(aftermath, "folders", lambda: folders)
    monkeypatch.setattr(loader, "start_server", start)
    told = build(Numbers(8), workers=1)._loader.worker_init_fn
    assert isinstance(told, workers.StartWorker) and told.folder == tmp_path / "short"


@dataclass
class StandInWorker:
    """A process of an iterator of torch's; `after` is when its end is known."""

    pid: int
    status: int | None
    after: float = 0.0

    @property
    def exitcode(self) -> int | None:
        return self.status if time.monotonic() > self.after else None


@dataclass
class StandInForAccelerator:
    """torch's iterator where it pins memory, which it does for an accelerator alone."""

    _workers: list[StandInWorker]


PINNING = RuntimeError("Pin memory thread exited unexpectedly")  # torch's words


@pytest.mark.parametrize("later", [0.0, 0.2])
def test_a_death_that_breaks_the_thread_that_pins_memory(
    monkeypatch: pytest.MonkeyPatch, later: float
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    reading = StandInForAccelerator(
        [StandInWorker(41, -signal.SIGKILL, time.monotonic() + later), StandInWorker(42, None)]
    )
    with (
        pytest.raises(DataError, match="a data worker was killed") as caught,
        workers.deaths_explained(reading),
    ):
        raise PINNING
    assert caught.value.where == "process 41, exit status -9"
    assert killed == [42]  # the number of one that has ended may be another process's


def test_a_decoder_that_hangs_is_named_where_memory_is_pinned_too(tmp_path: Path) -> None:
    start = workers.StartWorker(limit := DecodeLimit(3))
    start.folder = tmp_path
    (tmp_path / "decoding_41").write_bytes(b"clips/a.mp4\0what a longer name has left")
    reading = StandInForAccelerator([StandInWorker(41, -signal.SIGALRM)])
    with (
        pytest.raises(DecoderHungError, match="the decoder did not end within 3 s"),
        workers.deaths_explained(reading, start),
    ):
        raise PINNING
    assert limit.hung == {"clips/a.mp4"}


def test_a_batch_that_the_pinning_thread_could_not_take() -> None:
    """No worker has ended: the limit of open files, which torch's thread meets in the same place."""
    reading = StandInForAccelerator([])
    words = "could not be received from its data worker: RuntimeError: Pin memory"
    with pytest.raises(DataError, match=words), workers.deaths_explained(reading):
        raise PINNING
    with pytest.raises(RuntimeError, match="of another kind"), workers.deaths_explained(reading):
        raise RuntimeError("of another kind")


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGUSR1", "SIGHUP"])
def test_a_signal_to_every_process_ends_none_of_them(script: Script, number: str) -> None:
    """Slurm sends its warning to all processes of a task, multiprocessing's tracker of semaphores too."""
    done = script.run(
        f"signal.signal(signal.{number}, lambda *_: None)",
        *READING,
        "next(kept)",
        "from multiprocessing import forkserver, resource_tracker",
        "pids = [worker.pid for worker in t.multiprocessing.active_children()]",
        "pids += [forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid]",
        f"for pid in pids: os.kill(pid, signal.{number})",
        "time.sleep(1)",
        "states = [open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0] for pid in pids]",
        "print(len(pids), 'Z' in states, len(next(kept)))",
    )
    assert done.stdout.startswith("4 False ") and not done.stderr, done.stdout + done.stderr


@pytest.mark.slow
def test_workers_end_at_once_with_their_server(script: Script) -> None:
    """A worker that outlives its server would be ended by a loop of torch's that does not expect it."""
    done = script.run(
        *READING,
        "next(kept)",  # so that the second worker has started too
        "from multiprocessing import forkserver",
        "pids = [worker.pid for worker in t.multiprocessing.active_children()]",
        "os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)",
        "def alive(pid):",
        "    stat = f'/proc/{pid}/stat'",
        "    return os.path.exists(stat) and open(stat).read().rpartition(')')[2].split()[0] not in 'ZX'",
        "ends = time.monotonic() + 3  # torch's workers look at their parent every 5 seconds",
        "while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < ends: time.sleep(0.01)",
        "print(len(pids), left)",
        "try:",
        "    list(kept)",
        "except t.DataError as error:",
        "    print(error)",
    )
    counted, *reason = done.stdout.splitlines()
    assert counted == "2 []"
    assert reason[0].startswith("the process that starts the data workers was killed, and they ended")
    assert "Traceback" not in done.stderr, done.stderr


def test_a_server_that_does_not_end_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill that the kernel does not act upon: the process is in a call of a device or of a disk."""
    from multiprocessing import forkserver

    asked: list[int] = []
    monkeypatch.setattr(forkserver._forkserver, "_forkserver_pid", 41)
    monkeypatch.setattr(aftermath.multiprocessing, "active_children", list)
    monkeypatch.setattr(aftermath, "_sockets", lambda: None)
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    monkeypatch.setattr(aftermath, "SERVER_ENDS", 0.05)
    monkeypatch.setattr(os, "waitpid", lambda pid, options: asked.append(options) or (0, 0))
    aftermath.kill_workers()
    assert set(asked) == {os.WNOHANG}


def hand_a_descriptor_over(address, key, faults):
    """Runs in a worker that sends a descriptor: `faults` takes what is reported of a broken connection."""
    from multiprocessing import resource_sharer

    sys.excepthook = workers._report
    sys.stderr = faults_seen = io.StringIO()
    address.put(resource_sharer.DupFd(0)._id[0])
    key.wait()
    time.sleep(0.5)  # the thread that hands over reports behind this one's back
    faults.put(faults_seen.getvalue())


def test_a_batch_that_is_taken_by_a_killed_process_prints_no_traceback():
    context = multiprocessing.get_context("fork")
    address, taken, faults = context.Queue(), context.Event(), context.Queue()
    worker = context.Process(target=hand_a_descriptor_over, args=(address, taken, faults))
    worker.start()
    try:
        with socket.socket(socket.AF_UNIX) as taker:  # ends in the handshake, as a killed process does
            taker.connect(address.get(timeout=30))
        taken.set()
        assert faults.get(timeout=30) == ""
    finally:
        worker.join(30)


def test_other_faults_of_a_workers_threads_are_printed(capsys):
    thread = threading.Thread(
        target=lambda: workers._report(ValueError, ValueError("another fault"), None), name="hands over"
    )
    thread.start()
    thread.join()
    assert "ValueError: another fault" in capsys.readouterr().err
