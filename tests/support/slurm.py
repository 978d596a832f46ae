"""A cluster of Slurm on this machine: a controller and hosts that are daemons of their own, from Debian's
packages slurm-wlm and munge."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from support.ranks import free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged", "mungekey", "unshare")
_PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])

_CONF = """\
ClusterName=tests
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
MpiDefault=none
ReturnToService=2
SchedulerParameters=bf_interval=5,sched_interval=5
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """What keeps a cluster from starting here; None: nothing."""
    if lacking := [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]:
        return f"{', '.join(lacking)} missing (packages slurm-wlm and munge)"
    return None if os.geteuid() == 0 else "its daemons start as root"


@dataclass(frozen=True)
class Cluster:
    """A running cluster, and its commands."""

    environment: dict[str, str]
    inside: Sequence[str]

    def call(self, *command: object, cwd: Path | None = None, **more: str) -> str:
        """What a command prints, run where the names of hosts are known."""
        words = [*self.inside, *map(str, command)]
        env = self.environment | more
        done = subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}{done.stdout}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What the controller knows of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.call("scontrol", "show", "job", number)))

    def wait(self, number: str, done: Callable[[dict[str, str]], bool], seconds: float) -> dict[str, str]:
        """The job once it is as `done` says."""
        end = time.monotonic() + seconds
        while not done(found := self.job(number)):
            assert time.monotonic() < end, f"waited in vain: {found}"
            time.sleep(1)
        return found


@contextmanager
def cluster(folder: Path, hosts: int = 2) -> Iterator[Cluster]:
    """A cluster whose files lie in a folder; its hosts have names that only its own processes resolve."""
    names = [f"host-{number}" for number in range(hosts)]
    lines = [f"127.0.0.{number + 2} {name}" for number, name in enumerate(names)]
    (folder / "hosts").write_text("\n".join([Path("/etc/hosts").read_text(), *lines, ""]))
    cores = os.cpu_count()
    nodes = [
        f"NodeName={name} NodeHostname={os.uname().nodename} NodeAddr={line.split()[0]} Port={free_port()}"
        f" CPUs={cores} RealMemory=1000"
        for name, line in zip(names, lines, strict=True)
    ]
    conf = folder / "slurm.conf"
    conf.write_text(_CONF.format(port=free_port(), folder=folder, nodes="\n".join(nodes)))
    (folder / "state").mkdir()
    mount = f'mount --bind {folder}/hosts /etc/hosts && exec "$@"'
    inside = ["unshare", "--mount", "bash", "-c", mount, "inside"]
    environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(conf)}
    key, socket = folder / "munge.key", folder / "munge.socket"
    subprocess.run(["mungekey", "--create", "--keyfile", key], check=True, env=environment)
    files = {"socket": socket, "key-file": key, "pid-file": f"{folder}/m.pid", "log-file": f"{folder}/m.log"}
    munged = ["munged", "--foreground", "--force", f"--seed-file={folder}/m.seed"]
    daemons = [[*munged, *(f"--{name}={file}" for name, file in files.items())]]
    daemons += [["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in names)]
    started = []
    try:
        for command in daemons:
            started.append(
                subprocess.Popen([*inside, *command], env=environment, stdout=-3, stderr=-3, process_group=0)
            )
            end = time.monotonic() + 30
            while command[0] == "munged" and not socket.exists() and time.monotonic() < end:
                time.sleep(0.1)
        made = Cluster(environment, inside)
        _wait_for(made, hosts)
        yield made
        with suppress(AssertionError, subprocess.TimeoutExpired):  # ends jobs that a failed test has left
            made.call("scancel", "--full", "--signal=KILL", "--user=root")
    finally:
        for daemon in reversed(started):
            daemon.send_signal(signal.SIGTERM)
        for daemon in started:
            daemon.wait(30)


def _wait_for(made: Cluster, hosts: int) -> None:
    end, seen = time.monotonic() + 60, ""
    while time.monotonic() < end:
        with suppress(AssertionError):  # the controller does not answer yet
            seen = made.call("sinfo", "--noheader", "--format=%T %D")
            if seen.split() == ["idle", str(hosts)]:
                return
        time.sleep(0.5)
    raise AssertionError(f"the hosts of the cluster are not idle: {seen}")
