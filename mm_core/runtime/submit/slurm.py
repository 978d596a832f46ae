"""A job of Slurm that trains a run: the text that `sbatch` takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from mm_core.device.resources import RESOURCES
from mm_core.errors import MMError, plural
from mm_core.runtime.submit import Submission, filled

WARNING = 65535
"""The earliest warning that Slurm gives, in seconds before the end of a job."""

EARLY = 60
"""Seconds by which Slurm may send the warning too early."""

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::([0-5]?\d))?(?::([0-5]?\d))?", re.ASCII)
_REPLACED = re.compile(r"^#SBATCH --([\w-]+)(?:=.*)?\n(?=(?:#SBATCH.*\n)*#SBATCH --\1(?:=|\n))", re.MULTILINE)
"""A line of the template before one of the user with the same key."""

_DEVICES = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")
_OWN = {
    "nodes": "--nodes",
    "time": "--time",
    "signal": "--grace",
    "ntasks": "--nproc",
    "ntasks-per-node": "--nproc",
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


def slurm_file(
    job: Submission, train: Sequence[str], time: str | None, more: Sequence[str], devices: bool
) -> str:
    """The text of a batch script.

    Args:
        job: the run and its hosts.
        train: the command that trains on one host, without the options of the rendezvous.
        time: the time limit; None: that of the partition.
        more: KEY=VALUE of the user, which replace lines of the same key.
        devices: whether to ask for devices.

    Raises:
        MMError: a time or an option that the job cannot have.
    """
    limit = None if time is None else seconds_of(time)
    if job.grace > WARNING:
        what = f"Slurm cannot warn {plural(job.grace, 'second')} before the end of a job"
        raise MMError(what, where="--grace", accepted=f"at most {WARNING}")
    if limit is not None and limit <= job.grace + EARLY:
        what = f"a job of {plural(limit, 'second')} that saves {plural(job.grace, 'second')} before its end"
        hint = f"ask for more time, or a shorter --grace (Slurm may warn {EARLY} seconds too early)"
        raise MMError(f"{what} would not train", where="--time", hint=hint)
    own, asked = _options(more), [] if time is None else [f"time={time}"]
    resource = RESOURCES[job.device]
    if devices and resource.slurm and own.keys().isdisjoint(_DEVICES):
        asked.append(resource.slurm.format(count=job.nproc))
    asked += [f"{key}={shlex.quote(value)}" if value else key for key, value in own.items()]
    text = filled(
        "slurm.sh",
        {
            "command": job.command,
            "name": job.name,
            "nodes": str(job.nodes),
            "nproc": str(job.nproc),
            "grace": str(job.grace),
            "here": shlex.quote(str(Path.cwd())),
            "more": [f"#SBATCH --{each}" for each in asked],
            "environment": [] if resource.kubernetes else [f"export MM_DEVICE={job.device}"],
            "folder": shlex.quote(str(job.config.run.folder)),
            "train": shlex.join([*train, *job.restarts]),
        },
    )
    return _REPLACED.sub("", text)


def _options(more: Sequence[str]) -> dict[str, str]:
    own = {}
    for each in more:
        key, sign, value = each.removeprefix("--").partition("=")
        if not re.fullmatch(r"[a-z][a-z0-9-]+", key) or not value.isprintable() or (sign and not value):
            hint = "--sbatch partition=long --sbatch account=vision --sbatch exclusive"
            what = f"{each!r} is not an option of sbatch"
            raise MMError(what, where="--sbatch", accepted="KEY or KEY=VALUE", hint=hint)
        if key == "array":
            hint = "print a file for each run, with a run.name of its own"
            raise MMError("the jobs of an array would be one run", where=f"--sbatch {each}", hint=hint)
        if key in _OWN:
            raise MMError(f"the file sets {key} itself", where=f"--sbatch {each}", hint=f"use {_OWN[key]}")
        own[key] = value
    return own
