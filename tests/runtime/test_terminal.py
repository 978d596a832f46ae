"""A terminal has its cursor back when a run ends, also where a progress bar is cut off."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import warm

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("ranks_that.py")
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"

STUCK = """
import time
from pathlib import Path
from mm_core.telemetry.progress import make_progress
from mm_core.runtime.launch.watchdog import Watchdog

watchdog = Watchdog(Path("run"), 0, 1, 0.4)
watchdog.start()
make_progress(10, 0).note("a bar is open")
time.sleep(100)
"""


def on_terminal(folder: Path, *command: object) -> tuple[int, str]:
    """Exit code and output of a command whose output is a terminal."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *map(str, command)]
    start = subprocess.Popen if "torch.distributed.run" in words else warm.Process
    with os.fdopen(theirs, "w") as stream:
        process = start(words, cwd=folder, stdout=stream, stderr=stream, env=environment)
    said = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # Linux says so when the last process has closed the other end
            break
        if not part:
            break
        said += part
    os.close(ours)
    return process.wait(60), said.decode()


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ([SCRIPT, "launch", "bar"], "rank 1: clip 3: nothing can be read here"),
        ([SCRIPT, "launch", "bar_killed"], "rank 1: clip 3: nothing can be read here"),
        (
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, SCRIPT, "bar"],
            "rank 1: clip 3: nothing can be read here",
        ),
        (["-c", STUCK], "step 0, start: no progress for"),
    ],
    ids=["a peer fails", "killed after a peer has failed", "a peer fails under torchrun", "stuck"],
)
def test_the_cursor_is_there_again(command, sentence, tmp_path):
    code, said = on_terminal(tmp_path, *command)
    assert code != 0 and f"mm: error: {sentence}" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said)
    assert HIDDEN in said, "a bar was open"
    assert said.rfind(SHOWN) > said.rfind(HIDDEN)
