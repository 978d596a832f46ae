"""How a run begins: with the weights of another, or from an older checkpoint; and when it saves."""

from __future__ import annotations

import pytest
import torch

from mm_core.training.verify_resume import _tensors
from support.logs import log_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tiny, tmp_path_factory, mm):
    """A short run with an average."""
    folder = tmp_path_factory.mktemp("source")
    done = mm(
        "train",
        "--config",
        tiny,
        f"run.dir={folder}",
        "train.steps=3",
        "ema={decay: 0.5}",
        "lr_schedule={type: constant}",
        "checkpoint={every: 1, keep: 9}",
    )
    assert done.code == 0, done.err
    return folder / "tiny"


@pytest.mark.parametrize("weights", ["model", "ema"])
def test_a_warm_start_takes_the_weights_alone(weights, source, tiny, tmp_path, mm):
    done = mm(
        "train",
        "--config",
        tiny,
        "--nproc",
        2,
        f"run.dir={tmp_path}",
        "train.steps=0",
        "lr_schedule={type: constant}",
        f"init_from={{path: {source}, weights: {weights}}}",
    )
    assert done.code == 0, done.err
    assert "tensors loaded" in done.err
    taken = dict(_tensors(source / "checkpoints/step_00000003"))
    given = dict(_tensors(tmp_path / "tiny/checkpoints/step_00000000"))
    assert not any(name.startswith("optimizer.") for name in given)
    for name, tensor in given.items():
        part = weights if name.replace("model.", "ema.", 1) in taken else "model"
        assert torch.equal(tensor, taken[name.replace("model.", f"{part}.", 1)]), name


def test_a_damaged_newest_checkpoint_is_passed_over_loudly(source, tiny, mm):
    shard = source / "checkpoints/step_00000003/__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 3] ^= 4
    shard.write_bytes(data)
    done = mm(
        "train",
        "--config",
        tiny,
        "--nproc",
        2,
        f"run.dir={source.parent}",
        "train.steps=3",
        "ema={decay: 0.5}",
        "lr_schedule={type: constant}",
        "checkpoint={every: 1, keep: 9}",
    )
    assert done.code == 0, done.err
    assert "step_00000003 is skipped: this checkpoint is damaged: __0_0.distcp does not match" in done.err
    assert "at step 2 of 3" in done.err
    folder = source / "checkpoints"
    assert (folder / "step_00000003").is_dir() and list(folder.glob("step_00000003.damaged-*"))


def test_a_run_saves_by_the_clock_as_well(tiny, tmp_path, mm):
    done = mm(
        "train",
        "--config",
        tiny,
        "--nproc",
        2,
        f"run.dir={tmp_path}",
        "train.steps=4",
        "checkpoint={every: 1000, every_minutes: 0.0001, keep: 9}",
    )
    assert done.code == 0, done.err
    steps = {path.name for path in (tmp_path / "tiny/checkpoints").glob("step_*")}
    assert "step_00000004" in steps and len(steps) > 1, "not only the last step"


def test_a_save_that_fails_in_the_background_ends_the_run_by_name(tiny, tmp_path, mm):
    """The folder of checkpoints is taken away under a run that saves: an error of the system's own."""
    plugin = tmp_path / "taken_away.py"
    plugin.write_text(
        "import shutil\n"
        "from mm_core import Component, hookimpl\n"
        "from mm_core.contracts import Callback\n"
        "@hookimpl\n"
        "def mm_callbacks():\n"
        "    return [Component(name='taken_away', target='taken_away:TakenAway')]\n"
        "class TakenAway(Callback):\n"
        "    def run_started(self, run_dir, step, last_step):\n"
        "        self.folder = run_dir / 'checkpoints'\n"
        "    def saved(self, step, path):\n"
        "        shutil.rmtree(self.folder, ignore_errors=True)\n"
        "        self.folder.write_text('no folder any more')\n".replace("\\\n", "\n")
    )
    done = mm(
        "train",
        "--config",
        tiny,
        f"run.dir={tmp_path}",
        "train.steps=9",
        "checkpoint.every=1",
        "lr_schedule={type: constant}",
        f"plugins.path=[{plugin}]",
        "callbacks=[{type: local/taken_away}]",
    )
    assert done.code == 1 and "Traceback" not in done.err, done.err
    assert "mm: error: " in done.err and "checkpoint" in done.err.splitlines()[-2]
    rows = log_of(tmp_path / "tiny")
    assert rows[-1]["step"] < 9
