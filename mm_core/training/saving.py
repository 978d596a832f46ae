"""Checkpoints of a run: when one is due, what it holds, and telling of those that are complete."""

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
    """Saves a run.

    Attributes:
        store: the run's checkpoints.
        state: the tensors of a checkpoint.
        facts: everything else of one.
        config_yaml: the resolved config.
        manifest: what the run is made of.
        step: that was saved last, or that the run began with.
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
        """Before the first step of this process; `step` steps were taken before."""
        self.step = step
        self.store.reserve(self.state())

    def due(self, step: int) -> bool:
        """Whether `checkpoint.every` asks for one after `step` steps."""
        return step % self.config.checkpoint.every == 0

    @property
    def due_by_clock(self) -> bool:
        """Whether `checkpoint.every_minutes` have gone by since the last save of this process."""
        minutes = self.config.checkpoint.every_minutes
        return minutes is not None and time.monotonic() - self._at >= 60 * minutes

    def save(self, step: int, metrics: Mapping[str, float], *, last: bool, evaluated: bool = True) -> None:
        """One checkpoint.

        Args:
            step: steps taken.
            metrics: of its evaluation, where that came before.
            last: of this process; it is complete when this returns.
            evaluated: whether the validation and samples that were due are there.
        """
        self.reporter.enter("checkpoint")
        facts = {**self.facts(), "metrics": json_numbers(metrics), "evaluated": evaluated}
        self.store.save(step, self.state(), facts, self.config_yaml, manifest=self.manifest)
        self.remember_code()
        self.step, self._at = step, time.monotonic()
        if last:
            self.store.wait()
        self.tell()

    def add(self, step: int, metrics: Mapping[str, float], *, evaluated: bool) -> None:
        """Figures for the checkpoint of `step`, which was saved before they were there."""
        if metrics or evaluated:
            self.store.add(step, json_numbers(metrics), evaluated=evaluated)

    def rescue(self, step: int, *, evaluated: bool) -> None:
        """Saves what was trained since the last checkpoint, where a data worker or a sample ends the run."""
        if step == self.step:
            return
        try:
            self.save(step, {}, last=True, evaluated=evaluated)
        except Exception as fault:  # the run ends by what came before
            self.reporter.note(f"warning: step {step} could not be saved: {fault}")

    def tell(self) -> None:
        """Names the checkpoints that have become complete. CheckpointError for one that failed."""
        for path in self.store.poll():
            self.reporter.note(f"saved {path}")
            self.callbacks.saved(int(path.name.removeprefix("step_")), path)

    def remember_code(self) -> None:
        """Modules that a plugin imports late are code of the run too."""
        if Ranks.current().rank == 0:
            remember_imports(self.config)

    def close(self, error: BaseException | None) -> None:
        """After the last step of this process, or where `error` ended it."""
        try:
            self.store.close(after_fault=error is not None)
        finally:
            if error is None:
                self.tell()


def best_metric(config: RunConfig) -> str | None:
    """The full name of `checkpoint.best`: of the average, where the run keeps one."""
    best = config.checkpoint.best
    if best is None or "/" in best:
        return best
    return f"{'validation' if config.ema is None else 'validation_ema'}/{best}"
