"""What happens between the steps of a run: the average, observers, validation, samples, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mm_core.config.schema import RunConfig
from mm_core.errors import ConfigError, MMError, did_you_mean
from mm_core.train.agreement import Ranks
from mm_core.train.checkpoint import CheckpointStore
from mm_core.train.ema import EMA
from mm_core.train.known_code import remember_imports
from mm_core.train.observers import Observers
from mm_core.train.profiling import ProfileWindow
from mm_core.train.reporting import RunReporter
from mm_core.train.trackers import read_metrics
from mm_core.train.validation import Validator
from mm_core.train.watchdog import Watchdog


class StopRequest(Protocol):
    """Why to stop after this step (a signal), or None."""

    @property
    def requested(self) -> str | None: ...


@dataclass
class RunMilestones:
    """The loop's Milestones.

    steps: of the whole run. state: the tensors of a checkpoint. facts: everything else of one.
    validator, test: None where nothing is held out.
    """

    config: RunConfig
    run_dir: Path
    steps: int
    store: CheckpointStore
    state: Callable[[], Mapping[str, Mapping[str, Any]]]
    facts: Callable[[], dict[str, Any]]
    config_yaml: str
    manifest: Mapping[str, Any]
    request: StopRequest
    reporter: RunReporter
    observers: Observers
    profile: ProfileWindow
    watchdog: Watchdog
    ema: EMA | None = None
    validator: Validator | None = None
    test: Validator | None = None
    step: int = 0
    stop_after: int | None = None
    looked: bool = True
    """Whether the validation and samples of the step that the run resumes at are there."""
    interrupted: bool = False
    _saved: int = 0
    """The step that was saved last, or that the run began with."""
    _looking: bool = False
    """Whether the validation or the samples of `step` are due and not there yet."""
    _saved_at: float = field(default_factory=time.monotonic)

    def start(self, step: int) -> None:
        """Before the first step of this process; `step` steps were taken before."""
        self.step = self._saved = step
        self._check_best_name()
        self.watchdog.start()
        self.observers.run_started(self.run_dir, step, self.steps)
        self.store.reserve(self.state())
        settings = self.config.validation
        if step == self.steps == 0:
            self.save(0, {}, stopping=True)  # a run of no steps still leaves its weights
        elif step == 0 and settings is not None and settings.at_start:
            _, self.interrupted = self.look(0, always=True)
        elif not self.looked:
            metrics, self.interrupted = self.look(step, always=step == self.steps, again=True)
            if self._look_due(step, always=step == self.steps):
                self._add(step, metrics, looked=not self.interrupted)
        if 0 < step == self.steps and not self.interrupted and not self._logged(step, "test"):
            self.interrupted = not self.try_test(step)

    def close(self, error: BaseException | None) -> None:
        """After the last step of this process, or where `error` ended it."""
        if isinstance(error, MMError) and error.on_all_ranks:
            self._rescue()
        faults: list[Exception] = []
        endings: tuple[Callable[[], None], ...] = (
            lambda: self._close_store(error),
            self.profile.close,
            self.watchdog.close,
            lambda: self.observers.run_ended(self.step, error),
            self._remember,
        )
        for ending in endings:
            try:
                ending()
            except Exception as fault:  # the rest is closed all the same
                faults.append(fault)
        if faults and error is None:
            raise faults[0]

    def _rescue(self) -> None:
        """Saves what was trained since the last checkpoint, where a data worker or a sample ends the run."""
        if self.step == self._saved:
            return
        try:
            self.save(self.step, {}, stopping=True, looked=not self._looking)
        except Exception as fault:  # the run ends by what came before
            self.reporter.note(f"warning: step {self.step} could not be saved: {fault}")

    def _close_store(self, error: BaseException | None) -> None:
        try:
            self.store.close(hurry=error is not None)
        finally:
            if error is None:
                self.tell_saved()

    def begin(self, step: int) -> None:
        """Step `step` (from 0) begins."""
        self.watchdog.step(step + 1)
        self.profile.step_begins(step + 1)

    def fault(self) -> MMError | None:
        """What has failed in the background since the last step."""
        try:
            self.tell_saved()
        except MMError as fault:
            return fault
        return None

    @property
    def stop(self) -> bool:
        """Whether this rank was asked to save and end after the step that is being taken."""
        return self.request.requested is not None or self.step + 1 == self.stop_after

    @property
    def save_due(self) -> bool:
        """Whether `checkpoint.every_minutes` have gone by since the last save of this process."""
        minutes = self.config.checkpoint.every_minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def updated(self, step: int, refused: str | None) -> None:
        """Step number `step` has changed the weights or, `refused`, was left out."""
        if refused is not None:
            self.reporter.note(f"step {step} was left out: {refused}")
        elif self.ema is not None:
            self.ema.update(step)

    def reach(self, step: int, logged: Mapping[str, float] | None, *, stop: bool, save: bool) -> bool:
        """Does what is due after `step` steps; whether the run ends here."""
        self.step = step
        self.profile.step_ended(step)
        self.observers.step_ended(step, logged)
        done = step == self.steps
        due = self._look_due(step, always=done)
        saving = stop or save or done or step % self.config.checkpoint.every == 0
        if saving:
            # Before anybody looks: a validation that fails, on one rank or on all, costs no step. What it
            # finds is added; what it does not come to is made up for at the resume.
            self.save(step, {}, stopping=stop or done, looked=not due)
        if not stop:
            self._looking = due
            metrics, stop = self.look(step, always=done)
            self._looking = False
            if saving and due:
                self._add(step, metrics, looked=not stop)
            elif stop:
                self.save(step, metrics, stopping=True, looked=False)
            stop = stop or (done and not self.try_test(step))
            if stop:  # a signal has cut it short, and leaves no time for sha256
                self.store.hurry()
        nothing_left = done and self.validator is None and self.test is None
        self.interrupted = stop and not nothing_left
        self.reporter.pause()
        return stop or done

    def _logged(self, step: int, split: str) -> dict[str, float]:
        """The figures of an evaluation that a process before this one has logged; {} where none has."""

        def read() -> dict[str, float]:
            rows = [row for row in read_metrics(self.run_dir) if row["step"] == step]
            found = next((row for row in rows if f"{split}/loss" in row), {})
            return {name: float(value) for name, value in found.items() if name != "step"}

        return Ranks.current().first("reading metrics.jsonl", read)

    def try_test(self, step: int) -> bool:
        """Evaluates data.test, if there is one; False where a signal has cut it short."""
        return self.test is None or self._evaluate(self.test, step) is not None

    def look(self, step: int, *, always: bool, again: bool = False) -> tuple[Mapping[str, float], bool]:
        """Validates and samples where that is due; the metrics, and whether a signal cut it short.

        again: a process before this one may have validated this step, and have ended before it sampled.
        """
        validator = self.validator
        if validator is None:
            return {}, False
        metrics: Mapping[str, float] = {}
        if self._validation_due(step, always):
            found = (again and self._logged(step, "validation")) or self._evaluate(validator, step)
            if found is None:
                return {}, True
            self._check_best(found)
            metrics = found
        if self._samples_due(step, always):
            self.enter("validation")
            folder = validator.sample(step)
            if folder is None:
                return metrics, True
            self.observers.sampled(step, folder)
        return metrics, False

    def _look_due(self, step: int, *, always: bool) -> bool:
        return self._validation_due(step, always) or self._samples_due(step, always)

    def _validation_due(self, step: int, always: bool) -> bool:
        settings = self.config.validation
        if settings is None or self.validator is None or self.config.data.validation is None:
            return False
        return always or step % settings.every == 0

    def _samples_due(self, step: int, always: bool) -> bool:
        settings = self.config.validation
        if settings is None or self.validator is None or settings.samples is None:
            return False
        return always or step % (settings.samples.every or settings.every) == 0

    def _evaluate(self, validator: Validator, step: int) -> Mapping[str, float] | None:
        self.enter("validation")
        metrics = validator.run(step)
        if metrics is not None:
            self.reporter.log(step, metrics)
            self.observers.validated(step, metrics)
        return metrics

    def _check_best_name(self) -> None:
        """A misspelt checkpoint.best is found before the first step, where no metric plugin may bring it."""
        settings = self.config.validation
        if settings is None or settings.metrics or self.config.checkpoint.best is None:
            return
        prefix = "validation" if self.config.ema is None else "validation_ema"
        names = ["loss", *(f"loss_at/{quantile:g}" for quantile in settings.quantiles)]
        self._check_best({f"{prefix}/{name}": 0.0 for name in names})

    def _check_best(self, metrics: Mapping[str, float]) -> None:
        best = best_metric(self.config)
        if best is not None and best not in metrics:
            raise ConfigError(
                f"the validation has no metric {self.config.checkpoint.best!r}",
                where="checkpoint.best",
                accepted=", ".join(metrics),
                hint=did_you_mean(best, metrics),
            )

    def enter(self, phase: str) -> None:
        """A new phase begins: the reporter measures it, the watchdog sees that the run moves on."""
        self.reporter.enter(phase)

    def save(self, step: int, metrics: Mapping[str, float], *, stopping: bool, looked: bool = True) -> None:
        """One checkpoint. A last one is complete when this returns; a signal leaves no time for sha256."""
        self.enter("checkpoint")
        facts = {**self.facts(), "metrics": in_json(metrics), "looked": looked}
        hurried = self.request.requested is not None
        self.store.save(
            step,
            self.state(),
            facts,
            self.config_yaml,
            manifest=self.manifest,
            digest=not stopping or not hurried,
        )
        self._remember()
        self._saved, self._saved_at = step, time.monotonic()
        if stopping:
            self.store.wait()
        self.tell_saved()

    def _remember(self) -> None:
        """Modules that a plugin imports late are code of the run too."""
        if Ranks.current().rank == 0:
            remember_imports(self.config)

    def _add(self, step: int, metrics: Mapping[str, float], *, looked: bool) -> None:
        """Figures for the checkpoint of `step`, which was saved before they were there."""
        if metrics or looked:
            self.store.add(step, in_json(metrics), looked=looked)

    def tell_saved(self) -> None:
        """Names the checkpoints that have become complete. CheckpointError for one that failed."""
        for path in self.store.poll():
            self.reporter.note(f"saved {path}")
            self.observers.saved(int(path.name.removeprefix("step_")), path)


def in_json(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """JSON has no numbers for what is not finite; such a value is never the best."""
    return {name: float(value) if math.isfinite(value) else str(value) for name, value in metrics.items()}


def best_metric(config: RunConfig) -> str | None:
    """The full name of `checkpoint.best`: of the average, where the run keeps one."""
    best = config.checkpoint.best
    if best is None or "/" in best:
        return best
    return f"{'validation' if config.ema is None else 'validation_ema'}/{best}"
