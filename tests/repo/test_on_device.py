"""The device suite, which runs tiny forms of its parts here."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from mm_core.modules.casting import shards_mixed

ROOT = Path(__file__).parents[2]
SCRIPT = Path("benchmarks/on_device.py")


def started(folder: Path, *words: str, root: Path = ROOT, path: Path | None = None) -> subprocess.Popen[str]:
    """The suite without an accelerator; its page is `page.md` of a folder, its scratch files below it.

    Args:
        folder: where the page is written.
        words: parts and options.
        root: of the checkout.
        path: where Python finds packages; None: those that are installed.
    """
    (folder / "scratch").mkdir(parents=True)
    env = os.environ | {"MM_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "scratch")}
    python = [sys.executable]
    if path is not None:
        env["PYTHONPATH"], env["PYTHONNOUSERSITE"] = str(path), "1"
        python = [str(without_packages(folder))]
    command = [*python, str(root / SCRIPT), *words, "--out", str(folder / "page.md")]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def without_packages(folder: Path) -> Path:
    """The interpreter of a new virtual environment, which has no packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    return folder / "venv/bin/python"


def results(text: str) -> list[str]:
    """The RESULT lines of an output or page."""
    return re.findall(r"^RESULT \S+ \S+ \S+ (?:ok|short)$", text, re.MULTILINE)


def states(page: Path) -> dict[str, str]:
    """How each part of a page ended."""
    return dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", page.read_text(), re.MULTILINE))


def processes(folder: Path) -> list[str]:
    """Command lines of processes that name a folder."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = each.read_text().replace("\0", " ")
        except OSError:
            continue
        found += [words] if str(folder) in words else []
    return found


@pytest.mark.slow
def test_every_part_ends_and_every_figure_is_on_the_page(tmp_path):
    process = started(tmp_path, "--minutes", "40")
    printed, _ = process.communicate(timeout=2400)
    page = (tmp_path / "page.md").read_text()
    assert process.returncode == 0, printed
    expected = re.match(r"13 parts, (\d+) s on an H100 as expected, 40 minutes\n", printed)
    assert expected
    assert int(expected[1]) <= 9 * 60
    assert list(states(tmp_path / "page.md").values()) == ["ended"] * 13
    assert results(page) == results(printed)
    names = [line.split()[1] for line in results(page)]
    assert len(names) == len(set(names)) >= 36
    assert {
        "wan_49_shipped_seconds",
        "wan_49_late_seconds",
        "wan_17_moments_seconds",
        "wan_17_compiled_seconds",
    } <= set(names)
    assert {
        "parity_wan_losses",
        "fp16_overflow_left_out",
        "zero_3_adapters_losses",
        "wan_17_to_plain",
    } <= set(names)
    assert ("base_nf4_losses" in names) == shards_mixed()
    assert f"torch {importlib.metadata.version('torch')}" in page
    assert not list((tmp_path / "scratch").glob("on_device-*"))


@pytest.mark.slow
def test_what_a_killed_run_had_is_kept_and_nothing_runs_on(tmp_path):
    for moment in range(1, 6):
        folder = tmp_path / str(moment)
        page, deadline = folder / "page.md", time.monotonic() + 300
        process = started(folder, "late_norm", "fp16")
        while not page.exists() or len(results(page.read_text())) < moment:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.kill()
        process.communicate()
        assert len(results(page.read_text())) >= moment
        assert page.read_text().endswith("```\n")
        while left := processes(folder):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


@pytest.mark.slow
def test_a_part_is_cut_at_the_end_of_the_time_and_the_next_does_not_begin(tmp_path):
    process = started(tmp_path, "--minutes", "0.3", "resume", "growth")
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    resume, growth = states(tmp_path / "page.md").values()
    assert re.fullmatch(r"cut after \d+ s", resume), printed
    assert growth == "no time left"
    assert printed.endswith("short: none; did not end: resume\n")
    assert not processes(tmp_path)


@pytest.mark.slow
def test_a_checkout_is_enough(tmp_path):
    """With the packages that are here, but without mm_core and its plugins, in a copy of what git has."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if os.path.lexists(ROOT / name):
            (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "copy" / name, follow_symlinks=False)
    packages = tmp_path / "packages"
    packages.mkdir()
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"mm_|__editable__|.*\.pth$", each.name):
            (packages / each.name).symlink_to(each)
    process = started(tmp_path / "run", "parity", "start", root=tmp_path / "copy", path=packages)
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed
    assert len(results(printed)) == 4


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["wan_48"], "no such part: wan_48; there are parity, resume, "),
        (["--minutes", "nan"], "--minutes must be above 0"),
        (["--out", "nowhere/page.md"], "--out: there is no folder "),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(words, reason):
    done = subprocess.run([sys.executable, str(ROOT / SCRIPT), *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert reason in done.stderr


def test_the_page_has_its_figures_from_the_newest_device():
    names = [each.name for each in (ROOT / "benchmarks/results").glob("*.md") if "cpu" not in each.name]
    newest = max(names, key=lambda name: (name[:10], int((re.findall(r"-(\d+)\.md", name[10:]) or [1])[0])))
    page = (ROOT / "docs/make-it-fast.md").read_text(encoding="utf-8")
    assert f"`benchmarks/results/{newest}`" in page, "take the figures of the page from there"
