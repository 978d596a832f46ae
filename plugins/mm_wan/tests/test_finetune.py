"""Fine-tuning the tiny checkpoint on real clips: one seed of benchmarks/wan_finetune.py."""

from __future__ import annotations

import pytest

from support.scripts import script


@pytest.mark.slow
def test_the_held_out_loss_falls_and_a_resumed_run_has_the_same_bits(tmp_path):
    """Below 0.8 of the lower of its start and of what a model that predicts nothing gets."""
    benchmark = script("benchmarks/wan_finetune.py")
    benchmark.prepare(tmp_path, [1])
    outcome = benchmark.finetune(tmp_path, "random", 1, 150)  # half of the benchmark's steps
    nothing = benchmark.silent(tmp_path, 1)
    assert outcome.end <= benchmark.BAR * min(outcome.start, nothing)
    assert outcome.same
