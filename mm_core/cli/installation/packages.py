"""Installed versions that must fit each other, and plugins that do not load. Nothing here imports torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from mm_core.cli.installation.findings import Report
from mm_core.errors import PluginError, plural
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


def installed(name: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def torch_build() -> str | None:
    """The CUDA version that the installed torch is built for; None for a CPU build, or without torch."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    text = file.read_text(encoding="utf-8") if file is not None and file.is_file() else ""
    found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)", text, re.MULTILINE)
    return found[1] if found else None


def check_packages(report: Report, environ: Mapping[str, str]) -> None:
    """Checks versions and plugins.

    Args:
        report: receives the findings.
        environ: environment variables.
    """
    torch, npu = installed("torch"), installed("torch_npu")
    built = torch_build()
    if torch is None:
        report.error("torch is not installed", 'pip install "torch>=2.7"')
    else:
        report.facts["torch"] = torch + (f", built for CUDA {built}" if built else ", built without CUDA")
    records = _check_plugins(report)
    names = {record.distribution for record in records if record.distribution != "mm-core"}
    paired = npu is None or torch is None or _check_pair(report, torch, npu)
    for name in ("mm-core", *sorted(names), *(["torch_npu"] if npu is not None and paired else [])):
        _check_requirements(report, name, torch is not None)
    if npu is not None:
        report.facts["torch_npu"] = npu
        _check_cann(report, npu, environ)


def _check_pair(report: Report, torch: str, npu: str) -> bool:
    """Whether torch and torch_npu are of the same minor version."""
    if Version(torch).release[:2] == Version(npu).release[:2]:
        return True
    wanted = ".".join(map(str, Version(torch).release[:2]))
    report.error(
        f"torch_npu {npu} does not go together with torch {torch}: their minor versions must be the same",
        f'pip install "torch_npu=={wanted}.*"',
    )
    return False


def _check_requirements(report: Report, name: str, torch_there: bool) -> None:
    """Checks that what a distribution requires is installed."""
    try:
        lines = distribution(name).requires or ()
    except PackageNotFoundError:
        return
    for line in lines:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        found, needs = installed(wanted.name), f"{wanted.name}{wanted.specifier}"
        if found is None and (wanted.name != "torch" or torch_there):
            report.error(f"{name} requires {needs}, which is not installed", f'pip install "{needs}"')
        elif found is not None and not wanted.specifier.contains(found, prereleases=True):
            index = " (from PyTorch's own index, see docs/install.md)" if "+cpu" in needs else ""
            report.error(
                f"{name} requires {needs}, but {found} is installed", f'pip install "{needs}"{index}'
            )


def _check_plugins(report: Report) -> tuple[PluginRecord, ...]:
    try:
        registry = survey()
    except PluginError as error:  # an environment variable names a plugin that does not exist
        report.error(error.what, f"unset {error.where}: {error.hint or error.accepted}")
        clean = {key: value for key, value in os.environ.items() if not key.startswith("MM_PLUGINS")}
        from mm_core.plugin.manager import discover

        registry = Registry(discover((), clean))
    plugins = registry.plugins
    report.facts["plugins"] = ", ".join(f"{plugin.namespace} {plugin.version}" for plugin in plugins)
    for plugin in plugins:
        if plugin.broken:
            report.error(f"{plugin.label} {plugin.status}: {plugin.error}", _plugin_fix(plugin))
        for found in plugin.components:
            if fault := found.path_fault("target", found.component.target):
                fix = f"pip install --force-reinstall {plugin.distribution}"
                report.error(f"{fault.where}: {fault.what}", fix)
        if plugin.imports_torch:
            fix = f"import torch in the target's module alone, or MM_PLUGINS_DISABLE={plugin.namespace}"
            report.warn(f"{plugin.label} imports torch when it is loaded: every command is slow", fix)
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


def _check_cann(report: Report, npu: str, environ: Mapping[str, str]) -> None:
    """Checks that CANN's environment is loaded, and of a version that goes with torch_npu."""
    home = environ.get("ASCEND_TOOLKIT_HOME") or environ.get("ASCEND_HOME_PATH")
    if not home or not Path(home).is_dir():
        scripts = (Path(folder).expanduser() / "set_env.sh" for folder in _TOOLKITS)
        script = next((path for path in scripts if path.is_file()), None)
        why = f"names {home}, which does not exist" if home else "is not set"
        if script is not None:
            report.error(
                f"the environment of CANN is not loaded: ASCEND_TOOLKIT_HOME {why}", f"source {script}"
            )
        else:
            report.error(
                f"torch_npu needs the CANN toolkit, which is not found: ASCEND_TOOLKIT_HOME {why}",
                "bash Ascend-cann-toolkit_*.run --install, then source its set_env.sh",
            )
        return
    texts = (file.read_text(errors="replace") for name in _CANN_FILES for file in Path(home).glob(name))
    versions = (re.search(r"version\w*\s*=\s*\W?(\d+\.\d+[\w.]*)", text, re.IGNORECASE) for text in texts)
    cann = next((match[1] for match in versions if match), None)
    report.facts["CANN"] = cann or f"of unknown version, in {home}"
    here = Version(npu)
    wanted = [made for made, first in _CANN.items() if any(_follows(here, Version(each)) for each in first)]
    if cann and wanted and _minor(cann) < _minor(wanted[-1]):
        report.warn(
            f"torch_npu {npu} is made for CANN {wanted[-1]}, and {cann} is loaded",
            f"install CANN {wanted[-1]} and source its set_env.sh, or an older torch_npu of the same torch",
        )


def _follows(npu: Version, first: Version) -> bool:
    return npu.release == first.release and npu >= first


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def counted(number: int, noun: str) -> str:
    """A count for a fact: `no device`, `8 devices`."""
    return plural(number, noun) if number else f"no {noun}"
