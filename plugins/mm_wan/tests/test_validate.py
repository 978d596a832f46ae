"""Checking Wan's configs stays light: no torch, and well within a second of processor time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONFIGS = sorted((Path(__file__).parents[1] / "mm_wan/configs").glob("*.yaml"))
CHECK = """
import resource, sys
from mm_core.cli.main import main
for path in sys.argv[1:]:
    assert main(["validate", path]) == 0
    spent = resource.getrusage(resource.RUSAGE_SELF)
    if path == sys.argv[1]:
        print("seconds", spent.ru_utime + spent.ru_stime)
heavy = {"torch", "diffusers", "transformers", "peft", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""


def test_every_config_is_checked_without_torch_and_the_first_within_a_second():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHECK, *map(str, CONFIGS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("seconds "))
    assert float(line.split()[1]) < 1.0, line
    assert done.stdout.count(": ok (task core/text_to_video") == len(CONFIGS) > 5
