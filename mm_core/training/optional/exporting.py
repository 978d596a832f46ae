"""LoRA files of a run's adapters, written at each save: `checkpoint.export`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mm_core.contracts import Callback
from mm_core.runtime.background import BackgroundQueue
from mm_core.runtime.ranks import Ranks
from mm_core.telemetry.command_callback import environment_alone, execute

TIMEOUT = 1800.0
"""Seconds that one export may take."""

PATIENCE = 120.0
"""Seconds for which the end of a run waits for exports: what stopped it may have given it a few minutes."""


class ExportAtSaves(Callback):
    """Exports each complete checkpoint by `mm export`, in a process beside the run: on rank 0, without the
    device. An export that fails is a note; the run goes on.

    Args:
        layout: of the LoRA files, such as `lora/comfyui`.
        averaged: export the moving average of the weights.
        note: shows a sentence.
    """

    def __init__(self, layout: str, averaged: bool, note: Callable[[str], None]) -> None:
        self._options = ["--to", layout, *(["--ema"] if averaged else [])]
        self._note, self._ended = note, list[str]()
        self._queue = BackgroundQueue("mm_core exports", "exporting a checkpoint")

    def saved(self, step: int, path: Path) -> None:
        if Ranks.current().rank == 0:
            self._show()
            self._queue.give(partial(self._export, path))

    def run_ended(self, step: int, error: BaseException | None) -> None:
        late = self._queue.finish(PATIENCE)
        self._show()
        if late:
            self._note("warning: the run ends before its last exports are complete; mm export makes them")

    def _show(self) -> None:
        while self._ended:
            self._note(self._ended.pop(0))

    def _export(self, path: Path) -> None:
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
        self._ended.append(done if code == 0 else f"warning: {path.name} was not exported: {output}")
