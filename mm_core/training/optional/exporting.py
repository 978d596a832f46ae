"""LoRA files of a run's adapters, written at each save: `checkpoint.export`."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

from mm_core.contracts import Callback
from mm_core.runtime.background import BackgroundQueue
from mm_core.runtime.launch.signals import StopFlag
from mm_core.runtime.ranks import Ranks
from mm_core.telemetry.command_callback import environment_alone, execute

TIMEOUT = 1800.0
"""Seconds that one export may take."""

PATIENCE = 120.0
"""Seconds for which the end of a complete run waits for its last export."""


class ExportAtSaves(Callback):
    """Exports each complete checkpoint by `mm export`, in a process beside the run: on rank 0, without the
    device. An export that fails is a note; the run goes on. Of waiting checkpoints the newest two are kept. A
    run that ends by an error or a signal waits for none.

    Args:
        layout: of the LoRA files, such as `lora/comfyui`.
        averaged: export the moving average of the weights.
        stop: records signals.
        note: shows a sentence; called by a thread, too.
    """

    def __init__(self, layout: str, averaged: bool, stop: StopFlag, note: Callable[[str], None]) -> None:
        self._options = ["--to", layout, *(["--ema"] if averaged else [])]
        self._stop, self._note = stop, note
        self._waiting: deque[Path] = deque()
        self._queue = BackgroundQueue("mm_core exports", "exporting a checkpoint")

    def saved(self, step: int, path: Path) -> None:
        if Ranks.current().rank == 0:
            self._waiting.append(path)
            if len(self._waiting) > 2:
                self._note(f"{self._waiting.popleft().name} is not exported: saves are faster than exports")
            self._queue.give(self._export)

    def run_ended(self, step: int, error: BaseException | None) -> None:
        stopped = error is not None or self._stop.requested is not None
        if stopped:
            self._waiting.clear()
        if self._queue.finish(0.0 if stopped else PATIENCE):
            self._note("warning: the run ends before its last export is complete; `mm export` makes the file")

    def _export(self) -> None:
        try:
            path = self._waiting.popleft()
        except IndexError:
            return
        command = [
            sys.executable,
            "-P",
            "-m",
            "mm_core.cli.main",
            "export",
            "--run",
            str(path),
            *self._options,
        ]
        try:
            code, output = execute(command, {**environment_alone(), "MM_DEVICE": "cpu"}, TIMEOUT)
        except Exception as fault:  # the run does not depend on it
            code, output = 1, str(fault)
        done = (output.splitlines() or [""])[-1]
        self._note(done if code == 0 else f"warning: {path.name} was not exported: {output}")
