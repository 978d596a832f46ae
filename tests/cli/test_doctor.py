"""`mm doctor`: each fault that is planted in an installation is named, with what fixes it."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mm_core.cli.installation.checks import Report, check_machine, check_packages
from mm_core.cli.main import main
from support.sites import clear_cache

pytestmark = pytest.mark.usefixtures("site")
HOOKS = "from mm_core import Component, hookimpl\n"
NPU = "torch_npu"


class Planted:
    """An installation in which a fault is planted: a site folder, the environment, a folder of devices."""

    def __init__(self, site: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.site, self.patch, self.folder = site, monkeypatch, folder
        self.dev = folder / "dev"
        (self.dev / "shm").mkdir(parents=True)
        self.runs = folder / "runs"
        for name in ("MM_DEVICE", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(folder))

    def stand_in(self, name: str, version: str, *requires: str) -> None:
        """Metadata of a distribution that is not there."""
        self.site.add(name, {}, version=version, requires=requires)

    def set(self, **variables: str) -> None:
        for name, value in variables.items():
            self.patch.setenv(name, value)

    def device(self, name: str) -> None:
        (self.dev / name).touch()

    def cann(self, version: str) -> None:
        """The files of a CANN toolkit by which its version is known."""
        home = self.folder / "Ascend/ascend-toolkit"
        (home / "x86_64-linux").mkdir(parents=True)
        (home / "x86_64-linux/ascend_toolkit_install.info").write_text(f"package_name=x\nversion={version}\n")
        (home / "set_env.sh").touch()
        self.set(ASCEND_TOOLKIT_HOME=str(home))

    def disk(self, **sizes: int) -> None:
        """A stand-in for a file system with other sizes, in blocks of a byte."""
        full = {"f_frsize": 1, "f_bavail": 10**12, "f_blocks": 10**12, "f_files": 10**6, "f_favail": 10**6}
        self.patch.setattr(os, "statvfs", lambda _: SimpleNamespace(**full | sizes))

    def limit(self, kind: int, number: int) -> None:
        """Lowers a limit of this process until the test ends."""
        resource.setrlimit(kind, (number, resource.getrlimit(kind)[1]))


@pytest.fixture
def planted(site: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Planted]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Planted(site, monkeypatch, tmp_path)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def named(report: Report, sentence: str) -> str:
    """What fixes the problem whose sentence has these words."""
    found = [finding.fix for finding in report.findings if sentence in finding.sentence]
    assert len(found) == 1, report.findings
    return found[0]


def unloaded(p: Planted) -> None:
    p.stand_in(NPU, "2.13.0")
    p.cann("9.1.0")
    p.patch.delenv("ASCEND_TOOLKIT_HOME")


def old_cann(p: Planted) -> None:
    p.stand_in("torch", "2.9.0")
    p.stand_in(NPU, "2.9.0.post3")
    p.cann("8.5.0")


def needs(p: Planted, requirement: str) -> None:
    p.site.plugin("needy", HOOKS, requires=("mm-core>=0.1,<0.2", requirement))


Faults = dict[str, tuple[Callable[[Planted], object], str, str]]
PACKAGES: Faults = {
    "torch is too old": (
        lambda p: p.stand_in("torch", "2.6.0"),
        "mm-core requires torch>=2.7, but 2.6.0 is installed",
        'pip install "torch>=2.7"',
    ),
    "torch_npu of another torch": (
        lambda p: (p.stand_in(NPU, "2.9.0"), p.stand_in("torch", "2.13.0")),
        "torch_npu 2.9.0 does not go together with torch 2.13.0",
        'pip install "torch_npu==2.13.*"',
    ),
    "torch_npu of another build": (
        lambda p: (p.stand_in(NPU, "2.9.0", "torch==2.9.0+cpu"), p.stand_in("torch", "2.9.0+cu128")),
        "torch_npu requires torch==2.9.0+cpu, but 2.9.0+cu128 is installed",
        'pip install "torch==2.9.0+cpu" (from PyTorch\'s own index: see the page "Install")',
    ),
    "set_env.sh is not sourced": (unloaded, "the environment of CANN is not loaded", "set_env.sh"),
    "no CANN": (
        lambda p: p.stand_in(NPU, "2.13.0"),
        "needs the CANN toolkit, which is not found",
        "bash Ascend-cann-toolkit_*.run --install",
    ),
    "CANN is too old": (
        old_cann,
        "torch_npu 2.9.0.post3 is made for CANN 9.0.0, and 8.5.0 is loaded",
        "install CANN 9.0.0",
    ),
    "a plugin's requirement is missing": (
        lambda p: needs(p, "no-such-library>=3"),
        "mm-needy requires no-such-library>=3, which is not installed",
        'pip install "no-such-library>=3"',
    ),
    "a plugin's requirement is too old": (
        lambda p: needs(p, "einops>=99"),
        "mm-needy requires einops>=99, but ",
        'pip install "einops>=99"',
    ),
    "a plugin imports what is missing": (
        lambda p: p.site.plugin("lost", HOOKS + "import no_such_library\n"),
        "No module named 'no_such_library'",
        "pip install no_such_library",
    ),
    "a plugin's own module is missing": (
        lambda p: p.site.add("mm-void", {"void": "mm_void.plugin"}),
        "No module named 'mm_void'",
        "pip install --force-reinstall mm-void, whose own package is incomplete",
    ),
    "a plugin raises": (
        lambda p: p.site.plugin("torn", HOOKS + "1 / 0\n"),
        "ZeroDivisionError",
        "pip install --force-reinstall mm-torn, or without it: MM_PLUGINS_DISABLE=torn",
    ),
    "a plugin of another mm-core": (
        lambda p: p.site.plugin("next", HOOKS, requires=("mm-core>=0.2",)),
        "it requires 'mm-core>=0.2'",
        "pip install --upgrade mm-next mm-core",
    ),
    "two plugins of one name": (
        lambda p: (p.site.plugin("twin", HOOKS), p.site.add("mm-other", {"twin": "mm_twin.plugin"})),
        "plugin 'twin' (mm-other 1.0) refused: the entry-point name 'twin' is claimed by",
        "pip uninstall mm-other, or the other",
    ),
    "a component without its class": (
        lambda p: p.site.plugin(
            "hollow",
            HOOKS + "@hookimpl\ndef mm_lr_schedules():\n    return [Component('flat', 'mm_hollow.no:Flat')]",
        ),
        "does not exist: there is no module 'mm_hollow.no'",
        "pip install --force-reinstall mm-hollow",
    ),
    "an unknown plugin is asked for": (
        lambda p: p.set(MM_PLUGINS="core,custom_dti"),
        "custom_dti",
        "unset MM_PLUGINS",
    ),
}
MACHINES: Faults = {
    "CUDA_DEVICE_MAX_CONNECTIONS": (
        lambda p: p.set(CUDA_DEVICE_MAX_CONNECTIONS="1"),
        "wait for computation",
        "unset CUDA_DEVICE_MAX_CONNECTIONS",
    ),
    "Ascend devices without torch_npu": (
        lambda p: p.device("davinci0"),
        "torch_npu is not",
        "pip install torch_npu==2.",
    ),
    "NVIDIA devices and a CPU build": (
        lambda p: (
            p.device("nvidia0"),
            p.patch.setattr("mm_core.cli.installation.checks._torch_build", lambda: None),
        ),
        "the installed torch is built without CUDA",
        "pip install --force-reinstall torch==2.",
    ),
    "hidden devices": (
        lambda p: (p.device("davinci0"), p.set(ASCEND_RT_VISIBLE_DEVICES="0,1")),
        "ASCEND_RT_VISIBLE_DEVICES='0,1' hides devices or names some that are not there",
        "unset ASCEND_RT_VISIBLE_DEVICES",
    ),
    "a device that is not there": (
        lambda p: p.set(MM_DEVICE="npu"),
        "MM_DEVICE=npu, and this machine has no such device",
        "unset MM_DEVICE",
    ),
    "an unused device": (
        lambda p: (p.device("nvidia0"), p.set(MM_DEVICE="cpu")),
        "runs do not use the devices",
        "unset MM_DEVICE",
    ),
    "variables of a launcher": (
        lambda p: (p.set(RANK="0", WORLD_SIZE="8"), p.patch.delenv("MASTER_ADDR", raising=False)),
        "no launcher has set RANK, WORLD_SIZE",
        "unset RANK WORLD_SIZE",
    ),
    "TMPDIR": (
        lambda p: p.set(TMPDIR="/no/such/folder"),
        "TMPDIR=/no/such/folder is not a folder",
        "export TMPDIR=/tmp",
    ),
    "a folder of runs that is a file": (
        lambda p: p.runs.write_text(""),
        "runs is not a folder that can be written to",
        "run.dir=FOLDER",
    ),
    "a full disk": (lambda p: p.disk(f_bavail=10**9), "only 1.0 GB are free", "sort -h shows what is large"),
    "no inodes": (lambda p: p.disk(f_favail=0), "has room for no more file", "sort -h"),
    "a small /dev/shm": (
        lambda p: p.disk(f_bavail=64_000_000, f_blocks=64_000_000),
        "shared memory has only 64.0 MB free of 64.0 MB",
        "docker run --shm-size=16g",
    ),
    "no /dev/shm": (lambda p: (p.dev / "shm").rmdir(), "shm does not exist", "--shm-size"),
    "few open files": (
        lambda p: p.limit(resource.RLIMIT_NOFILE, 256),
        "the limit of open files is 256",
        "ulimit -n 4096",
    ),
}


@pytest.mark.parametrize("fault", PACKAGES)
def test_a_fault_of_packages_is_named_with_what_fixes_it(fault: str, planted: Planted) -> None:
    plant, sentence, fix = PACKAGES[fault]
    plant(planted)
    clear_cache()
    report = Report()
    check_packages(report, os.environ)
    assert fix in named(report, sentence)


@pytest.mark.parametrize("fault", MACHINES)
def test_a_fault_of_the_machine_is_named_with_what_fixes_it(fault: str, planted: Planted) -> None:
    plant, sentence, fix = MACHINES[fault]
    plant(planted)
    report = Report()
    check_machine(report, os.environ, planted.runs, planted.dev)
    assert fix in named(report, sentence)


def test_the_command_prints_findings_and_ends_with_1_if_one_is_an_error(
    planted: Planted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["facts"]["torch"].startswith("2.")
    planted.site.plugin("torn", HOOKS + "1 / 0\n")
    clear_cache()
    assert main(["doctor", "--dir", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "1 error, " in printed and "  fix: pip install --force-reinstall mm-torn" in printed


def test_the_quick_part_imports_no_torch(site: Any, tmp_path: Path) -> None:
    code = (
        "import sys; from mm_core.cli.main import main; main(['doctor', '--dir', sys.argv[1]]);"
        " assert 'torch' not in sys.modules"
    )
    assert site.run("-c", code, str(tmp_path)).returncode == 0


@pytest.mark.slow
def test_the_deep_part_computes_communicates_and_stores(mm: Any, tmp_path: Path) -> None:
    done = mm("doctor", "--deep", "--dir", tmp_path / "runs", "--json", MM_DEVICE="cpu")
    facts = json.loads(done.out)["facts"]
    assert done.code == 0 and facts["two ranks"].startswith("add up a tensor")
    assert "MB/s" in facts["a saved file"] and not list(tmp_path.glob("mm_doctor_*"))
