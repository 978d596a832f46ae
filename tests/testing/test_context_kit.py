"""The conformance check of `context_plan` fails for a plan with one wrong line."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.conformance import edited

PLUGIN = Path(__file__).with_name("context_predictor.py")
FAULTS = {
    "none": ("", "", ""),
    "a block attends to its part": (
        'attention=("blocks.{*}.attn1",)',
        'attention=("blocks.0.attn1",)',
        "in step 1 on 2 ranks that share samples (ulysses), the ",
    ),
    "the output has a part of the tokens": (
        'gather={"proj_out": 1}',
        "gather={}",
        "on 2 ranks that share samples (ulysses), the predictor fails: ",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_line_of_a_context_plan_fails_the_check(tmp_path, fault):
    old, new, reason = FAULTS[fault]
    outcome = edited(PLUGIN, tmp_path, "predictor", old, new).run("context_parallel")
    assert outcome.status == ("failed" if old else "passed"), outcome.reason
    assert reason in outcome.reason
