"""A launch on several hosts by ssh: the same command on each, one output, one end."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import IO, Any

from mm_core.errors import MMError
from mm_core.runtime.launch.remote import BEGAN
from mm_core.runtime.launch.restarts import Decision
from mm_core.runtime.launch.signals import PASSING as LOST
from mm_core.runtime.launch.signals import STOPPED, StopFlag

PAUSE = 10.0
"""Seconds until all hosts start again."""

PATIENCE = 30.0
"""Seconds that the other hosts have to end by themselves once too few are left."""

BY_HOSTFILE = "MM_BY_HOSTFILE"
"""Environment variable of a host's command: the restart of all hosts that has started it, as a line of
`restarts.jsonl`; `null` at the first start."""

_PASSED = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE"),
    *("NCCL_*", "HCCL_*", "GLOO_*", "ASCEND_*HOME*", "ASCEND_*PATH", "MM_*"),
)
_KEPT = ("*TOKEN*", "*SECRET*", "*PASSWORD*", "*KEY*", "MM_LAUNCH_DIR", "MM_AFTERMATH")
"""Variables of this process that hosts receive, and those of them that they do not."""

_BEATS = 10.0  # seconds between two signs of life
_SSH = "ssh -T -o BatchMode=yes -o ControlMaster=no -o ConnectTimeout=20 -o ServerAliveInterval=10"
_HOST = re.compile(r"(?:(\w[\w.-]*)@)?(\w[\w.-]*)(?::(\d+))?")
_WRITING = threading.Lock()


@dataclass(frozen=True)
class Host:
    """A host of a hostfile.

    Attributes:
        name: its name or address.
        slots: its ranks.
        user: the user to log in as; None: ssh's choice.
        port: of its sshd; None: ssh's choice.
    """

    name: str
    slots: int
    user: str | None = None
    port: int | None = None

    @property
    def label(self) -> str:
        """How output and errors name the host."""
        return self.name if self.port is None else f"{self.name}:{self.port}"

    @property
    def address(self) -> list[str]:
        """The words of ssh that name the host."""
        user = ["-l", self.user] if self.user is not None else []
        return [*user, *(["-p", str(self.port)] if self.port is not None else []), "--", self.name]


def read_hosts(path: Path) -> list[Host]:
    """The hosts of a hostfile, which has a line `HOST slots=N` for each.

    Raises:
        MMError: it cannot be read, or a line is not understood; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        raise MMError(f"the hostfile cannot be read: {fault}", where=str(path)) from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, 1):
        if words := line.partition("#")[0].split():
            host = _host(words, f"{path}, line {number}")
            if host.label in hosts:
                hint = f"one line for each host: {host.label} slots={host.slots + hosts[host.label].slots}"
                raise MMError(f"{host.label} is listed twice", where=f"{path}, line {number}", hint=hint)
            hosts[host.label] = host
    found = list(hosts.values())
    if not found:
        raise MMError(
            "the hostfile names no host", where=str(path), accepted="lines such as: worker-1 slots=8"
        )
    local = {host.label for host in found if _is_local(host)}
    if _is_local(found[0]) and len(local) < len(found):
        hint = "write the name by which the other hosts reach it"
        raise MMError(f"the other hosts cannot meet at {found[0].name}", where=str(path), hint=hint)
    return found


def _is_local(host: Host) -> bool:
    return host.name == "localhost" or host.name.startswith("127.")


def _host(words: Sequence[str], where: str) -> Host:
    named = _HOST.fullmatch(words[0])
    if named is None or int(named[3] or 1) not in range(1, 2**16):
        accepted = "HOST, USER@HOST or HOST:PORT"
        raise MMError(f"{words[0]!r} is not a host", where=where, accepted=accepted)
    # A scheduler may exceed `slots` up to max_slots; a run has exactly `slots` ranks.
    others = [word for word in words[1:] if not re.fullmatch(r"max[_-]slots=\d+", word)]
    if unknown := [word for word in others if not word.startswith("slots=")]:
        raise MMError(f"the word {unknown[0]!r} is unknown", where=where, accepted="slots=N")
    slots = [re.fullmatch(r"slots=([1-9]\d*)", word) for word in others]
    if len(slots) != 1 or slots[0] is None:
        what = "no slots" if not slots else "two numbers of slots" if len(slots) > 1 else f"{others[0]!r}"
        accepted = f"{words[0]} slots=8, the number of its ranks"
        raise MMError(f"{words[0]} has {what}", where=where, accepted=accepted)
    return Host(named[2], int(slots[0][1]), named[1], int(named[3]) if named[3] else None)


def check_name(host: str) -> None:
    """Raises MMError if this host does not know the name under which the hosts of a hostfile meet."""
    try:
        socket.getaddrinfo(host.strip("[]"), None)
    except (OSError, UnicodeError):
        hint = "names of ssh's config are known to ssh alone: write an address in the first line of the"
        hint += " hostfile, or add --rdzv-endpoint ADDRESS:PORT"
        raise MMError(f"the name {host} is not known to this host", where="rendezvous", hint=hint) from None


def passed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that hosts receive: those of an allow-list that are no secrets."""
    found = {
        name: value
        for name, value in environment.items()
        if any(fnmatchcase(name, each) for each in _PASSED)
        and not any(fnmatchcase(name, each) for each in _KEPT)
    }
    if "PYTHONPATH" in found:  # the far end starts in another folder
        found["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, found["PYTHONPATH"].split(os.pathsep)))
    return found


def ssh_words(host: Host, environment: Mapping[str, str]) -> list[str]:
    """The command line that connects to a host. What is run there, and its environment, come later, on
    standard input: a command line can be read by every user of either machine."""
    path = [f"PYTHONPATH={environment['PYTHONPATH']}"] if "PYTHONPATH" in environment else []
    far = shlex.join(["env", *path, sys.executable, "-P", "-m", "mm_core.runtime.launch.remote"])
    return [*_SSH.split(), *host.address, far]


class Session:
    """A command on a host, under way.

    Args:
        host: where it runs.
        command: program and arguments.
        out, err: called with each line of the command's output, from threads.
        restart: the value of `BY_HOSTFILE`.
    """

    def __init__(
        self,
        host: Host,
        command: Sequence[str],
        out: Callable[[str], Any],
        err: Callable[[str], Any],
        restart: str = "null",
    ) -> None:
        self.host, self.began, self.asked = host, False, False
        environment, pipe = passed(os.environ) | {BY_HOSTFILE: restart}, subprocess.PIPE
        try:
            # In a session of its own: Ctrl-C reaches the far end as a signal, not by the death of ssh.
            self.process = subprocess.Popen(
                ssh_words(host, environment), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except FileNotFoundError:
            raise MMError("the program ssh is not found", hint="install openssh-client") from None
        self._before: list[str] = []
        order = {"command": list(command), "folder": str(Path.cwd()), "environment": environment}
        self.send(json.dumps(order))
        streams = ((self.process.stdout, out), (self.process.stderr, err))
        self._threads = [threading.Thread(target=self._read, args=each, daemon=True) for each in streams]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: IO[bytes], show: Callable[[str], Any]) -> None:
        began = False
        with stream:
            for line in (raw.decode(errors="replace") for raw in stream):
                if began:
                    show(line)
                elif line == BEGAN:
                    began = self.began = True
                else:
                    self._before.append(line.strip())

    def send(self, line: str) -> None:
        """Sends a line to the far end, or nothing if it is gone; may be called by a signal handler."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):
            os.write(self.process.stdin.fileno(), f"{line}\n".encode())

    def ask(self, name: str) -> None:
        """Sends a signal to the command; may be called by a signal handler."""
        self.asked = True
        self.send(f"signal {name}")

    def end(self) -> None:
        """Ends the connection: the far end saves and ends its command."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    @property
    def cut(self) -> bool:
        """Whether the connection was lost, of one that has ended."""
        return self.process.returncode == 255 or self.process.returncode < 0

    def code(self) -> int | None:
        """The exit code of the command, `LOST` if the connection was lost; None while it runs.

        Raises:
            MMError: the command was never started.
        """
        code = self.process.poll()
        if code is None:
            return None
        self.end()
        for thread in self._threads:
            thread.join(5.0)
        if self.began:
            return LOST if self.cut else code
        printed = next((line for line in reversed(self._before) if line), f"exit code {code}")
        if self.cut:
            command = f"ssh -o BatchMode=yes {' '.join(self.host.address)} true"
            hint = f"this must work, without a question: {command}"
            raise MMError(f"ssh does not reach {self.host.label}: {printed}", hint=hint)
        hint = f"{sys.executable}, with mm_core, must be at the same path on every host"
        raise MMError(f"{self.host.label} cannot start the command: {printed}", hint=hint)


def worst(codes: Sequence[int]) -> int:
    """The exit code of a launch: the worst of its hosts'.

    An error comes before a lost host, and that before a requested end. A host that was lost does not matter
    where another has trained to the end.
    """
    if 0 in codes:
        codes = [code for code in codes if code != LOST]
    mild = (0, STOPPED, 130, LOST)
    return max(codes, key=lambda code: (code == 1, mild.index(code) if code in mild else len(mild)))


def port_of(run_id: str) -> int:
    """The rendezvous port of a run, so that two runs on a first host seldom meet at one."""
    return 20_000 + zlib.crc32(run_id.encode()) % 10_000


def run_on_hosts(
    hosts: Sequence[Host], command: Sequence[str], run_id: str, least: int, restarts: int = 0
) -> int:
    """Runs a command on each host, as a node of one rendezvous; returns the worst exit code.

    Signals go to every host. Hosts that go on after too few are left are ended; then all start again.

    Args:
        hosts: in order; the rendezvous is on the first.
        command: program and arguments of `mm train`, without those that differ between hosts.
        run_id: the rendezvous id.
        least: the number of hosts with which the run goes on.
        restarts: how often all hosts start again after the loss of one.

    Raises:
        MMError: a host cannot be reached, or cannot start the command, at the first start.
    """
    restart = "null"
    for number in range(restarts + 1):
        sessions: list[Session] = []
        with StopFlag(on_signal=partial(_forward, sessions), on_second=partial(_forward, sessions)) as stop:
            again = f"{run_id}.{number}" if number else run_id
            try:
                ended = _attempt(hosts, [*command, "--rdzv-id", again], least, sessions, stop, restart)
            except MMError as fault:
                if number == 0:
                    raise
                sys.stderr.write(f"mm: {fault.what}\n")  # a host that was lost may need minutes to be back
                ended, what = {"": LOST}, fault.what
            else:
                # A launcher that ends with 69 by itself has used its restarts up, or makes no headway.
                cut = {session.host.label for session in sessions if session.cut}
                lost = {host: code for host, code in ended.items() if host in cut or code > 130}
                what = ", ".join(f"{host} ended with {code}" for host, code in lost.items())
            codes = list(ended.values())
            if not what or 0 in codes or 1 in codes or number == restarts or _asked(stop):
                return worst(codes)
            decision = Decision(True, worst(codes), what, number=number + 1, seconds=PAUSE)
            restart = json.dumps(asdict(decision) | {"hosts": [host.label for host in hosts]})
            sys.stderr.write(f"mm: all hosts start again, {number + 1} of {restarts}, in {PAUSE:.0f} s\n")
            end = time.monotonic() + PAUSE
            while time.monotonic() < end:
                if _asked(stop):
                    return STOPPED
                time.sleep(0.1)
    raise AssertionError("the last attempt returns")


def _attempt(
    hosts: Sequence[Host],
    command: Sequence[str],
    least: int,
    sessions: list[Session],
    stop: StopFlag,
    restart: str,
) -> dict[str, int]:
    def show(host: Host, stream: Any) -> Callable[[str], None]:
        def write(line: str) -> None:
            with _WRITING:
                stream.write(f"[{host.label}] {line.rstrip()}\n")
                stream.flush()

        return write

    try:
        for rank, host in enumerate(hosts):
            own = ["--nproc", str(host.slots), "--node-rank", str(rank)]
            out, err = show(host, sys.stdout), show(host, sys.stderr)
            session = Session(host, [*command, *own], out, err, restart)
            sessions.append(session)
            if stop.requested is not None and not session.asked:  # before it was among the sessions
                session.ask(stop.requested)
        return _wait(sessions, least)
    finally:
        for session in sessions:
            session.end()
        for session in sessions:
            session.process.wait()


def _asked(stop: StopFlag) -> bool:
    return stop.requested is not None


def _forward(sessions: Sequence[Session], given: signal.Signals = signal.SIGINT) -> None:
    for session in sessions:
        session.ask(given.name)


def _wait(sessions: Sequence[Session], least: int) -> dict[str, int]:
    """Host -> exit code, in the order in which they end. One that is ended here for another's sake, and has
    nothing to save, ends by that signal: the error is not its own."""
    codes: dict[Session, int] = {}
    beat, too_few, ended = time.monotonic(), None, False
    while len(codes) < len(sessions):
        time.sleep(0.1)
        now = time.monotonic()
        if now - beat > _BEATS:
            beat = now
            for session in sessions:
                session.send("")
        for session in sessions:
            if session not in codes and (code := session.code()) is not None:
                codes[session] = STOPPED if ended and code > 130 else code
                if session.cut:
                    sys.stderr.write(f"mm: lost the connection to {session.host.label}\n")
        left = sum(codes.get(session, 0) in (0, STOPPED) for session in sessions)
        if too_few is None and (left < least or 1 in codes.values()):
            too_few = now
        if too_few is not None and now - too_few > PATIENCE:
            ended = True
            for session in sessions:
                session.end()
    return {session.host.label: code for session, code in codes.items()}
