"""`mm doctor --hosts`: whether the hosts of a hostfile have the same versions, and a device for each slot."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_core.cli.installation.checks import Finding, Report
from mm_core.errors import MMError, plural
from mm_core.runtime.launch.hosts import Host, Session, check_name, read_hosts
from mm_core.runtime.launch.launcher import COMMAND

_SAME = ("python", "mm-core", "torch", "torch_npu", "CANN", "plugins")
"""Facts that hosts share."""


def check_hosts(report: Report, path: Path, options: Sequence[str]) -> None:
    """Asks each host of a hostfile for its own report, by ssh, and compares them with the first one.

    Args:
        report: receives the findings.
        path: the hostfile.
        options: of `mm doctor` on each host.
    """
    hosts = read_hosts(path)
    command = [*COMMAND, "doctor", "--json", "--meets-at", hosts[0].name, *options]
    printed: dict[Host, tuple[list[str], list[str]]] = {host: ([], []) for host in hosts}
    sessions = [Session(host, command, out.append, err.append) for host, (out, err) in printed.items()]
    found = {}
    for session in sessions:
        try:
            while session.code() is None:
                time.sleep(0.05)
            found[session.host] = _document(session.host, *printed[session.host])
        except MMError as fault:
            report.error(True, fault.what, str(fault.hint))
    if found:
        compare(report, found)


def check_meeting(report: Report, host: str) -> None:
    """Checks that this host knows the name of the first host of a hostfile."""
    try:
        check_name(host)
    except MMError as fault:
        report.error(True, fault.what, str(fault.hint))


def _document(host: Host, out: Sequence[str], err: Sequence[str]) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads("".join(out))
    except ValueError:
        last = next(reversed([*out, *err]), "nothing").strip()
        raise MMError(f"{host.label} prints no report but: {last}", hint="run mm doctor there") from None
    return document


def compare(report: Report, documents: Mapping[Host, dict[str, Any]]) -> None:
    """Adds what differs between the reports of hosts, and what each of them finds itself."""
    first, lead = next(iter(documents.items()))
    counts = [sum(map(int, re.findall(r"\d+", each["facts"]["devices"]))) for each in documents.values()]
    for (host, document), devices in zip(documents.items(), counts, strict=True):
        facts = document["facts"]
        report.facts[host.label] = (
            f"mm-core {facts['mm-core']}, torch {facts.get('torch')}, {facts['devices']}"
        )
        for each in document["findings"]:
            report.findings.append(
                Finding(each["severity"], f"{host.label}: {each['sentence']}", each["fix"])
            )
        for name in _SAME:
            there, here = (each.get(name, "none").split(", ") for each in (facts, lead["facts"]))
            report.error(
                there != here,
                f"{host.label} has {name} {_only(there, here)}, and {first.label} {_only(here, there)}",
                "install the same versions on every host",
            )
        slots = f"{host.label} has {plural(devices, 'device')} for slots={host.slots}"
        report.error(any(counts) and devices < host.slots, slots, f"slots={devices} in the hostfile")
        report.warn(devices > host.slots, slots, f"slots={devices} in the hostfile uses all of them")


def _only(there: Sequence[str], here: Sequence[str]) -> str:
    return ", ".join(part for part in there if part not in here) or "less"
