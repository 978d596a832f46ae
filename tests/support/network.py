"""Two hosts on a switch, as namespaces of Linux: a cable that is pulled out resets no connection."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
SWITCH, *HOSTS = (f"mm-{os.getpid()}-{name}" for name in ("switch", "node1", "node2"))
NET = "10.77.0."
FIRST = f"{NET}1"
"""The address of the first host."""


def missing() -> str | None:
    """What keeps this machine from having such hosts; None if it can."""
    if IP is None:
        return "the program ip is not installed (package iproute2)"
    if os.geteuid() != 0:
        return "namespaces need root"
    allowed = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True).returncode == 0
    return None if allowed else "namespaces of networks are not allowed"


def _ip(*words: object, check: bool = True) -> None:
    subprocess.run([str(IP), *map(str, words)], check=check, stdout=subprocess.DEVNULL)


@contextmanager
def switch() -> Iterator[None]:
    """Both hosts, connected. They know each other by name."""
    try:
        _ip("netns", "add", SWITCH)
        _ip("-n", SWITCH, "link", "add", "br0", "type", "bridge")
        _ip("-n", SWITCH, "link", "set", "br0", "up")
        for number in (1, 2):
            power_on(number)
            plug(number)
        yield
    finally:
        for host in HOSTS:
            _ip("netns", "del", host, check=False)
            shutil.rmtree(f"/etc/netns/{host}", ignore_errors=True)
        _ip("netns", "del", SWITCH, check=False)


def power_on(number: int) -> None:
    """A host that has no connection of an earlier life; its cable is not plugged in."""
    host = HOSTS[number - 1]
    _ip("netns", "add", host)
    names = "".join(f"{NET}{index} {name}\n" for index, name in enumerate(HOSTS, 1))
    own = Path("/etc/netns") / host / "hosts"  # `ip netns exec` puts it in the place of /etc/hosts
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text(f"127.0.0.1 localhost\n{names}")
    _ip("-n", host, "link", "set", "lo", "up")
    _ip("-n", host, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{number}", "netns", SWITCH)
    _ip("-n", SWITCH, "link", "set", f"port{number}", "master", "br0")
    _ip("-n", host, "address", "add", f"{NET}{number}/24", "dev", "eth0")
    _ip("-n", host, "link", "set", "eth0", "up")


def power_off(number: int) -> None:
    """Its processes must have been killed."""
    _ip("-n", SWITCH, "link", "del", f"port{number}")  # with the namespace it would go some time later
    _ip("netns", "del", HOSTS[number - 1])


def plug(number: int) -> None:
    _ip("-n", SWITCH, "link", "set", f"port{number}", "up")


def unplug(number: int) -> None:
    _ip("-n", SWITCH, "link", "set", f"port{number}", "down")


def on(number: int) -> list[object]:
    """What comes before a command so that it runs on a host; its process id stays that of the command."""
    host = HOSTS[number - 1]
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host]
    return [IP, "netns", "exec", host, *named]
