"""How commands start their ranks: no module of the folder that they are typed in is imported."""

from __future__ import annotations

import subprocess

import pytest

from mm_core.cli.main import main
from mm_core.runtime.launch import launcher as launch
from mm_core.training import verify_resume


class Started(Exception):
    """Instead of the process."""


@pytest.fixture
def started(monkeypatch):
    """The words of what would be started."""
    found: list[str] = []

    def note(words, *given, **more):
        found.extend(words)
        raise Started

    monkeypatch.setattr(launch, "launch", note)
    monkeypatch.setattr(verify_resume.subprocess, "run", note)
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--config", "{config}", "--nproc", "2"],
        ["train", "--config", "{config}", "--nproc", "1", "--verify-resume", "1"],
        ["import", "--from", "{folder}", "--config", "{config}", "--nproc", "2"],
    ],
)
def test_ranks_are_started_without_the_working_folder(started, tiny, tmp_path, words):
    with pytest.raises(Started):
        main([word.format(config=tiny, folder=tmp_path) for word in words])
    assert tuple(started[:4]) == launch.COMMAND


def test_a_module_of_the_working_folder_shadows_none(tmp_path):
    (tmp_path / "argparse.py").write_text("raise SystemExit('a stranger ran')")
    done = subprocess.run([*launch.COMMAND, "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("mm ")
