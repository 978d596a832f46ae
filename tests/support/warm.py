"""Python commands as processes of their own, without what costs them most: importing torch and the like.

A server imports those libraries once a test session and forks a process for each command; mm_core itself is
imported by the process, as ever. Ranks that such a command launches come from the same server. What a process
is to its parent and to its ranks stays true: a pid, signals, a session, an exit status, a parent whose end
is seen. A command whose environment changes what the libraries read at import starts as any process does,
and so do commands of tests that kill launchers, or that are about imports.
"""

from __future__ import annotations

import atexit
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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ADDRESS = "MM_TESTS_WARM"
"""The environment variable by which a command's own ranks find the server."""

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
)

_OWN = {**os.environ, "OMP_NUM_THREADS": "1"}
"""The server's environment: this process's as it began, before any test changes it."""

_AT_IMPORT = ("CUDA", "DIFFUSERS_", "HF_", "HOME", "PYTHON", "TORCH_CPP", "TORCH_LOGS", "TRANSFORMERS_")
_AT_START = ("PYTHONPATH", "PYTHONUNBUFFERED")


def _decisive(environment: Mapping[str, str]) -> dict[str, str]:
    """What the libraries read when they are imported."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_AT_IMPORT) and name not in _AT_START
    }


class Process:
    """A command under way: what subprocess.Popen tells of one, in the same words."""

    def __init__(
        self,
        args: Sequence[str],
        env: Mapping[str, str] | None = None,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        start_new_session: bool = False,
        cwd: str | Path | None = None,
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
        }
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(environment.setdefault(ADDRESS, _address()))
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

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

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
    """A Python command to its end, as subprocess.run with its output captured. text: its standard input.
    anew: as the interpreter begins, for tests of what is imported when."""
    words, environment = [sys.executable, *map(str, args)], dict(os.environ if env is None else env)
    if anew or not _is_warm(environment):
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


def mm(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """`mm ARGUMENTS`, as `run` runs it under these options."""
    return run(["-m", "mm_core.cli.main", *arguments], **options)


def _is_warm(environment: Mapping[str, str]) -> bool:
    """Whether libraries imported in this environment are those that the server has imported in its own."""
    return _decisive(environment) == json.loads(Path(_address()).with_name("decisive").read_text())


def _start(args: Sequence[str], env: Mapping[str, str], **streams: Any) -> Process | subprocess.Popen[bytes]:
    """What torch's elastic agent starts its ranks by, within a command of the server's."""
    kind = Process if _is_warm(env) else subprocess.Popen
    return kind(args, env=env, **streams)


@cache
def _address() -> str:
    """Where the server of this session listens; it is started when it is first asked."""
    if ADDRESS in os.environ:  # this process is one of the server's own
        return os.environ[ADDRESS]
    folder = tempfile.mkdtemp(prefix="warm-")
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), _OWN.get("PYTHONPATH")]))
    (Path(folder) / "decisive").write_text(json.dumps(_decisive(_OWN)))
    server = subprocess.Popen(
        [sys.executable, "-c", f"from support import warm; warm.serve('{folder}/address')"],
        env={**_OWN, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.communicate)  # the server ends with its standard input, however this process ends
    assert server.stdout is not None and server.stdout.readline() == b"ready\n"
    return f"{folder}/address"


def serve(address: str) -> None:
    """Forks a process for each request, until standard input ends."""
    for library in LIBRARIES:
        import_module(library)
    for own in ("", str(Path(__file__).parents[1])):
        sys.path.remove(own)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen(64)
        os.write(1, b"ready\n")
        os.dup2(2, 1)
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
    """Is the parent of one command: tells its pid and how it ended, and is gone when its client is."""
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
    select.select([ended, line], [], [])
    found, status = os.waitpid(child, os.WNOHANG)
    if found:
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
    tempfile.tempdir = None
    sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = _start
    code = 1
    try:
        _run(request["args"])
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
