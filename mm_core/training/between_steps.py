"""What happens between training steps: weight average, callbacks, evaluation, checkpoints, stopping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mm_core.errors import MMError
from mm_core.optim.ema import EMA
from mm_core.runtime.launch.signals import StopFlag
from mm_core.runtime.launch.watchdog import Watchdog
from mm_core.telemetry.profiler import ProfileWindow
from mm_core.telemetry.reporter import RunReporter
from mm_core.training.callback_list import CallbackList
from mm_core.training.evaluating import Evaluating
from mm_core.training.saving import Saving


@dataclass
class BetweenSteps:
    """Everything that a training run does between its steps, in order.

    Attributes:
        run_dir: the run's folder.
        steps: steps of the complete run.
        saving: saves checkpoints.
        evaluating: validates, samples and tests.
        flag: records signals that ask this rank to save and stop.
        reporter: logs and shows.
        callbacks: the callbacks of the config.
        profile: records the profile.
        watchdog: ends a run that hangs.
        ema: the moving average of the weights; None without one.
        stop_after: the step to stop after; None for the last one.
        evaluated: whether the validation and samples of the step resumed from are done.
        step: steps taken.
        interrupted: whether the run stopped before its end.
    """

    run_dir: Path
    steps: int
    saving: Saving
    evaluating: Evaluating
    flag: StopFlag
    reporter: RunReporter
    callbacks: CallbackList
    profile: ProfileWindow
    watchdog: Watchdog
    ema: EMA | None = None
    stop_after: int | None = None
    evaluated: bool = True
    step: int = 0
    interrupted: bool = False
    settled: Callable[[], bool] = lambda: True
    """Ends a step whose norm is not read (see `LateSteps`); whether all steps taken may be saved."""
    _owed: bool = False
    """Whether the validation or the samples of `step` are due and not done yet."""

    def start(self, step: int) -> None:
        """Starts evaluation, watchdog, callbacks and saving before the first training step of this process.

        Args:
            step: steps taken before.
        """
        self.step = step
        self.evaluating.start()
        self.watchdog.start()
        self.callbacks.run_started(self.run_dir, step, self.steps)
        self.saving.start(step)
        settings, done = self.saving.config.validation, step == self.steps
        if step == self.steps == 0:
            self.saving.save(0, {}, last=True)  # a run without steps still saves its weights
        elif step == 0 and settings is not None and settings.at_start:
            _, self.interrupted = self.evaluating.run(0, always=True)
        elif not self.evaluated:
            metrics, self.interrupted = self.evaluating.run(step, always=done, again=True)
            if self.evaluating.due(step, always=done):
                self.saving.add(step, metrics, evaluated=not self.interrupted)
        if 0 < step == self.steps and not self.interrupted:
            self.interrupted = not self.evaluating.run_test(step, unless_logged=True)

    def step_begins(self, step: int) -> None:
        """Called when training step `step` (from 0) begins."""
        self.watchdog.step(step + 1)
        self.profile.step_begins(step + 1)

    def fault(self) -> MMError | None:
        """The error of a background save since the last training step; None without one."""
        try:
            self.saving.report_complete()
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
        return self.saving.due_by_clock

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
        done = step == self.steps
        due = self.saving.due(step) or self.evaluating.due(step, always=done)
        return stop or save or done or due or bool(self.callbacks) or self.profile.running

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
        self.callbacks.step_ended(step, logged)
        done = step == self.steps
        due = self.evaluating.due(step, always=done)
        saving = stop or save or done or self.saving.due(step)
        if saving:
            # Before the evaluation: a validation that fails, on one rank or on all, loses no step. Metrics
            # are added to the checkpoint; an evaluation that was cut short is repeated at the resume.
            self.saving.save(step, {}, last=stop or done, evaluated=not due)
        if not stop:
            self._owed = due
            metrics, stop = self.evaluating.run(step, always=done)
            self._owed = False
            if saving and due:
                self.saving.add(step, metrics, evaluated=not stop)
            elif stop:
                self.saving.save(step, metrics, last=True, evaluated=False)
            stop = stop or (done and not self.evaluating.run_test(step))
        self.interrupted = stop and not (done and self.evaluating.nothing)
        self.reporter.pause()
        return stop or done

    def close(self, error: BaseException | None) -> None:
        """Ends saving, profile, watchdog and callbacks after the last training step of this process.

        Args:
            error: the exception that ended the run; None without one.
        """
        if isinstance(error, MMError) and error.on_all_ranks and self.settled():
            self.saving.rescue(self.step, evaluated=not self._owed)
        faults: list[Exception] = []
        endings: tuple[Callable[[], None], ...] = (
            lambda: self.saving.close(error),
            self.profile.close,
            self.watchdog.close,
            lambda: self.callbacks.run_ended(self.step, error),
            self.saving.remember_code,
        )
        for ending in endings:
            try:
                ending()
            except Exception as fault:  # the others are closed nevertheless
                faults.append(fault)
        if faults and error is None:
            raise faults[0]
