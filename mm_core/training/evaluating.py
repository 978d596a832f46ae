"""Validation, sampling and test during training: when each is due, and running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mm_core.config.sections import ValidationSection
from mm_core.errors import ConfigError, did_you_mean
from mm_core.evaluation.validator import Validator
from mm_core.telemetry.reporter import RunReporter
from mm_core.training.callback_list import CallbackList


@dataclass
class Evaluating:
    """Validates and samples between training steps, and tests after the last one.

    Attributes:
        settings: the config's `validation`.
        best: the config's `checkpoint.best`.
        averaged: whether the run keeps an average of its weights.
        reporter: logs the metrics.
        callbacks: are called after each evaluation.
        validator: validates and samples; None if neither is configured.
        test: evaluates `data.test` after the last step; None without one.
    """

    settings: ValidationSection | None
    best: str | None
    averaged: bool
    reporter: RunReporter
    callbacks: CallbackList
    validator: Validator | None = None
    test: Validator | None = None

    def start(self) -> None:
        """Checks the metric name in `checkpoint.best` before training, unless metric plugins may add it."""
        if self.settings is None or self.settings.metrics:
            return
        prefix = f"validation{'_ema' * self.averaged}"
        names = ["loss", *(f"loss_at/{quantile:g}" for quantile in self.settings.quantiles)]
        self._check_best({f"{prefix}/{name}": 0.0 for name in names})

    @property
    def nothing(self) -> bool:
        """Whether the training run evaluates nothing at all."""
        return self.validator is None and self.test is None

    def due(self, step: int, *, always: bool) -> bool:
        """Whether a validation or sampling is due after training step `step`.

        Args:
            step: steps taken.
            always: due at any step, if configured.
        """
        return self._validation_due(step, always) or self._samples_due(step, always)

    def run(self, step: int, *, always: bool, again: bool = False) -> tuple[Mapping[str, float], bool]:
        """Validates and samples if due; returns the metrics, and whether a signal interrupted it.

        Args:
            step: steps taken.
            always: due at any step, if configured.
            again: the run resumes at this step, whose validation an earlier process may have logged.
        """
        validator = self.validator
        if validator is None:
            return {}, False
        metrics: Mapping[str, float] = {}
        if self._validation_due(step, always):
            earlier = again and self.reporter.logged(step, "validation/loss")
            found = earlier or self._evaluate(validator, step)
            if found is None:
                return {}, True
            self._check_best(found)
            metrics = found
        if self._samples_due(step, always):
            self.reporter.enter("validation")
            folder = validator.sample(step)
            if folder is None:
                return metrics, True
            self.reporter.ran("sample")
            self.callbacks.call("sampled", step, folder)
        return metrics, False

    def run_test(self, step: int, *, unless_logged: bool = False) -> bool:
        """Evaluates `data.test` after training, if there is one; False if a signal interrupted it.

        Args:
            step: steps taken.
            unless_logged: skip it if an earlier process has logged the test of this step.
        """
        if self.test is None or (unless_logged and self.reporter.logged(step, "test/loss")):
            return True
        return self._evaluate(self.test, step) is not None

    def _validation_due(self, step: int, always: bool) -> bool:
        if self.settings is None or self.validator is None or not self.validator.has_rows:
            return False
        return always or step % self.settings.every == 0

    def _samples_due(self, step: int, always: bool) -> bool:
        settings = self.settings
        if settings is None or self.validator is None or settings.samples is None:
            return False
        return always or step % (settings.samples.every or settings.every) == 0

    def _evaluate(self, validator: Validator, step: int) -> Mapping[str, float] | None:
        self.reporter.enter("validation")
        metrics = validator.run(step)
        if metrics is not None:
            self.reporter.ran("evaluation")
            self.reporter.log(step, metrics)
            self.callbacks.call("validated", step, metrics)
        return metrics

    def _check_best(self, metrics: Mapping[str, float]) -> None:
        best = best_metric(self.best, self.averaged)
        if best is not None and best not in metrics:
            raise ConfigError(
                f"the validation computes no metric {self.best!r}",
                where="checkpoint.best",
                accepted=", ".join(metrics),
                hint=did_you_mean(best, metrics),
            )


def best_metric(best: str | None, averaged: bool) -> str | None:
    """The full metric name of `checkpoint.best`: that of the weight average, if the run keeps one."""
    return best if best is None or "/" in best else f"validation{'_ema' * averaged}/{best}"
