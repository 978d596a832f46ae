"""Checking Wan's configs stays light: no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFIGS = sorted((Path(__file__).parents[1] / "mm_wan/configs").glob("*.yaml"))
CHECK = """
import sys
from mm_core.cli.main import main
for path in sys.argv[1:]:
    assert main(["validate", path]) == 0
heavy = {"torch", "diffusers", "transformers", "peft", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""


def test_every_config_is_checked_without_torch():
    command = [sys.executable, "-c", CHECK, *map(str, CONFIGS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": ok (task core/text_to_video") == len(CONFIGS) > 5
