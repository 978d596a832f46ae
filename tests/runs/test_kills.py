"""Four cells of the kill matrix; the benchmark goes through all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill_matrix.py"
CASES = (
    "rank 1/in a step",
    "launcher/before the first save",
    "data worker/in validation",
    "launcher and ranks/in a save",
)


@pytest.mark.slow
def test_nothing_is_left_of_a_run_that_is_killed_and_it_goes_on():
    command = [sys.executable, SCRIPT, "--only", *CASES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert "RESULT kill_matrix_1 4/4 4/4 ok" in done.stdout, done.stdout + done.stderr
    assert "RESULT kill_matrix_1_left 0 0 ok" in done.stdout
    assert done.returncode == 0
