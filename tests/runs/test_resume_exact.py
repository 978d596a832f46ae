"""A resumed run is the uninterrupted one, bit for bit, and a run may change its number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.logs import losses
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
FEATURES = (
    f"plugins.path=[{HERE / 'dropout_dit.py'}]",
    "task.predictor={type: local/dropout_dit, num_layers: 2, num_heads: 2, head_dim: 12,"
    " patch_size: [2, 2, 2], in_channels: 12, out_channels: 12, text_dim: 32, freq_dim: 32, ffn_dim: 48,"
    " rope_max_seq_len: 64}",
    "ema={decay: 0.9}",
    "checkpoint.every=5",  # 8 steps are an epoch
    "checkpoint.keep=9",
)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_resumed_in_the_middle_of_an_epoch_equals_uninterrupted(ranks, workers, tiny, tmp_path, mm):
    """With dropout in the model, an average of the weights, and the epoch's end behind the resume."""
    done = mm(
        "train", "--config", tiny, "--nproc", ranks, "--verify-resume", 5,
        f"run.dir={tmp_path}", f"data.loader.workers={workers}", *FEATURES,
    )  # fmt: skip
    assert done.code == 0, done.out + done.err
    assert "ema" in done.out and "bit-equal" in done.out


def test_two_ranks_then_one_then_four(tiny, tmp_path, mm):
    """The state is the same at load, to the bit; the losses that follow are the same to 1e-6."""
    base = ("train", "--config", tiny, *FEATURES, "train.steps=8", "lr_schedule={type: constant}")
    whole = tmp_path / "2"
    assert mm(*base, "--nproc", 2, f"run.dir={whole}").code == 0
    hashes = {}
    for ranks in (1, 2, 4):
        folder = tmp_path / f"then_{ranks}"
        shutil.copytree(whole, folder)
        shutil.rmtree(folder / "tiny/checkpoints/step_00000008")
        overrides = (*FEATURES, "train.steps=8", "lr_schedule={type: constant}", f"run.dir={folder}")
        outputs = run_ranks(HERE / "state_ranks.py", ranks, tiny, *overrides)
        states = [
            [line for line in output.splitlines() if line.startswith(("model.", "optimizer.", "ema."))]
            for output in outputs
        ]
        assert all(state == states[0] for state in states)
        hashes[ranks] = states[0]
        done = mm(*base, "--nproc", ranks, f"run.dir={folder}")
        assert done.code == 0, done.err
        assert losses(folder / "tiny") == pytest.approx(losses(whole / "tiny"), rel=0, abs=1e-6)
    assert hashes[1] == hashes[2] == hashes[4]
    assert {"ema", "model", "optimizer"} == {line.split(".")[0] for line in hashes[1]}
