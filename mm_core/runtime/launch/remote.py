"""The far end of an ssh connection: starts a command, passes signals on, and ends it with the connection."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from io import FileIO
from typing import Any

from mm_core.processes import descendants
from mm_core.runtime.launch.signals import SIGNALS

BEGAN = "mm: connected\n"
"""The first line on both streams; what the shell of the host printed before it is not the command's."""

SILENCE = 60.0
"""Seconds without a line after which the connection counts as gone: sshd notices a dead network in hours."""

GRACE = 120.0
"""Seconds that the command may take to save and end before it is killed with all that it has started."""


def main() -> int:
    """Runs the command that standard input's first line describes; returns its exit code.

    The line is JSON: `command`, `folder` and `environment`. Each further line is empty, or `signal NAME`. At
    the end of standard input the command is asked to save and end (SIGTERM).
    """
    orders = FileIO(0, closefd=False)  # without a buffer, which would hide lines from `select`
    order = json.loads(orders.readline() or "{}")
    if not order:
        return 1
    for stream in (sys.stdout, sys.stderr):
        stream.write(BEGAN)
        stream.flush()
    try:
        child = subprocess.Popen(
            order["command"],
            stdin=subprocess.DEVNULL,
            cwd=order["folder"],
            env=os.environ | order["environment"],
            start_new_session=True,
        )
    except OSError as fault:
        sys.stderr.write(
            f"mm: error: {fault.filename}: {fault.strerror}\n"
            "  hint: the folder and the interpreter of this command must be at the same paths on every host\n"
        )
        return 1
    for number in SIGNALS:
        signal.signal(number, lambda given, _: child.send_signal(given))
    threading.Thread(target=_listen, args=(orders, child), daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


def _listen(orders: FileIO, child: subprocess.Popen[Any]) -> None:
    while select.select([orders], [], [], SILENCE)[0] and (line := orders.readline()):
        if name := line.decode().strip().removeprefix("signal "):
            child.send_signal(signal.Signals[name])
    child.terminate()
    try:
        child.wait(GRACE)
    except subprocess.TimeoutExpired:
        for pid in (child.pid, *descendants(child.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
