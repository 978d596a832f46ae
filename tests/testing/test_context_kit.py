"""The conformance check of `context_plan` fails for a plan with one wrong line."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.conformance import edited

PLUGIN = Path(__file__).with_name("context_predictor.py")
FAULTS = {
    "": ("", ""),
    "a block attends to a part": (
        'attention=("blocks.{*}.attn1",)',
        'attention=("blocks.0.attn1",)',
    ),
    "each rank has the first positions": (
        'split={"rope": {0: 1, 1: 1}, "blocks.0": {"x": 1}}',
        'split={"rope": {0: 0, 1: 0}, "blocks.0": {"x": 1}}',
    ),
    "a rank's output has a part of the tokens": (
        'gather={"proj_out": 1}',
        "gather={}",
    ),
    "attention of another kind": (
        'attention=("blocks.{*}.attn1",)',
        'attention=("blocks.{*}.ffn",)',
    ),
}
REASONS = {
    "a block attends to a part": "in step 1 on 2 ranks that share samples (ulysses), the ",
    "each rank has the first positions": "cannot be shared by 2 ranks",
    "a rank's output has a part of the tokens": "the predictor fails: ",
    "attention of another kind": "by something else than F.scaled_dot_product_attention",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_line_of_a_context_plan_fails_the_check(tmp_path, fault):
    outcome = edited(PLUGIN, tmp_path, "predictor", *FAULTS[fault]).run("context_parallel")
    assert outcome.status == ("failed" if fault else "passed"), outcome.reason
    assert REASONS.get(fault, "") in outcome.reason
