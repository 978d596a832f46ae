"""The machine as a run finds it: devices, environment variables, disk, shared memory, limits."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path

from mm_core.cli.installation.findings import Report
from mm_core.cli.installation.packages import counted, installed, torch_build
from mm_core.cli.options import human_size

DISK, SHARED, FILES, TASKS = 20_000_000_000, 1_000_000_000, 4096, 2048
"""What a run should find: bytes of free disk and of shared memory, open files, processes with threads."""


def check_machine(report: Report, environ: Mapping[str, str], runs: Path, dev: Path = Path("/dev")) -> None:
    """Checks the machine.

    Args:
        report: receives the findings.
        environ: environment variables.
        runs: folder that runs are written to; it need not exist.
        dev: folder of the device files.
    """
    _check_devices(report, environ, dev)
    _check_variables(report, environ)
    _check_disk(report, runs)
    _check_shared_memory(report, dev / "shm")
    _check_limits(report)


def _check_devices(report: Report, environ: Mapping[str, str], dev: Path) -> None:
    ascend, nvidia = (len(list(dev.glob(name))) for name in ("davinci[0-9]*", "nvidia[0-9]*"))
    report.facts["devices"] = f"{counted(ascend, 'Ascend device')}, {counted(nvidia, 'NVIDIA device')}"
    torch = (installed("torch") or "").partition("+")[0]
    if ascend and installed("torch_npu") is None:
        report.error("Ascend devices are there, but torch_npu is not", f"pip install torch_npu=={torch}")
    if nvidia and not ascend and torch and torch_build() is None:
        report.error(
            "NVIDIA devices are there, but the installed torch is built without CUDA",
            f"pip install --force-reinstall torch=={torch} (the build for your CUDA: see docs/install.md)",
        )
    wanted, found = environ.get("MM_DEVICE"), ascend + nvidia
    if wanted == "cpu" and found:
        report.warn("MM_DEVICE=cpu: runs do not use the devices of this machine", "unset MM_DEVICE")
    elif wanted not in (None, "", "cpu") and not found:
        report.error(f"MM_DEVICE={wanted}, and this machine has no such device", "unset MM_DEVICE")
    for name, count in (("CUDA_VISIBLE_DEVICES", nvidia), ("ASCEND_RT_VISIBLE_DEVICES", ascend)):
        chosen = environ.get(name)
        numbers = [int(each) for each in (chosen or "").split(",") if each.strip().isdigit()]
        if chosen is None or not count:
            continue
        if any(number >= count for number in numbers) or chosen.strip() in ("", "-1"):
            report.error(
                f"{name}={chosen!r} hides devices or names some that are not there: this machine has {count}",
                f"unset {name}",
            )


def _check_variables(report: Report, environ: Mapping[str, str]) -> None:
    if environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        report.warn(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 makes the gathers of the engine fsdp2 wait for computation",
            "unset CUDA_DEVICE_MAX_CONNECTIONS",
        )
    left = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in environ]
    if left and "MASTER_ADDR" not in environ:
        report.error(
            f"no launcher has set {', '.join(left)}: a command takes itself for one of several ranks",
            f"unset {' '.join(left)}",
        )
    folder = environ.get("TMPDIR")
    if folder and not (Path(folder).is_dir() and os.access(folder, os.W_OK)):
        report.error(f"TMPDIR={folder} is not a folder that can be written to", "export TMPDIR=/tmp")


def _check_disk(report: Report, runs: Path) -> None:
    place = runs.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        report.error(
            f"{place} is not a folder that can be written to", "choose another folder: run.dir=FOLDER"
        )
        return
    disk = os.statvfs(place)
    free = disk.f_bavail * disk.f_frsize
    report.facts["disk"] = f"{human_size(free)} free at {place}"
    fix = f"du -sh {place}/* | sort -h shows what is large; or run.dir=FOLDER on another disk"
    if free < DISK:
        report.warn(f"only {human_size(free)} are free at {place}: checkpoints may not fit", fix)
    if disk.f_files and disk.f_favail < 1000:
        report.error(f"the disk at {place} has room for {counted(disk.f_favail, 'more file')}", fix)


def _check_shared_memory(report: Report, shared: Path) -> None:
    fix = "mount -o remount,size=16G /dev/shm; in a container: docker run --shm-size=16g"
    if not shared.is_dir():
        report.error(f"{shared} does not exist: data workers cannot pass samples on", fix)
        return
    size = os.statvfs(shared)
    total, free = size.f_blocks * size.f_frsize, size.f_bavail * size.f_frsize
    report.facts["shared memory"] = f"{human_size(free)} free of {human_size(total)}"
    if free < SHARED:
        report.error(f"shared memory has only {human_size(free)} free of {human_size(total)}", fix)


def _check_limits(report: Report) -> None:
    for kind, what, wanted, option in (
        (resource.RLIMIT_NOFILE, "open files", FILES, "n"),
        (resource.RLIMIT_NPROC, "processes", TASKS, "u"),
    ):
        soft, hard = resource.getrlimit(kind)
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            report.facts[what] = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft:,}"
            continue
        fix = f"ulimit -{option} {wanted}"
        if hard != resource.RLIM_INFINITY and hard < wanted:
            fix += ", after raising the limit in /etc/security/limits.conf or docker run --ulimit"
        report.error(f"the limit of {what} is {soft:,}: data workers and ranks need more", fix)
