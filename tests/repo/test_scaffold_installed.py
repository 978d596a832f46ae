"""What `mm plugins new` writes, as its author uses it: a wheel in a clean environment, its tests, a run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from mm_core.plugin.hookspecs import KINDS
from support.pages import blocks

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip")


class Environment:
    """A clean environment with the wheels of mm-core and its plugins; third-party packages are this one's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        self.python = folder / "venv/bin/python"
        found = self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
        self.site = Path(found.strip())
        (self.site / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(self, *arguments: object, cwd: Path, code: int = 0) -> str:
        """Runs Python in the environment, which exits with a code; returns what it prints."""
        spared = ("PYTHONPATH", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST")
        own = {name: value for name, value in os.environ.items() if name not in spared}
        command = [self.python, *map(str, arguments)]
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, env=own | {"OMP_NUM_THREADS": "1"}, timeout=600
        )
        assert done.returncode == code, f"{arguments}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def mm(self, *arguments: object, cwd: Path, code: int = 0) -> str:
        """Runs `mm ARGUMENTS` in the environment."""
        return self.run("-m", "mm_core.cli.main", *arguments, cwd=cwd, code=code)

    def install(self, *wheels: Path) -> None:
        """Installs wheels and nothing else."""
        command = [*PIP, "install", "-qq", "--no-deps", "--no-index", "--target", str(self.site)]
        subprocess.run([*command, *map(str, wheels)], check=True, stdin=subprocess.DEVNULL)

    def install_folder(self, project: Path) -> Path:
        """Builds a project's wheel, installs it and returns it."""
        wheels = project.parent / f"{project.name}-wheel"
        command = [*PIP, "wheel", "-qq", "--no-deps", "--no-build-isolation", "--no-index"]
        command += ["--wheel-dir", str(wheels), str(project)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        (wheel,) = wheels.glob("*.whl")
        self.install(wheel)
        return wheel


@pytest.fixture(scope="module")
def environment(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("clean"))
    made.install(*wheels.values())
    return made


def steps_of(run: Path) -> int:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return sum("loss" in json.loads(line) for line in lines)


@pytest.mark.slow
def test_a_new_predictor_is_green_trains_and_samples_at_once(environment: Environment) -> None:
    here = environment.folder / "author"
    here.mkdir()
    environment.mm("plugins", "new", "my-dit", cwd=here)
    environment.install_folder(here / "my-dit")
    assert "0 errors" in environment.mm("plugins", "check", "--import", cwd=here)
    assert "my_dit/predictor" in environment.mm("config", "list", cwd=here)
    project = here / "my-dit"
    tests = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project)
    assert " passed" in tests and "failed" not in tests
    environment.mm("config", "copy", "my_dit/predictor", cwd=here)
    environment.mm("train", "--config", "predictor.yaml", "train.steps=5", cwd=here)
    assert steps_of(here / "runs/my_dit_predictor") == 5
    out = here / "clips"
    words = ("--prompt", "a red circle moves left", "--steps", 2, "--out", out)
    environment.mm("sample", "--run", "runs/my_dit_predictor", *words, cwd=here)
    assert list(out.glob("*.mp4"))


@pytest.mark.slow
def test_the_tutorial_does_what_it_shows(environment: Environment) -> None:
    """Its commands in their order; pip gets no index here, so the new package is installed without others."""
    here = environment.folder / "tutorial"
    here.mkdir()
    alone = ("--no-deps", "--no-build-isolation", "--no-index", "-q")
    model = here / "my-dit/my_dit/predictor.py"
    last, listed = "", ""
    for block in blocks(ROOT / "docs/your-own-dit.md"):
        if block.language == "python":
            (here / str(block.file)).write_text(block.text)
        elif block.language == "diff":
            old, new = (
                "".join(f"{line[1:]}\n" for line in block.text.splitlines() if line[0] == sign)
                for sign in "-+"
            )
            text = model.read_text()
            assert text.count(old) == 1, old
            model.write_text(text.replace(old, new))
            if "attn_mask" in old:
                last = environment.mm("plugins", "test", "my-dit", cwd=here, code=1)
                model.write_text(text)
        elif block.language == "text":
            check, _, sentence = block.text.strip().partition(": ")[2].partition(": ... ")
            assert f"failed: {check}" in last and sentence.rpartition(", by")[0] in last
        for line in block.text.splitlines() if block.language == "bash" else ():
            program, *words = shlex.split(line)
            if program == "pip":
                verb, *rest = words
                pip = ("--python", environment.python) if verb == "install" else ()
                command = [*PIP, *map(str, pip), verb, *alone, *rest]
                subprocess.run(command, cwd=here, check=True, stdin=subprocess.DEVNULL)
            else:
                printed = environment.mm(*(["train"] if program == "mm-train" else []), *words, cwd=here)
                listed = printed if words[:2] == ["config", "list"] else listed
    assert "my_dit/predictor" in listed and steps_of(here / "runs/own_dit_predictor") == 20
    assert list((here / "clips").glob("*.mp4")) and list((here / "dist").glob("my_dit-*.whl"))
    assert steps_of(here / "runs/my_dit_predictor") == 100 and steps_of(here / "runs/silu") == 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_plugin_of_each_kind_is_green_and_runs(kind: str, environment: Environment, shapes: Path) -> None:
    name = f"new-{kind.replace('_', '-')}"
    package = name.replace("-", "_")
    here = environment.folder / kind
    here.mkdir()
    environment.mm("plugins", "new", name, "--kind", kind, cwd=here)
    environment.install_folder(here / name)
    tests = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=here / name)
    assert " passed" in tests and "failed" not in tests
    (here / "data").mkdir()
    (here / "data/clips").symlink_to(shapes)
    config = here / name / package / "configs" / f"{kind}.yaml"
    environment.mm("train", "--config", config, "train.steps=5", cwd=here)
    run = here / f"runs/{package}_{kind}"
    assert steps_of(run) == 5
    if kind == "weight_format":
        environment.mm("export", "--run", run, "--out", here / "exported", "--to", package, cwd=here)
        again = ("train.steps=5", f"init_from={{path: {here / 'exported'}}}", "run.name=again")
        environment.mm("train", "--config", config, *again, cwd=here)
        assert steps_of(here / "runs/again") == 5
