"""A tiny InternVL learns to read: a short part of `benchmarks/internvl_digits.py`, whose bar is 95 %."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "internvl_digits.py"


@pytest.mark.nightly
@pytest.mark.slow
def test_two_ranks_begin_to_read_digits(tmp_path):
    """Exact answers to pictures that were not trained on; guessing would be right in 10 % of them."""
    spec = importlib.util.spec_from_file_location("internvl_digits", SCRIPT)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    accuracy, _ = benchmark.read_digits(tmp_path, steps=260, images=4000, nproc=2)
    assert accuracy >= 0.25
