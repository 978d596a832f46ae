"""Versions, plugins and the machine as a run finds them. Nothing here imports torch."""

from __future__ import annotations

import math
import os
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version

from mm_core.cli.options import human_size
from mm_core.errors import PluginError, plural
from mm_core.plugin.manager import discover
from mm_core.plugin.records import PluginRecord
from mm_core.plugin.registry import Registry, survey

_CANN = {
    "8.3.RC1": ("2.7.1", "2.8.0"),
    "8.5.0": ("2.7.1.post2", "2.8.0.post2", "2.9.0"),
    "9.0.0": ("2.7.1.post4", "2.8.0.post4", "2.9.0.post2", "2.10.0"),
    "9.1.0": ("2.7.1.post8", "2.9.0.post6", "2.10.0.post4", "2.11.0", "2.12.0"),
}
"""CANN -> the first torch_npu releases that its makers name for it; torch_npu's COMPATIBILITY.md, 2026."""

_CANN_FILES = ("*-linux/ascend_toolkit_install.info", "version.cfg", "compiler/version.info")
_TOOLKITS = ("/usr/local/Ascend/ascend-toolkit", "/usr/local/Ascend/cann", "~/Ascend/ascend-toolkit")

DISK, SHARED, FILES, TASKS = 20_000_000_000, 1_000_000_000, 4096, 2048
"""What a run should find: bytes of free disk and of shared memory, open files, processes with threads."""


@dataclass(frozen=True)
class Finding:
    """One problem of an installation.

    Attributes:
        severity: error: a run fails or computes something wrong; warning: it may fail, or is slow.
        sentence: what is wrong, and where.
        fix: the command that fixes it, or what to change.
    """

    severity: Literal["error", "warning"]
    sentence: str
    fix: str


@dataclass
class Report:
    """The findings, and what is installed.

    Attributes:
        facts: subject -> what was found about it.
        findings: the problems.
    """

    facts: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def error(self, wrong: object, sentence: str, fix: str) -> None:
        """Adds a problem with which a run fails, if it is there."""
        self.findings += [Finding("error", sentence, fix)] * bool(wrong)

    def warn(self, wrong: object, sentence: str, fix: str) -> None:
        """Adds a problem with which a run may fail, or is slow, if it is there."""
        self.findings += [Finding("warning", sentence, fix)] * bool(wrong)


def check_packages(report: Report, environ: Mapping[str, str]) -> None:
    """Checks versions and plugins.

    Args:
        report: receives the findings.
        environ: environment variables.
    """
    torch, npu, built = _installed("torch"), _installed("torch_npu"), _torch_build()
    if torch:
        report.facts["torch"] = torch + (f", built for CUDA {built}" if built else ", built without CUDA")
    report.error(torch is None, "torch is not installed", 'pip install "torch>=2.7"')
    plugins = {plugin.distribution for plugin in _check_plugins(report)} - {"mm-core"}
    apart = torch is not None and npu is not None and _minor(torch) != _minor(npu)
    report.error(
        apart,
        f"torch_npu {npu} does not go together with torch {torch}: their minor versions must be the same",
        'pip install "torch_npu=={}.{}.*"'.format(*_minor(torch or "0.0")),
    )
    for name in ("mm-core", *sorted(plugins), *(["torch_npu"] if npu and not apart else [])):
        _check_requirements(report, name, torch is not None)
    if npu is not None:
        report.facts["torch_npu"] = npu
        _check_cann(report, npu, environ)


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
    _check_limits(report, dev / "shm")


def _check_plugins(report: Report) -> tuple[PluginRecord, ...]:
    try:
        plugins = survey().plugins
    except PluginError as error:  # an environment variable names a plugin that does not exist
        report.error(True, error.what, f"unset {error.where}: {error.hint or error.accepted}")
        clean = {key: value for key, value in os.environ.items() if not key.startswith("MM_PLUGINS")}
        plugins = Registry(discover((), clean)).plugins
    report.facts["plugins"] = ", ".join(f"{plugin.namespace} {plugin.version}" for plugin in plugins)
    for plugin in plugins:
        report.error(plugin.broken, f"{plugin.label} {plugin.status}: {plugin.error}", _plugin_fix(plugin))
        for found in plugin.components:
            if fault := found.path_fault("target", found.component.target):
                fix = f"pip install --force-reinstall {plugin.distribution}"
                report.error(True, f"{fault.where}: {fault.what}", fix)
        report.warn(
            plugin.imports_torch,
            f"{plugin.label} imports torch when it is loaded: every command is slow",
            f"import torch in the target's module alone, or MM_PLUGINS_DISABLE={plugin.namespace}",
        )
    return plugins


def _plugin_fix(plugin: PluginRecord) -> str:
    """The command that fixes a plugin that does not load."""
    error, owner = plugin.error or "", plugin.distribution
    if plugin.status == "refused" and "requires" in error:
        return f"pip install --upgrade {owner} mm-core"
    if missing := re.search(r"No module named '([\w-]+)", error):
        if missing[1] != plugin.module.partition(".")[0]:
            return f"pip install {missing[1]}"
        return f"pip install --force-reinstall {owner}, whose own package is incomplete"
    if plugin.status == "refused":
        return f"pip uninstall {owner}, or the other distribution of that name"
    return f"pip install --force-reinstall {owner}, or without it: MM_PLUGINS_DISABLE={plugin.namespace}"


def _check_requirements(report: Report, name: str, torch_there: bool) -> None:
    """Checks that what a distribution requires is installed."""
    lines = requires(name) if _installed(name) else None
    for wanted in map(Requirement, lines or ()):
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            found, needs = _installed(wanted.name), f"{wanted.name}{wanted.specifier}"
            index = ' (from PyTorch\'s own index: see the page "Install")' if "+cpu" in needs else ""
            missing = found is None and (wanted.name != "torch" or torch_there)
            unfit = found is not None and not wanted.specifier.contains(found, prereleases=True)
            fix = f'pip install "{needs}"'
            report.error(missing, f"{name} requires {needs}, which is not installed", fix)
            report.error(unfit, f"{name} requires {needs}, but {found} is installed", fix + index)


def _check_cann(report: Report, npu: str, environ: Mapping[str, str]) -> None:
    """Checks that CANN's environment is loaded, and of a version that goes with torch_npu."""
    home = environ.get("ASCEND_TOOLKIT_HOME") or environ.get("ASCEND_HOME_PATH")
    if not home or not Path(home).is_dir():
        scripts = (Path(folder).expanduser() / "set_env.sh" for folder in _TOOLKITS)
        script = next((path for path in scripts if path.is_file()), None)
        why = f"names {home}, which does not exist" if home else "is not set"
        what, fix = "the environment of CANN is not loaded", f"source {script}"
        if script is None:
            what = "torch_npu needs the CANN toolkit, which is not found"
            fix = "bash Ascend-cann-toolkit_*.run --install, then source its set_env.sh"
        report.error(True, f"{what}: ASCEND_TOOLKIT_HOME {why}", fix)
        return
    texts = (file.read_text(errors="replace") for name in _CANN_FILES for file in Path(home).glob(name))
    versions = (re.search(r"version\w*\s*=\s*\W?(\d+\.\d+[\w.]*)", text, re.IGNORECASE) for text in texts)
    cann = next((match[1] for match in versions if match), None)
    report.facts["CANN"] = cann or f"of unknown version, in {home}"
    here = Version(npu)
    first = {made: [Version(each) for each in releases] for made, releases in _CANN.items()}
    wanted = [made for made in first if any(here.release == v.release and here >= v for v in first[made])]
    if cann and wanted:
        report.warn(
            _minor(cann) < _minor(wanted[-1]),
            f"torch_npu {npu} is made for CANN {wanted[-1]}, and {cann} is loaded",
            f"install CANN {wanted[-1]} and source its set_env.sh, or an older torch_npu of the same torch",
        )


def _check_devices(report: Report, environ: Mapping[str, str], dev: Path) -> None:
    ascend, nvidia = (len(list(dev.glob(name))) for name in ("davinci[0-9]*", "nvidia[0-9]*"))
    report.facts["devices"] = f"{_counted(ascend, 'Ascend device')}, {_counted(nvidia, 'NVIDIA device')}"
    torch = (_installed("torch") or "").partition("+")[0]
    report.error(
        ascend and _installed("torch_npu") is None,
        "Ascend devices are there, but torch_npu is not",
        f"pip install torch_npu=={torch}",
    )
    report.error(
        nvidia and not ascend and torch and _torch_build() is None,
        "NVIDIA devices are there, but the installed torch is built without CUDA",
        f'pip install --force-reinstall torch=={torch} (the build for your CUDA: see the page "Install")',
    )
    wanted, unset = environ.get("MM_DEVICE"), "unset MM_DEVICE"
    unused, absent = (
        (ascend or nvidia) and wanted == "cpu",
        not (ascend or nvidia) and wanted not in (None, "", "cpu"),
    )
    report.warn(unused, "MM_DEVICE=cpu: runs do not use the devices of this machine", unset)
    report.error(absent, f"MM_DEVICE={wanted}, and this machine has no such device", unset)
    for name, count in (("CUDA_VISIBLE_DEVICES", nvidia), ("ASCEND_RT_VISIBLE_DEVICES", ascend)):
        chosen = environ.get(name, "0")
        beyond = any(each.strip().isdigit() and int(each) >= count for each in chosen.split(","))
        wrong = f"{name}={chosen!r} hides devices or names some that are not there: this machine has {count}"
        report.error(count and (beyond or chosen.strip() in ("", "-1")), wrong, f"unset {name}")


def _check_variables(report: Report, environ: Mapping[str, str]) -> None:
    report.warn(
        environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1",
        "CUDA_DEVICE_MAX_CONNECTIONS=1 makes the gathers of the engine fsdp2 wait for computation",
        "unset CUDA_DEVICE_MAX_CONNECTIONS",
    )
    left = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in environ]
    report.error(
        left and "MASTER_ADDR" not in environ,
        f"no launcher has set {', '.join(left)}: a command takes itself for one of several ranks",
        f"unset {' '.join(left)}",
    )
    folder = environ.get("TMPDIR")
    unusable = folder and not _writable(Path(folder))
    report.error(unusable, f"TMPDIR={folder} is not a folder that can be written to", "export TMPDIR=/tmp")


def _check_disk(report: Report, runs: Path) -> None:
    place = next(each for each in (runs.absolute(), *runs.absolute().parents) if each.exists())
    if not _writable(place):
        fix = "choose another folder: run.dir=FOLDER"
        report.error(True, f"{place} is not a folder that can be written to", fix)
        return
    disk = os.statvfs(place)
    free = disk.f_bavail * disk.f_frsize
    report.facts["disk"] = f"{human_size(free)} free at {place}"
    fix = f"du -sh {place}/* | sort -h shows what is large; or run.dir=FOLDER on another disk"
    few, more = disk.f_files and disk.f_favail < 1000, _counted(disk.f_favail, "more file")
    report.warn(free < DISK, f"only {human_size(free)} are free at {place}: checkpoints may not fit", fix)
    report.error(few, f"the disk at {place} has room for {more}", fix)


def _check_limits(report: Report, shared: Path) -> None:
    """Checks shared memory, and the limits of a process."""
    fix = "mount -o remount,size=16G /dev/shm; in a container: docker run --shm-size=16g"
    lacks = f"{shared} does not exist: data workers cannot pass samples on"
    report.error(not shared.is_dir(), lacks, fix)
    if shared.is_dir():
        size = os.statvfs(shared)
        free, total = (human_size(blocks * size.f_frsize) for blocks in (size.f_bavail, size.f_blocks))
        report.facts["shared memory"] = f"{free} free of {total}"
        small = size.f_bavail * size.f_frsize < SHARED
        report.error(small, f"shared memory has only {free} free of {total}", fix)
    for kind, what, wanted, option in (
        (resource.RLIMIT_NOFILE, "open files", FILES, "n"),
        (resource.RLIMIT_NPROC, "processes", TASKS, "u"),
    ):
        soft, hard = (math.inf if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(kind))
        if soft >= wanted:
            report.facts[what] = "no limit" if soft == math.inf else f"at most {soft:,}"
        fix = f"ulimit -{option} {wanted}"
        if hard < wanted:
            fix += ", after raising the limit in /etc/security/limits.conf or docker run --ulimit"
        few = f"the limit of {what} is {soft:,}: data workers and ranks need more"
        report.error(soft < wanted, few, fix)


def _installed(name: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _torch_build() -> str | None:
    """The CUDA version that the installed torch is built for; None for a CPU build, or without torch."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    text = file.read_text(encoding="utf-8") if file is not None and file.is_file() else ""
    found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)", text, re.MULTILINE)
    return found[1] if found else None


def _writable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK)


def _minor(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")[:2]))


def _counted(number: int, noun: str) -> str:
    """A count for a fact: `no device`, `8 devices`."""
    return plural(number, noun) if number else f"no {noun}"
