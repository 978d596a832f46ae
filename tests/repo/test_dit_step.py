"""The benchmark of a DiT step runs from its single file, on any device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/dit_step.py"


@pytest.mark.slow
def test_it_prints_its_figures_and_appends_rows(tmp_path):
    out = tmp_path / "rows.md"
    environment = os.environ | {"MM_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    for recompute in ("auto", "6"):
        command = [sys.executable, SCRIPT, "--steps", "1", "--recompute", recompute, "--out", out]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        figures = dict(line.split("  ", 1) for line in done.stdout.splitlines() if "  " in line.strip())
        # Recomputation does not count as useful work: the number is the same with and without it.
        assert figures["operations a step"].strip() == "0.0455 TFLOP, recomputation not counted"
        assert done.stdout.splitlines()[-1].startswith("RESULT dit_step_seconds ")
        assert done.stdout.endswith(" - ok\n")
    head, rule, *rows = out.read_text().splitlines()
    assert head.count("|") == rule.count("|") == rows[0].count("|")
    assert ["0 of 6" in rows[0], "6 of 6" in rows[1], len(rows)] == [True, True, 2]
    assert list(tmp_path.iterdir()) == [out]
