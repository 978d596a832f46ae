"""The Dockerfile: its steps of Python run in a clean environment, that of the system is simulated. No image
is built here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from support.pages import ROOT

TEXT = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
STEPS = [step.partition(" ") for step in re.split(r"\n(?=[A-Z]+ )", TEXT.replace("\\\n", " ").strip())]
ARGS = dict(re.findall(r"^ARG (\w+)=(.*)$", TEXT, re.MULTILINE))


def ignored() -> list[str]:
    """Names that the image leaves out anywhere."""
    return re.findall(r"^\*\*/(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)


def steps(kind: str) -> list[str]:
    return [" ".join(words.split()) for name, _, words in STEPS if name == kind]


def test_what_is_copied_is_there_and_not_left_out_of_the_build():
    copied = [name for words in steps("COPY") for name in words.split()[:-1]]
    kept = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert copied and sorted(copied) == sorted(kept)
    assert all((ROOT / name).exists() for name in copied)


def test_versions_of_the_image_are_those_of_the_repository():
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and pinned[1] == ARGS["TORCH"]
    row = rf"^\| [\d., ]*{re.escape(ARGS['TORCH_NPU'])}[\d., ]* \|"
    assert re.search(row, (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    assert ARGS["BASE"].startswith("python:3.11")


@pytest.mark.parametrize("device", ["cuda", "cpu", "ascend"])
def test_make_image_builds_for_a_device(device):
    done = subprocess.run(
        ["make", "--dry-run", "image", f"DEVICE={device}", "IMAGE=x:1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    line = " ".join(done.stdout.replace("\\\n", " ").split())
    assert f"--build-arg DEVICE={device} " in line and line.endswith("--tag x:1 .")
    assert ("BASE=quay.io/ascend/cann:" in line) == (device == "ascend")


def test_a_device_that_there_is_no_torch_for_ends_the_build():
    (step,) = [words for words in steps("RUN") if "TORCH_NPU" in words]
    done = subprocess.run(["sh", "-c", step], env={**ARGS, "DEVICE": "tpu"}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "DEVICE is cpu, cuda or ascend, not 'tpu'\n"


@pytest.mark.slow
def test_each_step_runs_and_its_environment_trains(tmp_path):
    system, *python = steps("RUN")
    if shutil.which("apt-get"):
        packages = re.search(r"apt-get install (.*?) &&", system)
        subprocess.run(["sh", "-c", f"apt-get install --simulate {packages[1]}"], check=True)
    for name, _, words in STEPS:
        if name == "COPY":
            *sources, target = words.split()
            for source in sources:
                to = tmp_path / target / (source if target == "./" else "")
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, to, ignore=shutil.ignore_patterns(*ignored()))
                else:
                    shutil.copy(ROOT / source, to)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    environment = {
        **os.environ,
        **ARGS,
        "DEVICE": "cpu",
        "CPU_INDEX": "",
        "PATH": f"{venv}/bin:{os.environ['PATH']}",
    }
    for step in python:
        subprocess.run(["sh", "-ec", step], cwd=tmp_path, env=environment, check=True)
    words = json.loads(steps("CMD")[0])
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([*words, "--json"], **run)
    assert done.returncode == 0, done.stdout + done.stderr
    listed = subprocess.run(["mm", "plugins", "list"], **run)
    assert all(name in listed.stdout for name in ("custom_dit/", "wan/", "diffusers/", "deepspeed/"))
