"""A run folder that an earlier commit wrote resumes, samples and exports as it did there.

Commit 2ac59d3 wrote `old_runs/2ac59d3.tar.xz` (2 ranks, torch 2.13, CPU): `runs/base`, whose weights
`runs/lora` begins with; `runs/lora` with LoRA, an average and asynchronous saves, its checkpoint of step 6
and the metrics of all 12 steps; what `mm export --merge-lora` and `mm sample` made of it; `old.yaml` and the
clips.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from support.logs import log_of

pytestmark = pytest.mark.slow


@pytest.fixture
def old(tmp_path, monkeypatch) -> Path:
    with tarfile.open(Path(__file__).parent / "old_runs/2ac59d3.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)  # its configs name their files from there
    return tmp_path


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in log_of(run) if "loss" in row}


def test_an_old_run_resumes_with_the_losses_that_it_had(old, mm):
    expected = losses(old / "runs/lora")
    done = mm("train", "--config", "old.yaml", "--nproc", 2, "--resume", "auto")
    assert done.code == 0, done.err
    assert "step_00000006" in done.out + done.err
    after = losses(old / "runs/lora")
    assert sorted(after) == sorted(expected) == list(range(1, 13))
    for step in range(7, 13):
        assert after[step] == pytest.approx(expected[step], rel=1e-5)  # another processor rounds otherwise
    assert (old / "runs/lora/checkpoints/step_00000012").is_dir()


def frames(folder: Path) -> np.ndarray:
    """The eight frames on a contact sheet, of 64 x 64 pixels. That commit's sheet had no title."""
    top, left, pitch = (16, 0, 66) if folder.name == "old_sample" else (48, 4, 68)
    with Image.open(folder / "contact_sheet.png") as image:
        sheet = np.asarray(image)
    return np.stack([sheet[top : top + 64, x : x + 64] for x in range(left, left + 8 * pitch, pitch)])


def test_an_old_run_exports_the_same_weights_and_samples_the_same_clip(old, mm, same_clips):
    done = mm("export", "--run", "runs/lora", "--to", "safetensors", "--merge-lora", "--out", "export")
    assert done.code == 0, done.err
    expected, found = (load_file(old / folder / "model.safetensors") for folder in ("old_export", "export"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    prompt = ("--prompt", "a red circle moves left", "--seed", 0, "--steps", 4)
    done = mm("sample", "--run", "runs/lora", *prompt, "--out", "sample")
    assert done.code == 0, done.err
    assert same_clips(old / "old_sample", old / "sample", frames)
