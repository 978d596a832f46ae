"""What happens between the steps of a run: the average, callbacks, evaluation, checkpoints, the stop."""

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
    """Everything that a run does beside its steps, in its order.

    Attributes:
        steps: of the whole run.
        flag: notes signals that ask this rank to save and end.
        stop_after: the step to end after; None: the last one.
        evaluated: whether the validation and samples of the step that the run resumes at are there.
        step: steps taken.
        interrupted: whether the run has ended before its end.
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
    _owed: bool = False
    """Whether the validation or the samples of `step` are due and not there yet."""

    def start(self, step: int) -> None:
        """Before the first step of this process; `step` steps were taken before."""
        self.step = step
        self.evaluating.start()
        self.watchdog.start()
        self.callbacks.run_started(self.run_dir, step, self.steps)
        self.saving.start(step)
        settings, done = self.saving.config.validation, step == self.steps
        if step == self.steps == 0:
            self.saving.save(0, {}, last=True)  # a run of no steps still leaves its weights
        elif step == 0 and settings is not None and settings.at_start:
            _, self.interrupted = self.evaluating.run(0, always=True)
        elif not self.evaluated:
            metrics, self.interrupted = self.evaluating.run(step, always=done, again=True)
            if self.evaluating.due(step, always=done):
                self.saving.add(step, metrics, evaluated=not self.interrupted)
        if 0 < step == self.steps and not self.interrupted:
            self.interrupted = not self.evaluating.run_test(step, unless_logged=True)

    def step_begins(self, step: int) -> None:
        """Step `step` (from 0) begins."""
        self.watchdog.step(step + 1)
        self.profile.step_begins(step + 1)

    def fault(self) -> MMError | None:
        """What has failed in the background since the last step."""
        try:
            self.saving.tell()
        except MMError as fault:
            return fault
        return None

    @property
    def stop(self) -> bool:
        """Whether this rank was asked to save and end after the step that is being taken."""
        return self.flag.requested is not None or self.step + 1 == self.stop_after

    @property
    def save_due(self) -> bool:
        """Whether it is time to save by the clock of this rank."""
        return self.saving.due_by_clock

    def updated(self, step: int, refused: str | None) -> None:
        """Step number `step` (from 1) has changed the weights or, `refused`, was left out."""
        if refused is not None:
            self.reporter.note(f"step {step} was left out: {refused}")
        elif self.ema is not None:
            self.ema.update(step)

    def after_step(self, step: int, logged: Mapping[str, float] | None, *, stop: bool, save: bool) -> bool:
        """Does what is due after `step` steps; whether the run ends here. stop, save: as all ranks agreed."""
        self.step = step
        self.profile.step_ended(step)
        self.callbacks.step_ended(step, logged)
        done = step == self.steps
        due = self.evaluating.due(step, always=done)
        saving = stop or save or done or self.saving.due(step)
        if saving:
            # Before anything is evaluated: a validation that fails, on one rank or on all, costs no step.
            # What it finds is added; what it does not come to is made up for at the resume.
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
        """After the last step of this process, or where `error` ended it."""
        if isinstance(error, MMError) and error.on_all_ranks:
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
            except Exception as fault:  # the rest is closed all the same
                faults.append(fault)
        if faults and error is None:
            raise faults[0]
