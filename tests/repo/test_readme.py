"""Runs the README: its commands, its Python code, and its example plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import pages as page

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


QUICKSTART = "configs/custom_dit/quickstart.yaml"
MAKE = "make VENV=$SHELL_VENV --assume-old=$SHELL_VENV/.installed"
INSTALL = "pip install --dry-run --no-deps --no-build-isolation --no-index"

# Line of the README -> the line that the test runs, its exit code, and text in its output. Long commands are
# shortened; commands that would change this environment are dry runs.
TINY = "train.steps=1 lr_schedule.warmup_steps=0"
MEDIA = (
    "'data.train={type: media_text, sources: [{annotations: data/shapes/data.json}], num_frames: 8,"
    " height: 16, width: 16}'"
)
HELD_OUT = (
    "'data.validation={type: video_text, annotations: data/shapes/data.json, num_frames: 8, height: 16,"
    " width: 16}' 'validation={every: 1}'"
)
WRITE = "from pathlib import Path; from mm_trainers.testing import ai_toolkit; ai_toolkit(Path())"
COMMANDS: dict[str, tuple[str, int, str]] = {
    "make train": (
        f'{MAKE} train ARGS="run.name=made train.steps=2 lr_schedule.warmup_steps=0"',
        2,
        "RESULT caption_colour 0",
    ),
    "make test": (f"{MAKE} --dry-run test", 0, 'python -m pytest -m "not slow"'),
    '.venv/bin/python -m pytest -m "not slow" -n 2 --dist loadfile': (
        f'{sys.executable} -m pytest -m "not slow" --collect-only tests/repo',
        0,
        "test_rooms.py",
    ),
    "pip install ./": (f"{INSTALL} ./", 0, "Would install mm-core-0.1.0"),
    "pip install ./plugins/mm_custom_dit": (
        f"{INSTALL} ./plugins/mm_custom_dit",
        0,
        "Would install mm-custom-dit-0.1.0",
    ),
    "mm plugins list": ("mm plugins list", 0, "custom_dit/custom_dit"),
    f"mm validate {QUICKSTART}": (f"mm validate {QUICKSTART}", 0, "ok"),
    f"mm validate {QUICKSTART} --print": (f"mm validate {QUICKSTART} --print", 0, "num_layers: 4"),
    f"mm-train --config {QUICKSTART} --nproc 2 --dry-run": (
        f"mm-train --config {QUICKSTART} --nproc 2 --dry-run",
        0,
        "predictor.blocks",
    ),
    f"mm-train --config {QUICKSTART} --nproc 2 train.steps=200 run.name=short": (
        f"mm-train --config {QUICKSTART} --nproc 2 run.name=short train.steps=4 lr_schedule.warmup_steps=0",
        0,
        "runs/short",
    ),
    'mm sample --run runs/short --prompt "a red circle moves left" --seed 0': (
        'mm sample --run runs/short --prompt "a red circle moves left" --seed 0',
        0,
        "contact_sheet.png",
    ),
    "mm-train --config FILE [key=value ...]": (
        f"mm-train --config {QUICKSTART} run.name=a {TINY}",
        0,
        "runs/a",
    ),
    "mm train": (f"mm train --config {QUICKSTART} run.name=b {TINY}", 0, "runs/b"),
    "mm-train --config FILE --dry-run": (f"mm-train --config {QUICKSTART} --dry-run", 0, "predictor"),
    "mm-train --config FILE --nproc N": (
        f"mm-train --config {QUICKSTART} --nproc 1 run.name=c {TINY}",
        0,
        "runs/c",
    ),
    "mm launch slurm --config FILE": (f"mm launch slurm --config {QUICKSTART} --nproc 2", 0, "#SBATCH"),
    "mm launch kubernetes --config FILE": (
        f"mm launch kubernetes --config {QUICKSTART} --nproc 2 --image mm",
        0,
        "kind: Job",
    ),
    "mm sample --run DIR --prompt TEXT": ("mm sample --run runs/short --prompt x --steps 1", 0, "1 clip in"),
    "mm-train --config FILE --verify-resume K": (
        f"mm-train --config {QUICKSTART} run.name=v {TINY} train.steps=2 --verify-resume 1",
        0,
        "the resumed run equals the uninterrupted run",
    ),
    "mm eval --run DIR": ("mm eval --run runs/short --rows 2 " + HELD_OUT, 0, "loss"),
    "mm import --from DIR --config FILE": (
        f"mm import --from runs/short --config {QUICKSTART} run.name=imported",
        0,
        "runs/imported/checkpoints/step_00000000",
    ),
    "mm export --run DIR --to FORMAT": (
        "mm export --run runs/short --to safetensors",
        0,
        "model.safetensors",
    ),
    "mm weights show PATH": ("mm weights show runs/short", 0, "predictor.blocks.{*}.attn1.to_q.weight"),
    "mm weights diff A B": ("mm weights diff runs/short runs/short", 0, " 0 different"),
    "mm report RUN...": ("mm report runs/short --out short.html", 0, "short.html"),
    "mm data inspect --config FILE": (
        f"mm data inspect --config {QUICKSTART} {MEDIA}",
        0,
        "16 x 16, 8 frames",
    ),
    "mm data check --config FILE": (f"mm data check --config {QUICKSTART} {MEDIA}", 0, " 0 bad"),
    "mm cache build --config FILE": (f"mm cache build --config {QUICKSTART}", 0, " latents"),
    "mm doctor": ("mm doctor", 0, "shared memory"),
    "mm align record": (f"mm align record --config {QUICKSTART} --steps 1 --out A", 0, ""),
    "mm align compare A B": ("mm align compare A A", 0, " 0 different"),
    "mm migrate PATH --out FILE": (
        f'python -c "{WRITE}"; mm migrate style.yaml --out migrated.yaml --accept',
        0,
        "train.adapters",
    ),
    "mm validate FILE [key=value ...]": (f"mm validate {QUICKSTART} train.steps=5", 0, "ok"),
    "mm config list": ("mm config list", 0, "custom_dit/quickstart"),
    "mm config copy NAME": ("mm config copy wan/t2v_1_3b copied.yaml", 0, "copied.yaml"),
    "mm config explain KEY": (f"mm config explain train.steps --config {QUICKSTART}", 0, "1500"),
    "mm config schema --out FILE": ("mm config schema --out schema.json", 0, "schema.json"),
    "mm plugins show NAME": ("mm plugins show custom_dit", 0, "num_layers"),
    "mm plugins check": ("mm plugins check", 0, "0 errors"),
    "mm plugins test NAME": ("mm plugins test core/flow_match", 0, "18 checks, 0 failures"),
    "mm plugins new my-dit": ("mm plugins new my-dit", 0, "my-dit: 8 files"),
    "make venv": (f"{MAKE} --dry-run venv", 0, "Nothing to be done"),
    "make lint": (f"{MAKE} --dry-run lint", 0, "ruff check"),
    "make bench": (f"{MAKE} --dry-run bench", 0, "benchmarks/*.py"),
    "make docs": (f"{MAKE} --dry-run docs", 0, "mkdocs build --strict"),
    "make image": (f"{MAKE} --dry-run image", 0, "docker build"),
}
PLUGIN_COMMANDS = {
    "pip install ./mm-small-dit",
    "mm plugins show small_dit",
    "mm-train --config small_dit.yaml --nproc 2",
}
"""Run by the test of the example plugin, in its own folder."""


def test_every_command_of_the_readme_is_run_by_a_test() -> None:
    assert set(page.command_lines(README)) == set(COMMANDS) | PLUGIN_COMMANDS


def test_the_test_command_is_what_make_test_runs_and_what_ci_extracts() -> None:
    (block,) = [block for block in page.blocks(README) if block.marker == "command: test"]
    recipe = subprocess.run(
        ["make", "--dry-run", "test", "--assume-old=.venv/.installed", "VENV=.venv"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert block.text in recipe.stdout
    script = (ROOT / ".ci/run").read_text()
    extraction = script[script.index("command=$(") : script.index("\n[[ -n $command ]]")]
    shown = subprocess.run(
        ["bash", "-c", f'{extraction}\necho "$command"'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert shown.stdout == block.text


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_command(line: str, run: Any) -> None:
    command, code, prints = COMMANDS[line]
    result = run(command, code)
    assert prints in result.stdout + result.stderr


@pytest.mark.slow
def test_the_python_of_the_readme_runs(run: Any, workspace: Path) -> None:
    (block,) = [block for block in page.blocks(README) if block.marker == "run: python"]
    (workspace / "readme_example.py").write_text(block.text + "print(tuple(clip.pixels.shape))\n")
    result = run("python readme_example.py")
    assert result.stdout.splitlines()[-1] == "(3, 8, 16, 16)"


def test_the_config_that_is_explained_is_the_quickstart() -> None:
    (block,) = [block for block in page.blocks(README) if (block.marker or "").startswith("excerpt: ")]
    whole = yaml.safe_load((ROOT / block.marker.removeprefix("excerpt: ")).read_text())
    assert _differences(yaml.safe_load(block.text), whole) == []


def _differences(part: Any, whole: Any, path: str = "") -> list[str]:
    """Keys of `part` that are missing in `whole` or have another value."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return [
            fault
            for key, value in part.items()
            for fault in _differences(value, whole.get(key), f"{path}.{key}".lstrip("."))
        ]
    return [] if part == whole else [f"{path}: {part!r} in the README, {whole!r} in the file"]


@pytest.fixture(scope="module")
def small_dit(workspace: Path) -> dict[str, str]:
    """Environment variables for the example plugin, which is written from the README and installed for these
    tests only."""
    for name, text in page.plugin_files(README).items():
        path = workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    site = workspace / "site_packages"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-qq",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*install, "--target", str(site), "./mm-small-dit"], cwd=workspace, check=True)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))}


def test_the_example_plugin_is_complete_and_small() -> None:
    files = page.plugin_files(README)
    assert set(files) == {
        "mm-small-dit/pyproject.toml",
        "mm-small-dit/small_dit/plugin.py",
        "mm-small-dit/small_dit/config.py",
        "mm-small-dit/small_dit/model.py",
        "small_dit.yaml",
    }
    assert len(files["mm-small-dit/small_dit/plugin.py"].splitlines()) <= 12


def test_the_example_plugin_is_listed_and_its_config_checks(run: Any, small_dit: dict[str, str]) -> None:
    assert "small_dit/small_dit" in run("mm plugins show small_dit", **small_dit).stdout
    assert "ok" in run("mm validate small_dit.yaml", **small_dit).stdout
    misspelt = run("mm validate small_dit.yaml task.predictor.dept=3", 1, **small_dit).stderr
    assert "depth" in misspelt


@pytest.mark.slow
def test_the_example_plugin_keeps_the_contract_by_the_kit_that_authors_run(
    run: Any, small_dit: dict[str, str], workspace: Path
) -> None:
    (block,) = [b for b in page.blocks(ROOT / "docs/writing-a-dit.md") if b.language == "python"]
    (workspace / "test_small_dit.py").write_text(block.text)
    result = run(f"{sys.executable} -m pytest -p no:cacheprovider test_small_dit.py", **small_dit)
    assert "FAILED" not in result.stdout


@pytest.mark.slow
def test_the_example_plugin_trains_on_two_ranks_and_samples(run: Any, small_dit: dict[str, str]) -> None:
    out = run("mm-train --config small_dit.yaml --nproc 2 train.steps=2", **small_dit).stdout
    assert "done: step 2 of 2" in out
    assert "1 clip in" in run("mm sample --run runs/small_dit --prompt x --steps 2", **small_dit).stdout
