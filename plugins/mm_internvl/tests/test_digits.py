"""A tiny InternVL learns to read: a short part of `benchmarks/internvl_digits.py`, whose bar is 95 %."""

from __future__ import annotations

import pytest

from support.scripts import script


@pytest.mark.slow
def test_two_ranks_begin_to_read_digits(tmp_path):
    """Exact answers to pictures that were not trained on; guessing would be right in 10 % of them."""
    benchmark = script("benchmarks/internvl_digits.py")
    accuracy, _ = benchmark.read_digits(tmp_path, steps=260, images=4000, nproc=2)
    assert accuracy >= 0.25
