"""A job of Slurm that trains a run: the text that `sbatch` takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from mm_core.device.resources import RESOURCES
from mm_core.errors import MMError, plural
from mm_core.runtime.submit import Submission, filled

WARNING = 65535
"""The earliest warning that Slurm gives, in seconds before the end of a job."""

EARLY = 60
"""Seconds by which Slurm may send the warning too early."""

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_DEVICES = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")
_OWN = {
    "nodes": "--nodes",
    "time": "--time",
    "signal": "--grace",
    "ntasks": "--nproc, and one task a host",
    "ntasks-per-node": "--nproc, and one task a host",
    "no-requeue": "the file's last lines, to edit",
}


def seconds_of(time: str) -> int | None:
    """Seconds of a time limit as Slurm writes them; None: without limit.

    Raises:
        MMError: it is none.
    """
    if time.lower() in ("infinite", "unlimited"):
        return None
    found = _TIME.fullmatch(time)
    if found is None:
        accepted = "MINUTES, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS or UNLIMITED"
        raise MMError(f"{time!r} is not a time of Slurm", where="--time", accepted=accepted)
    first, *rest = (int(part) for part in found.groups()[1:] if part is not None)
    if found[1] is not None:  # D-HH[:MM[:SS]]
        hours, minutes, seconds = (first, *rest, 0, 0)[:3]
        return 86400 * int(found[1]) + 3600 * hours + 60 * minutes + seconds
    hours, minutes, seconds = (first, *rest) if len(rest) == 2 else (0, first, *rest, 0)[:3]
    return 3600 * hours + 60 * minutes + seconds


def directives(job: Submission, time: str | None, more: Sequence[str], devices: bool) -> dict[str, str]:
    """Options of `sbatch` -> values; empty for those without.

    Args:
        job: the run and its hosts.
        time: the time limit; None: that of the partition.
        more: KEY=VALUE of the user, which replace those of the same key.
        devices: whether to ask for devices.

    Raises:
        MMError: a time or an option that the job cannot have.
    """
    if job.grace > WARNING:
        what = f"Slurm cannot warn {plural(job.grace, 'second')} before the end of a job"
        raise MMError(what, where="--grace", accepted=f"at most {WARNING}")
    limit = None if time is None else seconds_of(time)
    if limit is not None and limit <= job.grace + EARLY:
        what = f"a job of {plural(limit, 'second')} that saves {plural(job.grace, 'second')} before its end"
        what += " would not train"
        hint = f"ask for more time, or a shorter --grace (Slurm may warn {EARLY} seconds too early)"
        raise MMError(what, where="--time", hint=hint)
    asked = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        "exclusive": "",  # all cores of the host; `mem=0`: all memory
        "mem": "0",
        **({"time": time} if time is not None else {}),
        "signal": f"USR1@{job.grace}",
        "requeue": "",
        "open-mode": "append",
        "output": "%x-%j.out",
        "chdir": str(Path.cwd()),
    }
    own = _options(more)
    if devices and (line := RESOURCES[job.device].slurm) and own.keys().isdisjoint(_DEVICES):
        key, _, value = line.format(count=job.nproc).partition("=")
        asked[key] = value
    return asked | own


def _options(more: Sequence[str]) -> dict[str, str]:
    own = {}
    for each in more:
        key, _, value = each.removeprefix("--").partition("=")
        if not re.fullmatch(r"[a-z][a-z0-9-]+", key) or not value.isprintable():
            hint = "--sbatch partition=long --sbatch account=vision --sbatch exclusive"
            raise MMError(
                f"{each!r} is not an option of sbatch", where="--sbatch", accepted="KEY=VALUE", hint=hint
            )
        if key in _OWN:
            raise MMError(f"the file sets {key} itself", where=f"--sbatch {each}", hint=f"use {_OWN[key]}")
        own[key] = value
    return own


def slurm_file(job: Submission, options: Mapping[str, str], train: Sequence[str]) -> str:
    """The text of a batch script.

    Args:
        job: the run and its hosts.
        options: from `directives`.
        train: the command that trains on one host, without the options of the rendezvous.
    """
    lines = [
        f"#SBATCH --{key}" + (f"={shlex.quote(value)}" if value else "") for key, value in options.items()
    ]
    needed = {key: value for key, value in (("MM_DEVICE", job.device),) if not RESOURCES[value].kubernetes}
    return filled(
        "slurm.sh",
        {
            "command": job.command,
            "directives": lines,
            "environment": [f"export {key}={value}" for key, value in needed.items()],
            "folder": shlex.quote(str(job.config.run.folder)),
            "train": shlex.join([*train, *job.restarts]),
            "nproc": str(job.nproc),
            "nodes": str(job.nodes),
        },
    )
