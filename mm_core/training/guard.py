"""The guard of training steps: whether a step's gradients may update the weights, decided on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from mm_core.checkpoint.files.layout import Document
from mm_core.config.sections import TrainSection
from mm_core.contracts import Batch, Loss
from mm_core.errors import PeerError, TrainingError, plural
from mm_core.runtime.ranks import gather_rows

Forwards = Sequence[Callable[[], Loss]]
_HINT = "lower the learning rate, check the samples of this step, or train in fp32"


class UpdateGuard:
    """Checks the gradient norm of each training step and decides whether the step updates the weights.

    The norm is global, so that all ranks decide the same. If a loss is not finite, the norm is not finite
    either (see `Engine.micro_step`). The counts of skipped steps and the latest norms are saved: a resumed
    run decides the same as an uninterrupted one.

    Args:
        settings: the config's `train` section, with `non_finite` and `spike`.
        state: the saved result of `state()`, at a resume.
        locate: finds the first module whose output is not finite; called by all ranks, with the
            forwards of the step's micro-batches.
        warn: shows a warning.
    """

    def __init__(
        self,
        settings: TrainSection,
        state: Document | None = None,
        locate: Callable[[Forwards], str | None] = lambda forwards: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.settings = settings
        self._locate, self._warn = locate, warn
        found = state or {}
        self._norms = [float(norm) for norm in found.get("norms", [])]
        self._in_a_row, self._in_all = int(found.get("in_a_row", 0)), int(found.get("in_all", 0))
        self._spikes = int(found.get("spikes", 0))  # skipped in a row

    def state(self) -> Document:
        """The guard's counts and norms as JSON, to be saved in a checkpoint."""
        return {
            "norms": list(self._norms),
            "in_a_row": self._in_a_row,
            "in_all": self._in_all,
            "spikes": self._spikes,
        }

    def judge(
        self, step: int, norm: float, losses: Sequence[Loss], batches: Sequence[Batch], forwards: Forwards
    ) -> str | None:
        """Decides whether a training step updates the weights: None to update, or the reason to skip it.

        Args:
            step: the step, from 0.
            norm: the global gradient norm.
            losses: of this rank's micro-batches.
            batches: this rank's micro-batches.
                forwards: of its micro-batches, to run again and find the module at fault.

        Raises:
            TrainingError: the run must end. Raised on the rank that caused it, or on all if none did.
            PeerError: on the other ranks.
        """
        if not math.isfinite(norm):
            return self._non_finite(step, norm, losses, batches, forwards)
        refused = self._spike(step, norm)
        if refused is None:
            self._in_a_row = self._spikes = 0
            if self.settings.spike is not None:
                self._norms = [*self._norms, norm][-self.settings.spike.window :]
        return refused

    # -- not finite ----------------------------------------------------------------------------

    def _non_finite(
        self, step: int, norm: float, losses: Sequence[Loss], batches: Sequence[Batch], forwards: Forwards
    ) -> str:
        guilty = [not math.isfinite(float(loss.total)) for loss in losses]
        place = self._locate(forwards)
        # A rank with a bad loss comes before one that only found a bad module; of the ranks with a bad loss,
        # the one that can name the module reports.
        mine = 2.0 * any(guilty) + (place is not None)
        claims = gather_rows([mine])[:, 0].tolist()
        worst = max(claims)
        culprits = [rank for rank, claim in enumerate(claims) if claim == worst and worst > 0]
        what = "the loss is not finite" if worst >= 2 else f"the gradient norm is {norm}"
        self._in_a_row += 1
        self._in_all += 1
        limit = self._limit()
        if self.settings.non_finite.policy == "skip" and limit is None:
            return f"{what}{f' on rank {culprits[0]}' if culprits else ''}; no parameter was changed"
        if culprits and mine < worst:
            raise PeerError(f"the loss or a gradient of rank {culprits[0]} is not finite")
        named = [
            name
            for batch, bad in zip(batches, guilty, strict=True)
            if bad or not any(guilty)
            for name in batch.ids
        ]
        where = f"step {step + 1}"
        if culprits:
            where += f", samples {named[:8]}"
        if place is not None:
            what += f"; {place}"
        raise TrainingError(
            f"{what}; no parameter was changed{limit or ''}",
            where=where,
            hint=_HINT + (", or skip such steps: train.non_finite.policy=skip" if limit is None else ""),
        )

    def _limit(self) -> str | None:
        """The limit on skipped steps that was reached, for the message; None if none was."""
        limits = self.settings.non_finite
        if limits.policy != "skip":
            return None
        if self._in_a_row >= limits.in_a_row:
            return f"; {plural(self._in_a_row, 'step')} in a row skipped (limit: train.non_finite.in_a_row)"
        if self._in_all >= limits.in_all:
            return f"; {plural(self._in_all, 'step')} skipped in total (limit: train.non_finite.in_all)"
        return None

    # -- spikes --------------------------------------------------------------------------------

    def _spike(self, step: int, norm: float) -> str | None:
        rule = self.settings.spike
        if rule is None or len(self._norms) < rule.window // 2:
            return None
        usual = median(self._norms)
        if norm <= rule.factor * usual:
            return None
        what = (
            f"the gradient norm is {norm:.4g}, more than {rule.factor:g} times {usual:.4g},"
            f" the median of the last {plural(len(self._norms), 'step')}"
        )
        if rule.policy == "stop":
            raise TrainingError(
                f"{what}; no parameter was changed",
                where=f"step {step + 1}",
                hint="lower the learning rate, raise train.spike.factor, or set train.spike.policy=skip",
            )
        if rule.policy == "warn":
            self._warn(f"warning: step {step + 1}: {what}")
            return None
        self._spikes += 1
        if self._spikes >= rule.in_a_row:
            raise TrainingError(
                f"{what}; {plural(self._spikes, 'step')} in a row skipped (limit: train.spike.in_a_row)",
                where=f"step {step + 1}",
                hint="the norm stays higher than before: raise train.spike.factor, or set"
                " train.spike.policy=warn",
            )
        return f"{what}; no parameter was changed"
