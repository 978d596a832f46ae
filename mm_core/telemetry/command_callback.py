"""The built-in callback `command`: runs a user command on run events."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mm_core.builtin.configs.callbacks import CommandConfig
from mm_core.contracts import Callback
from mm_core.runtime.ranks import Ranks

_logger = logging.getLogger(__name__)

_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that would turn an `mm` command into a rank of this run, waiting for the other ranks."""


class Command(Callback):
    """Runs a user command on chosen run events, on rank 0, and waits until it ends.

    Its environment contains MM_EVENT, MM_RUN_DIR and MM_STEP, also MM_PATH (what was saved or sampled),
    MM_ERROR (if the run failed) and the latest metrics (MM_METRIC_LOSS ...). A command that fails is a
    warning; the run goes on.

    Args:
        run: program and arguments.
        events: events that start the program.
        timeout: most seconds that the program may take.
    """

    def __init__(
        self,
        run: Sequence[str],
        events: Sequence[str] = CommandConfig.events,
        timeout: float = CommandConfig.timeout,
    ) -> None:
        self._command, self._events, self._timeout = list(run), set(events), timeout
        self._run_dir = ""
        self._metrics: dict[str, str] = {}

    def run_started(self, run_dir: Path, step: int, last_step: int) -> None:
        self._run_dir = str(run_dir)
        self._run("run_started", step)

    def step_ended(self, step: int, metrics: Mapping[str, float] | None) -> None:
        if metrics is not None:
            self._note(metrics)

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._note(metrics)
        self._run("validated", step)

    def sampled(self, step: int, folder: Path) -> None:
        self._run("sampled", step, MM_PATH=str(folder))

    def saved(self, step: int, path: Path) -> None:
        self._run("saved", step, MM_PATH=str(path))

    def run_ended(self, step: int, error: BaseException | None) -> None:
        self._run("run_ended", step, **({"MM_ERROR": str(error)} if error is not None else {}))

    def _note(self, metrics: Mapping[str, float]) -> None:
        for name in ("loss", "validation/loss", "validation_ema/loss"):
            if name in metrics:
                self._metrics[f"MM_METRIC_{name.replace('/', '_').upper()}"] = f"{metrics[name]:.6g}"

    def _run(self, event: str, step: int, **more: str) -> None:
        if event not in self._events or Ranks.current().rank != 0:
            return
        variables = {"MM_EVENT": event, "MM_RUN_DIR": self._run_dir, "MM_STEP": str(step)}
        variables = {**environment_alone(), **variables, **self._metrics, **more}
        try:
            code, output = execute(self._command, variables, self._timeout)
        except (OSError, ValueError, subprocess.TimeoutExpired) as fault:
            _logger.warning("callback command at %s failed: %s", event, fault)
            return
        if code:
            _logger.warning(
                "callback command at %s ended with exit code %d: %s", event, code, output or "no output"
            )


def environment_alone() -> dict[str, str]:
    """The environment of this process without what would make a program a rank of its run."""
    started = ("TORCHELASTIC_", "MM_LAUNCH_DIR")
    return {n: v for n, v in os.environ.items() if n not in _OF_A_RANK and not n.startswith(started)}


def execute(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> tuple[int, str]:
    """Runs a callback's command; returns its exit code and the last 300 characters of its output.

    The command runs in its own session, so signals sent to the run do not reach it.

    Args:
        command: program and arguments.
        environment: its environment variables.
        timeout: seconds after which it is killed, with every process that it started.

    Raises:
        subprocess.TimeoutExpired: the command took longer than `timeout`.
        OSError: the program cannot be started.
    """
    with subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output.strip()[-300:]
