"""Hosts to reach by ssh: daemons of this machine on ports of their own, with keys of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.ranks import free_port

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
_CONFIG = """Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
"""


@contextmanager
def hosts(folder: Path, count: int) -> Iterator[tuple[list[int], Path]]:
    """The ports of daemons, and a folder for PATH whose `ssh` knows them; they end with the block."""
    for name in ("host_key", "key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    with suppress(PermissionError):
        Path("/run/sshd").mkdir(exist_ok=True)  # a daemon of root demands it
    ports, daemons = [free_port() for _ in range(count)], []
    for port in ports:
        config = folder / f"sshd_{port}"
        config.write_text(_CONFIG.format(port=port, folder=folder))
        daemons.append(subprocess.Popen([str(SSHD), "-D", "-e", "-f", config], stderr=subprocess.DEVNULL))
    program = folder / "bin/ssh"
    program.parent.mkdir()
    options = f"-F none -i {folder}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {options} "$@"\n')
    program.chmod(0o755)
    try:
        for port in ports:
            _wait_for(program, port)
        yield ports, program.parent
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()


def _wait_for(program: Path, port: int) -> None:
    until = time.monotonic() + 20
    while subprocess.run([program, "-p", str(port), "127.0.0.1", "true"], capture_output=True).returncode:
        assert time.monotonic() < until, f"no sshd at {port}"
        time.sleep(0.1)
