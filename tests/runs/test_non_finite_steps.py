"""A loss or gradient that is not finite on one rank changes no weight on any, and is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mm_core.training.verify_resume import _tensors, compare_checkpoints

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def overrides(folder: Path, fault: str) -> tuple[str, ...]:
    return (
        f"run.dir={folder}",
        f"plugins.path=[{HERE / 'faulty_dit.py'}]",
        "task.predictor={type: local/faulty_dit, num_layers: 2, num_heads: 2, head_dim: 12,"
        " patch_size: [2, 2, 2], in_channels: 12, out_channels: 12, text_dim: 32, freq_dim: 32, ffn_dim: 48,"
        f" rope_max_seq_len: 64, fault: {fault}}}",
        "train.steps=5",
        "lr_schedule={type: constant}",
        "checkpoint={every: 1, keep: 9}",
        "ema={decay: 0.9}",
    )


@pytest.mark.parametrize(
    ("fault", "what", "module"),
    [
        (
            "output",
            "the loss is not finite",
            "the first module whose output is not finite is predictor.blocks.1",
        ),
        ("gradient", "the gradient norm is nan", "predictor.blocks.1.attn2"),
    ],
)
def test_the_run_ends_before_the_update_and_names_rank_samples_and_module(
    fault, what, module, tiny, tmp_path, mm
):
    done = mm("train", "--config", tiny, "--nproc", 2, *overrides(tmp_path, fault))
    assert done.code == 1 and "Traceback" not in done.err, done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("mm: error:")]
    assert line.startswith("mm: error: rank 1: step 3, samples ['"), line
    assert what in line and module in line and "no parameter was changed" in line
    assert "train.non_finite.policy=skip" in done.err
    checkpoints = tmp_path / "tiny/checkpoints"
    assert {path.name for path in checkpoints.glob("step_*")} == {"step_00000001", "step_00000002"}
    for checkpoint in checkpoints.glob("step_*"):
        assert all(torch.isfinite(tensor).all() for _, tensor in _tensors(checkpoint))


@pytest.mark.parametrize("fault", ["output", "gradient"])
def test_a_step_that_is_left_out_changes_nothing(fault, tiny, tmp_path, mm):
    done = mm(
        "train", "--config", tiny, "--nproc", 2, *overrides(tmp_path, fault), "train.non_finite.policy=skip"
    )
    assert done.code == 0, done.err
    assert "step 3 was skipped: " in done.err and " on rank 1; no parameter was changed" in done.err
    checkpoints = tmp_path / "tiny/checkpoints"
    before, after = checkpoints / "step_00000002", checkpoints / "step_00000003"
    assert all(result.ok for result in compare_checkpoints(before, after)), (
        "weights, moments and average stand"
    )
    assert not all(result.ok for result in compare_checkpoints(after, checkpoints / "step_00000004"))


def test_the_limit_of_steps_in_a_row_ends_the_run(tiny, tmp_path, mm):
    done = mm(
        "train", "--config", tiny, "--nproc", 2, *overrides(tmp_path, "output, calls: [2, 99]"),
        "train.non_finite={policy: skip, in_a_row: 2}",
    )  # fmt: skip
    assert done.code == 1
    assert "step 2 was skipped" in done.err
    assert "2 steps in a row skipped (limit: train.non_finite.in_a_row)" in done.err
