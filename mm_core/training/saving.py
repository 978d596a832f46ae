"""Saving checkpoints during training: when one is due, what it contains, and reporting complete ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mm_core.checkpoint.files.host_copies import State
from mm_core.checkpoint.files.layout import Document
from mm_core.checkpoint.store import CheckpointStore
from mm_core.config.sections import RunConfig
from mm_core.files import json_numbers
from mm_core.loading.known_code import remember_imports
from mm_core.runtime.ranks import Ranks
from mm_core.telemetry.reporter import RunReporter
from mm_core.training.callback_list import CallbackList


@dataclass
class Saving:
    """Saves the checkpoints of a training run.

    Attributes:
        config: the checked config.
        store: the run's checkpoints.
        state: returns the tensors to save.
        facts: returns the facts to save.
        config_yaml: the resolved config.
        manifest: the run's manifest.
        reporter: shows saved checkpoints.
        callbacks: are called after each complete checkpoint.
        step: the step that was saved last, or resumed from.
    """

    config: RunConfig
    store: CheckpointStore
    state: Callable[[], State]
    facts: Callable[[], Document]
    config_yaml: str
    manifest: Document
    reporter: RunReporter
    callbacks: CallbackList
    step: int = 0
    _at: float = field(default_factory=time.monotonic)

    def start(self, step: int) -> None:
        """Prepares saving before the first training step of this process; `step` steps were taken before."""
        self.step = step
        self.store.reserve(self.state())

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after training step `step`, by `checkpoint.every`."""
        return step % self.config.checkpoint.every == 0

    @property
    def due_by_clock(self) -> bool:
        """Whether a checkpoint is due by the clock: `checkpoint.every_minutes` since the last save."""
        minutes = self.config.checkpoint.every_minutes
        return minutes is not None and time.monotonic() - self._at >= 60 * minutes

    def save(self, step: int, metrics: Mapping[str, float], *, last: bool, evaluated: bool = True) -> None:
        """Saves a checkpoint of the training run.

        Args:
            step: steps taken.
            metrics: of the step's evaluation, if that came before.
            last: whether it is this process's last checkpoint; it is then complete when this returns.
            evaluated: whether the validation and samples that were due are done.
        """
        self.reporter.enter("checkpoint")
        facts = {**self.facts(), "metrics": json_numbers(metrics), "evaluated": evaluated}
        self.store.save(step, self.state(), facts, self.config_yaml, manifest=self.manifest)
        self.remember_code()
        self.step, self._at = step, time.monotonic()
        if last:
            self.store.wait()
        self.report_complete()

    def add(self, step: int, metrics: Mapping[str, float], *, evaluated: bool) -> None:
        """Adds validation metrics to the checkpoint of `step`, which was saved before the validation."""
        if metrics or evaluated:
            self.store.add(step, json_numbers(metrics), evaluated=evaluated)

    def rescue(self, step: int, *, evaluated: bool) -> None:
        """Saves the training steps since the last checkpoint when a data worker or a sample ends the run."""
        if step == self.step:
            return
        try:
            self.save(step, {}, last=True, evaluated=evaluated)
        except Exception as fault:  # the run ends with the earlier error
            self.reporter.note(f"warning: step {step} could not be saved: {fault}")

    def report_complete(self) -> None:
        """Reports the checkpoints that have become complete; CheckpointError if one failed."""
        for path in self.store.poll():
            self.reporter.note(f"saved {path}")
            self.callbacks.saved(int(path.name.removeprefix("step_")), path)

    def remember_code(self) -> None:
        """Records modules that plugins imported during training as trusted code of the run."""
        if Ranks.current().rank == 0:
            remember_imports(self.config)

    def close(self, error: BaseException | None) -> None:
        """Completes the last checkpoint after the last training step, or after `error` ended the run."""
        try:
            self.store.close(after_fault=error is not None)
        finally:
            if error is None:
                self.report_complete()


def best_metric(config: RunConfig) -> str | None:
    """The full metric name of `checkpoint.best`: that of the weight average, if the run keeps one."""
    best = config.checkpoint.best
    if best is None or "/" in best:
        return best
    return f"{'validation' if config.ema is None else 'validation_ema'}/{best}"
