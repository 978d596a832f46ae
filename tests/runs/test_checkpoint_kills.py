"""A run that is killed while it saves goes on from its newest complete checkpoint, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill_while_saving.py"


@pytest.mark.slow
def test_four_kills_while_saving():
    """Two of one rank and two of two; the benchmark makes it fifty."""
    command = [sys.executable, SCRIPT, "--kills", "4", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert "RESULT kill_while_saving 4/4 4/4 ok" in done.stdout, done.stdout + done.stderr
    assert "bit-equal with undisturbed runs: yes" in done.stdout
    assert done.returncode == 0
