"""What happens between training steps: weight average, callbacks, evaluation, checkpoints, stopping."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mm_core.checkpoint.files.host_copies import State
from mm_core.checkpoint.files.layout import Document
from mm_core.checkpoint.store import CheckpointStore
from mm_core.config.sections import RunConfig
from mm_core.config.stored import remember_imports
from mm_core.errors import MMError
from mm_core.files import json_numbers
from mm_core.optim.ema import EMA
from mm_core.runtime.launch.signals import StopFlag
from mm_core.runtime.launch.watchdog import Watchdog
from mm_core.telemetry.profiler import ProfileWindow
from mm_core.telemetry.reporter import RunReporter
from mm_core.training.callback_list import CallbackList
from mm_core.training.evaluating import Evaluating


@dataclass
class BetweenSteps:
    """Everything that a training run does between its steps, in order.

    Attributes:
        config: the checked config.
        steps: steps of the complete run.
        store: the run's checkpoints.
        state: returns the tensors to save.
        facts: returns the facts to save.
        manifest: the run's manifest.
        config_yaml: the resolved config.
        evaluating: validates, samples and tests.
        flag: records signals that ask this rank to save and stop.
        reporter: logs and shows.
        callbacks: the callbacks of the config.
        profile: records the profile.
        watchdog: ends a run that hangs.
        ema: the moving average of the weights; None without one.
        evaluated: whether the validation and samples of the step resumed from are done.
        stop_after: the step to stop after; None for the last one.
        step: steps taken.
        interrupted: whether the run stopped before its end.
    """

    config: RunConfig
    steps: int
    store: CheckpointStore
    state: Callable[[], State]
    facts: Callable[[], Document]
    manifest: Document
    config_yaml: str
    evaluating: Evaluating
    flag: StopFlag
    reporter: RunReporter
    callbacks: CallbackList
    profile: ProfileWindow
    watchdog: Watchdog
    ema: EMA | None = None
    evaluated: bool = True
    stop_after: int | None = None
    step: int = 0
    interrupted: bool = False
    settled: Callable[[], bool] = lambda: True
    """Ends a step whose norm is not read (see `LateSteps`); whether all steps taken may be saved."""
    _owed: bool = False
    """Whether the validation or the samples of `step` are due and not done yet."""
    _saved: int = 0
    """The step that was saved last, or resumed from."""
    _saved_at: float = field(default_factory=time.monotonic)

    def start(self, step: int) -> None:
        """Starts evaluation, watchdog, callbacks and saving before the first training step of this process.

        Args:
            step: steps taken before.
        """
        self.step = self._saved = step
        self.evaluating.start()
        self.watchdog.start()
        self.callbacks.call("run_started", self.config.run.folder, step, self.steps)
        self.store.reserve(self.state())
        settings, done = self.config.validation, step == self.steps
        if step == self.steps == 0:
            self.save(0, {}, last=True)  # a run without steps still saves its weights
        elif step == 0 and settings is not None and settings.at_start:
            _, self.interrupted = self.evaluating.run(0, always=True)
        elif not self.evaluated:
            metrics, self.interrupted = self.evaluating.run(step, always=done, again=True)
            if self.evaluating.due(step, always=done):
                self._add(step, metrics, evaluated=not self.interrupted)
        if 0 < step == self.steps and not self.interrupted:
            self.interrupted = not self.evaluating.run_test(step, unless_logged=True)

    def step_begins(self, step: int) -> None:
        """Called when training step `step` (from 0) begins."""
        self.watchdog.step(step + 1)
        self.profile.step_begins(step + 1)

    def fault(self) -> MMError | None:
        """The error of a background save since the last training step; None without one."""
        try:
            self._report_complete()
        except MMError as fault:
            return fault
        return None

    @property
    def stop(self) -> bool:
        """Whether this rank was asked to save and stop after the current training step."""
        return self.flag.requested is not None or self.step + 1 == self.stop_after

    @property
    def save_due(self) -> bool:
        """Whether a checkpoint is due by the clock of this rank (`checkpoint.every_minutes`)."""
        minutes = self.config.checkpoint.every_minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def updated(self, step: int, refused: str | None) -> None:
        """Called after a training step has updated the weights, or was skipped.

        Args:
            step: number of the step, from 1.
            refused: why the step was skipped; None for an update.
        """
        if refused is not None:
            self.reporter.note(f"step {step} was skipped: {refused}")
        elif self.ema is not None:
            self.ema.update(step)

    def follows(self, step: int, *, stop: bool, save: bool) -> bool:
        """Whether something after a training step needs its outcome before the next one begins.

        Args:
            step: steps taken.
            stop: whether all ranks agreed to stop.
            save: whether all ranks agreed to save.
        """
        due = self._saves(step, stop, save) or self.evaluating.due(step, always=step == self.steps)
        return due or self.callbacks.follow_steps or self.profile.running

    def after_step(self, step: int, logged: Mapping[str, float] | None, *, stop: bool, save: bool) -> bool:
        """Saves, validates and samples as due after a training step; returns whether the run ends here.

        Args:
            step: steps taken.
            logged: the metrics logged for this step; None if none were.
            stop: whether all ranks agreed to stop.
            save: whether all ranks agreed to save.
        """
        self.step = step
        self.profile.step_ended(step)
        self.callbacks.call("step_ended", step, logged)
        done = step == self.steps
        due = self.evaluating.due(step, always=done)
        saving = self._saves(step, stop, save)
        if saving:
            # Before the evaluation: a validation that fails, on one rank or on all, loses no step. Metrics
            # are added to the checkpoint; an evaluation that was cut short is repeated at the resume.
            self.save(step, {}, last=stop or done, evaluated=not due)
        if not stop:
            self._owed = due
            metrics, stop = self.evaluating.run(step, always=done)
            self._owed = False
            if saving and due:
                self._add(step, metrics, evaluated=not stop)
            elif stop:
                self.save(step, metrics, last=True, evaluated=False)
            stop = stop or (done and not self.evaluating.run_test(step))
        self.interrupted = stop and not (done and self.evaluating.nothing)
        self.reporter.pause()
        return stop or done

    def close(self, error: BaseException | None) -> None:
        """Ends saving, profile, watchdog and callbacks after the last training step of this process.

        Args:
            error: the exception that ended the run; None without one.
        """
        if isinstance(error, MMError) and error.on_all_ranks and self.settled() and self.step != self._saved:
            try:
                self.save(self.step, {}, last=True, evaluated=not self._owed)
            except Exception as fault:  # the run ends with the earlier error
                self.reporter.note(f"warning: step {self.step} could not be saved: {fault}")
        faults: list[Exception] = []
        endings: tuple[Callable[[], None], ...] = (
            lambda: self._close_store(error),
            self.profile.close,
            self.watchdog.close,
            lambda: self.callbacks.call("run_ended", self.step, error),
            self._remember_code,
        )
        for ending in endings:
            try:
                ending()
            except Exception as fault:  # the others are closed nevertheless
                faults.append(fault)
        if faults and error is None:
            raise faults[0]

    # -- checkpoints ---------------------------------------------------------------------------

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
        self._remember_code()
        self._saved, self._saved_at = step, time.monotonic()
        if last:
            self.store.wait()
        self._report_complete()

    def _saves(self, step: int, stop: bool, save: bool) -> bool:
        return stop or save or step == self.steps or step % self.config.checkpoint.every == 0

    def _add(self, step: int, metrics: Mapping[str, float], *, evaluated: bool) -> None:
        """Adds validation metrics to the checkpoint of `step`, which was saved before the validation."""
        if metrics or evaluated:
            self.store.add(step, json_numbers(metrics), evaluated=evaluated)

    def _report_complete(self) -> None:
        """Reports the checkpoints that have become complete; CheckpointError if one failed."""
        for path in self.store.poll():
            self.reporter.note(f"saved {path}")
            self.callbacks.call("saved", int(path.name.removeprefix("step_")), path)

    def _remember_code(self) -> None:
        """Records modules that plugins imported during training as trusted code of the run."""
        if self.reporter.leads:
            remember_imports(self.config)

    def _close_store(self, error: BaseException | None) -> None:
        """Completes the last checkpoint."""
        try:
            self.store.close(after_fault=error is not None)
        finally:
            if error is None:
                self._report_complete()
