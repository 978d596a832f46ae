"""Python commands as processes of their own, without what costs them most: importing torch and the like.

A server imports those libraries once a test session, and of mm_core what most commands import, and forks a
process for each command. Ranks that such a command launches come from the same server. What a process
is to its parent and to its ranks stays true: a pid, signals, a session, an exit status, a parent whose end
is seen. A command whose environment changes what the libraries read at import starts as any process does,
and so do commands of tests that kill launchers, or that are about imports.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from importlib import import_module
from multiprocessing import util
from pathlib import Path
from typing import Any

ADDRESS = "MM_TESTS_WARM"
"""The environment variable by which a command's own ranks find the server."""

SPARE = "warm-spare"
"""The name of a process that waits to become the server of a command's data workers."""

LIBRARIES = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.elastic.multiprocessing",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torch.distributed.tensor.parallel",
    "torch.utils.data",
    "transformers.models.auto.modeling_auto",
    "diffusers.models.transformers.transformer_wan",
    "peft",
    "av",
    "PIL.Image",
    "PIL.GifImagePlugin",
    "PIL.JpegImagePlugin",
    "PIL.PngImagePlugin",
    "einops",
    "packaging.requirements",
    "pluggy",
    # A run draws its loss when it ends, which costs as much as its start.
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    # Of mm_core what a training on two ranks imports, a third of its time: none of it reads its surroundings.
    "mm_core.cli.training.train",
    "mm_core.engines.fsdp2",
    "mm_core.runtime.launch.launcher",
    "mm_core.tasks.text_to_video.task",
    "mm_core.training.forecast.study",
    "mm_core.training.run",
)

_OWN = {**os.environ, "OMP_NUM_THREADS": "1"}
"""The server's environment: this process's as it began, before any test changes it."""

_AT_IMPORT = (
    "CUDA",
    "DIFFUSERS_",
    "HF_",
    "HOME",
    "MPL",
    "PYTHON",
    "TORCH_CPP",
    "TORCH_LOGS",
    "TRANSFORMERS_",
)
_AT_START = ("PYTHONPATH", "PYTHONUNBUFFERED")


def _decisive(environment: Mapping[str, str]) -> dict[str, str]:
    """What the libraries read when they are imported."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_AT_IMPORT) and name not in _AT_START
    }


class Process:
    """A command under way, with the attributes and methods of subprocess.Popen.

    Args:
        args: the command line; args[0] is this Python.
        env: its environment; this process's by default.
        stdin, stdout, stderr: open files; this process's by default.
        start_new_session, cwd: as subprocess.Popen takes them.
        interruptible: whether SIGINT and SIGHUP end it where this process ignores them, as the processes of a
            shell's background do.
    """

    def __init__(
        self,
        args: Sequence[str],
        env: Mapping[str, str] | None = None,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        start_new_session: bool = False,
        cwd: str | Path | None = None,
        interruptible: bool = False,
    ) -> None:
        self.args, self.returncode = list(args), None
        environment = dict(os.environ if env is None else env)
        streams = [
            default if given is None else given.fileno()
            for default, given in enumerate((stdin, stdout, stderr))
        ]
        request = {
            "args": self.args[1:],
            "environment": environment,
            "cwd": str(cwd or Path.cwd()),
            "session": start_new_session,
            "interruptible": interruptible,
        }
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(environment.setdefault(ADDRESS, address()))
        socket.send_fds(self._line, [b"."], streams)
        self._line.sendall(json.dumps(request).encode() + b"\n")
        self._answers = self._line.makefile("r")
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._line], [], [], seconds)[0]:
            self.returncode = int(self._answers.readline() or -signal.SIGKILL)
            self._answers.close()
            self._line.close()
        return self.returncode


def run(
    args: Sequence[object],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
    text: str | None = None,
    cwd: Path | None = None,
    anew: bool = False,
) -> subprocess.CompletedProcess[str]:
    """A Python command to its end, as subprocess.run with its output captured.

    Args:
        args: arguments of the interpreter.
        env: its environment; None: that of this process.
        timeout: in seconds.
        text: its standard input.
        cwd: its folder; None: that of this process.
        anew: whether to start a new interpreter, for tests of what is imported when.
    """
    words, environment = [sys.executable, *map(str, args)], dict(os.environ if env is None else env)
    if anew or not is_warm(environment):
        pipes: dict[str, Any] = {"capture_output": True, "text": True, "timeout": timeout, "cwd": cwd}
        return subprocess.run(words, env=environment, input=text, **pipes)
    with ExitStack() as files:
        stdin, out, err = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
        stdin.write(text or "")
        stdin.seek(0)
        process = Process(words, environment, stdin, out, err, cwd=cwd)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()  # one that hangs does not outlive the test
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


class Running:
    """A command under way in a session of its own, with its output kept: as subprocess.Popen with pipes,
    which its ranks hold as well.

    Args:
        args: the command line, from the module or script on.
        env, cwd: of the command.
        merged: whether standard error joins standard output.
        anew: as for `run`.
    """

    def __init__(
        self,
        args: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        merged: bool = False,
        anew: bool = False,
    ) -> None:
        words, environment = [sys.executable, *map(str, args)], dict(os.environ if env is None else env)
        options: dict[str, Any] = {"env": environment, "cwd": cwd, "start_new_session": True}
        out, err = os.pipe(), None if merged else os.pipe()
        self._pipes = [out, *filter(None, [err])]
        self._text: list[list[str]] = [[] for _ in self._pipes]
        ends = [os.fdopen(pair[1], "wb") for pair in self._pipes]
        options |= {"stdin": None, "stdout": ends[0], "stderr": ends[-1]}
        self.process: Process | subprocess.Popen[bytes]
        if anew or not is_warm(environment):
            # A test run in a shell's background ignores SIGINT, and children would inherit that.
            self.process = subprocess.Popen(words, preexec_fn=_interruptible, **options)
        else:
            self.process = Process(words, interruptible=True, **options)
        for end in ends:
            end.close()
        self._readers = [
            threading.Thread(target=self._read, args=(pair[0], kept), daemon=True)
            for pair, kept in zip(self._pipes, self._text, strict=True)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def out(self) -> str:
        """What it has printed until now."""
        return "".join(self._text[0])

    @property
    def err(self) -> str:
        """Its standard error until now."""
        return "".join(self._text[-1])

    def end(self, timeout: float = 240) -> tuple[int, str, str]:
        """Its exit status and output, when the last process that holds the output has ended."""
        until = time.monotonic() + timeout
        for reader in self._readers:
            reader.join(max(until - time.monotonic(), 0.0))
            if reader.is_alive():
                self.process.kill()
                raise subprocess.TimeoutExpired(self.process.args, timeout, self.out)
        code = self.process.wait(max(until - time.monotonic(), 1.0))
        return code, self.out, self.err

    @staticmethod
    def _read(end: int, kept: list[str]) -> None:
        with open(end, encoding="utf-8", errors="replace") as stream:
            kept.extend(stream)


def _interruptible() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def mm(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """`mm ARGUMENTS`, as `run` runs it under these options."""
    return run(["-m", "mm_core.cli.main", *arguments], **options)


def is_warm(environment: Mapping[str, str]) -> bool:
    """Whether libraries imported in this environment are those that the server has imported in its own."""
    return _decisive(environment) == json.loads(Path(address()).with_name("decisive").read_text())


def _start(args: Sequence[str], env: Mapping[str, str], **streams: Any) -> Process | subprocess.Popen[bytes]:
    """What torch's elastic agent starts its ranks by, within a command of the server's."""
    kind = Process if is_warm(env) else subprocess.Popen
    return kind(args, env=env, **streams)


def _subprocess_run(args: Any, **options: Any) -> subprocess.CompletedProcess[Any]:
    """subprocess.run within a command of the server's: another Python command comes from there as well."""
    python = isinstance(args, list | tuple) and args and args[0] == sys.executable
    streams = {name: options.get(name) for name in ("stdout", "stderr")}
    plain = options.get("text") and set(options) <= {"text", *streams}
    kinds = {None, subprocess.PIPE, subprocess.DEVNULL}
    if not (python and plain and kinds.issuperset(streams.values()) and is_warm(os.environ)):
        return _run_anew(args, **options)
    with ExitStack() as files:
        ends = {
            name: kind and files.enter_context(tempfile.TemporaryFile("w+")) for name, kind in streams.items()
        }
        code = Process(list(args), **ends).wait()
        said = dict.fromkeys(streams)
        for name, end in ends.items():
            if streams[name] == subprocess.PIPE:
                end.seek(0)
                said[name] = end.read()
    return subprocess.CompletedProcess(args, code, said["stdout"], said["stderr"])


_run_anew = subprocess.run


class _Spare:
    """A fork of a command from before it began, which becomes the server of its data workers when the command
    starts that; else it ends with the command."""

    def __init__(self) -> None:
        self._line, other = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self._line.close()
            self._wait(other)
        other.close()
        self._spawn = util.spawnv_passfds
        util.spawnv_passfds = self._begin

    def _begin(self, path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
        """In the place of multiprocessing.util.spawnv_passfds."""
        words = [os.fsdecode(word) for word in args]
        used = self._line.fileno() < 0
        if used or "multiprocessing.forkserver" not in words[-1] or os.waitpid(self._pid, os.WNOHANG)[0]:
            return self._spawn(path, args, passfds)
        descriptors = sorted(map(int, passfds))
        request = {
            "code": words[-1],
            "descriptors": descriptors,
            "environment": dict(os.environ),
            "cwd": str(Path.cwd()),
            "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        }
        socket.send_fds(self._line, [b"."], descriptors)
        self._line.sendall(json.dumps(request).encode() + b"\n")
        self._line.close()
        return self._pid

    def _wait(self, line: socket.socket) -> None:
        Path("/proc/self/comm").write_text(SPARE)  # tests that count processes leave it out
        try:
            told, found, _, _ = socket.recv_fds(line, 1, 8)
            request = json.loads(line.makefile("r").readline()) if told else None
        except BaseException:  # a signal to the group
            request = None
        if request is None:
            os._exit(0)
        line.close()
        Path("/proc/self/comm").write_text("python")
        # First out of the way of the numbers that the command names.
        high = [fcntl.fcntl(number, fcntl.F_DUPFD, 200) for number in found]
        for number in found:
            os.close(number)
        for number, wanted in zip(high, request["descriptors"], strict=True):
            os.dup2(number, wanted, inheritable=False)
            os.close(number)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
        _to_the_end(["-c", request["code"]])


@cache
def address() -> str:
    """Where the server of this session listens; it is started when it is first asked.

    Commands of the server have its address in their environment, and so have the processes of `pytest -n`.
    """
    place = os.environ.get(ADDRESS) or start()
    until = time.monotonic() + 120
    while not Path(place).exists():
        assert time.monotonic() < until, "the server of warm processes did not start"
        time.sleep(0.05)
    return place


def start() -> str:
    """Starts a server that ends with this process; the path that is returned is a socket once it is ready."""
    folder = tempfile.mkdtemp(prefix="warm-")
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), _OWN.get("PYTHONPATH")]))
    (Path(folder) / "decisive").write_text(json.dumps(_decisive(_OWN)))
    server = subprocess.Popen(
        [sys.executable, "-c", f"from support import warm; warm.serve('{folder}/address')"],
        env={**_OWN, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
    )
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.communicate)  # the server ends with its standard input, however this process ends
    return f"{folder}/address"


def serve(place: str) -> None:
    """Forks a process for each request, until standard input ends."""
    for library in LIBRARIES:
        import_module(library)
    for own in ("", str(Path(__file__).parents[1])):
        sys.path.remove(own)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{place}.closed")
        door.listen(64)
        Path(f"{place}.closed").rename(place)
        while True:
            ready, _, _ = select.select([door, 0], [], [], 1.0)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if 0 in ready:
                os._exit(0)
            if door in ready:
                line, _ = door.accept()
                if os.fork() == 0:
                    door.close()
                    _keep(line)
                line.close()


def _keep(line: socket.socket) -> None:
    """Is the parent of one command: reports its pid and how it ended, and is gone when its client is."""
    _, streams, _, _ = socket.recv_fds(line, 1, 3)
    request = json.loads(line.makefile("r").readline())
    child = os.fork()
    if child == 0:
        line.close()
        _become(request, streams)
    for stream in (0, 1, 2, *streams):  # whoever reads the command's output sees its end
        os.close(stream)
    line.sendall(f"{child}\n".encode())
    ended = os.pidfd_open(child)
    if ended in select.select([ended, line], [], [])[0]:
        _, status = os.waitpid(child, 0)  # which may take a moment yet
        with suppress(OSError):
            line.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(request: dict[str, Any], streams: Sequence[int]) -> None:
    """The command itself."""
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["interruptible"]:
        _interruptible()
    tempfile.tempdir = None
    sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = _start
    subprocess.run = _subprocess_run
    _Spare()
    _to_the_end(request["args"])


def _to_the_end(args: list[str]) -> None:
    code = 1
    try:
        _run(args)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    with suppress(BaseException):  # a signal that comes now must not lead back into the server
        threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _run(args: list[str]) -> None:
    """As the interpreter reads its command line: -m MODULE, -c CODE or a script, after -P perhaps."""
    safe = args[0] == "-P"
    kind, *rest = args[1:] if safe else args
    first = {"-m": str(Path.cwd()), "-c": ""}.get(kind, str(Path(kind).resolve().parent))
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [*([] if safe else [first]), *(path for path in added if path not in sys.path)]
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")
