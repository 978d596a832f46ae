"""A tiny run on real clips of moving shapes, trained by real commands in real processes."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import pytest
import yaml
from PIL import Image

from support import warm
from support.sites import Site, clear_cache

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def shapes(tmp_path_factory) -> Path:
    """64 rendered clips with their annotation file."""
    folder = tmp_path_factory.mktemp("data") / "shapes"
    command = [sys.executable, ROOT / "examples/shapes/render.py", "--out", folder, "--clips", "64"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, shapes) -> Path:
    """The YAML of a tiny run: 8 samples a step in micro-batches of 2, checkpoints at 6 and 12."""
    config = {
        "run": {"name": "tiny", "dir": str(tmp_path_factory.mktemp("runs"))},
        "task": {
            "type": "text_to_video",
            "predictor": {
                "type": "custom_dit",
                "num_layers": 2,
                "num_heads": 2,
                "head_dim": 12,
                "patch_size": [2, 2, 2],
                "in_channels": 12,
                "out_channels": 12,
                "text_dim": 32,
                "freq_dim": 32,
                "ffn_dim": 48,
                "rope_max_seq_len": 64,
            },
            "autoencoder": {"type": "pixel", "spatial": 2},
            "text_encoder": {"type": "bytes", "hidden_size": 32},
            "scheduler": {"type": "flow_match", "shift": 5},
            "caption_dropout": 0.2,
        },
        "data": {
            "train": {
                "type": "video_text",
                "annotations": str(shapes / "data.json"),
                "num_frames": 8,
                "height": 16,
                "width": 16,
            },
            "loader": {"workers": 0},
        },
        "optimizer": {"type": "adamw", "lr": 1e-3},
        "lr_schedule": {"type": "cosine", "warmup_steps": 2},
        "train": {"steps": 12, "micro_batch_size": 2, "global_batch_size": 8},
        "checkpoint": {"every": 6},
    }
    path = tmp_path_factory.mktemp("configs") / "tiny.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a tiny vision-language model, written once per session."""
    import transformers

    from support.chat_models import save_chat_model

    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("processors of Transformers before 5.0 have no offsets of replaced text")
    folder = tmp_path_factory.mktemp("chat_models")
    return functools.cache(lambda name: save_chat_model(name, folder))


@pytest.fixture(scope="session")
def chat_rows(tmp_path_factory) -> Path:
    """The file of 60 conversations about drawn pictures, in a folder with the pictures."""
    from support.chat_rows import make_chat_rows

    return make_chat_rows(tmp_path_factory.mktemp("chat_rows"))


@pytest.fixture(scope="session")
def same_clips() -> Callable[..., bool]:
    """Whether two folders hold the same clips, by the contact sheet, which has every frame without a loss:
    of equal frames, x264 makes other bytes now and then, more often on a busy machine. What reads a sheet of
    another layout can be given."""

    def size(path: Path) -> tuple[int, int, int]:
        with av.open(str(path)) as container:
            frames = list(container.decode(video=0))
        return len(frames), frames[0].height, frames[0].width

    def sheet(folder: Path) -> np.ndarray:
        with Image.open(folder / "contact_sheet.png") as image:
            return np.asarray(image)[28:]  # below its title, which names the run

    def same(first: Path, second: Path, sheet: Callable[[Path], np.ndarray] = sheet) -> bool:
        names = [sorted(path.name for path in folder.glob("*.mp4")) for folder in (first, second)]
        assert names[0], f"{first} holds no clip"
        if names[0] != names[1]:
            return False
        if any(size(first / name) != size(second / name) for name in names[0]):
            return False
        one, other = sheet(first), sheet(second)
        rows = min(len(one), len(other))  # a sheet may have further clips, whose files a test removed
        return np.array_equal(one[:rows], other[:rows])

    return same


@pytest.fixture(scope="session")
def mm() -> Callable[..., Outcome]:
    """Runs `mm ARGUMENTS` as a person does."""

    def run(
        *arguments: object,
        timeout: float = 180,
        anew: bool = False,
        cwd: Path | None = None,
        **environment: str,
    ) -> Outcome:
        env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        done = warm.mm(*arguments, env=env, timeout=timeout, anew=anew, cwd=cwd)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Components of any form are built: tests of how targets are found and called need no real ones."""
    monkeypatch.setattr("mm_core.plugin.building.check_object", lambda *_: None)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty folder on sys.path for distributions of the test's own, and plugins found anew."""
    folder = tmp_path / "site"
    folder.mkdir()
    for variable in (
        "MM_PLUGINS",
        "MM_PLUGINS_DISABLE",
        "MM_PLUGINS_STRICT",
        "LOCAL_RANK",
        "RANK",
        "MM_DEBUG",
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    clear_cache()
    yield Site(folder)
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
    clear_cache()
