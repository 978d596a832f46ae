"""Whether a step's gradients may change the weights: the same judgement on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from mm_core.checkpoint.files.layout import Document
from mm_core.config.sections import TrainSection
from mm_core.contracts import Batch, Loss
from mm_core.errors import PeerError, TrainingError
from mm_core.runtime.ranks import Ranks, gather_rows

Rerun = Callable[[], Iterator[Loss]]
_HINT = "lower the learning rate, check the samples of this step, or train in fp32"


class UpdateGuard:
    """Judges each step by its gradient norm, which is global: all ranks decide alike.

    A loss that is not finite makes the norm so too (see `Engine.micro_step`). What was left out and the
    latest norms are state: a resumed run judges as the uninterrupted one does.

    Args:
        settings: `non_finite` and `spike` of the config.
        state: what `state()` gave, at a resume.
        locate: finds the first module that is not finite; called by all ranks with the step's losses to
            be computed once more.
        warn: says a sentence.
    """

    def __init__(
        self,
        settings: TrainSection,
        state: Document | None = None,
        locate: Callable[[Rerun], str | None] = lambda rerun: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.settings = settings
        self._locate, self._warn = locate, warn
        found = state or {}
        self._norms = [float(norm) for norm in found.get("norms", [])]
        self._in_a_row, self._in_all = int(found.get("in_a_row", 0)), int(found.get("in_all", 0))
        self._spikes = int(found.get("spikes", 0))  # left out in a row

    def state(self) -> Document:
        """What a checkpoint keeps, as JSON."""
        return {
            "norms": list(self._norms),
            "in_a_row": self._in_a_row,
            "in_all": self._in_all,
            "spikes": self._spikes,
        }

    def judge(
        self, step: int, norm: float, losses: Sequence[Loss], batches: Sequence[Batch], rerun: Rerun
    ) -> str | None:
        """None to update; a sentence to leave step `step` (from 0) out.

        Raises:
            TrainingError: on the rank to blame, or on all where none is, when the run is to end;
                PeerError on the others.
        """
        if not math.isfinite(norm):
            return self._non_finite(step, norm, losses, batches, rerun)
        refused = self._spike(step, norm)
        if refused is None:
            self._in_a_row = self._spikes = 0
            if self.settings.spike is not None:
                self._norms = [*self._norms, norm][-self.settings.spike.window :]
        return refused

    # -- not finite ----------------------------------------------------------------------------

    def _non_finite(
        self, step: int, norm: float, losses: Sequence[Loss], batches: Sequence[Batch], rerun: Rerun
    ) -> str:
        guilty = [not math.isfinite(float(loss.total)) for loss in losses]
        place = self._locate(rerun)
        # A loss to blame comes before a module that only one rank found, and that before nobody; of the ranks
        # with such a loss, the one that can name the place speaks.
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
        if culprits and Ranks.current().rank not in culprits:
            raise PeerError(f"the loss or a gradient of rank {culprits[0]} is not finite")
        named = [
            name
            for batch, bad in zip(batches, guilty, strict=True)
            if bad or not any(guilty)
            for name in batch.ids
        ]
        where = f"step {step + 1}"
        if culprits:
            where += f", rank {Ranks.current().rank}, samples {named[:8]}"
        if place is not None:
            what += f"; {place}"
        raise TrainingError(
            f"{what}; no parameter was changed{limit or ''}",
            where=where,
            hint=_HINT + (", or leave such steps out: train.non_finite.policy=skip" if limit is None else ""),
        )

    def _limit(self) -> str | None:
        """The limit that the steps left out have reached, in words."""
        limits = self.settings.non_finite
        if limits.policy != "skip":
            return None
        if self._in_a_row >= limits.in_a_row:
            return f"; {self._in_a_row} steps in a row were left out (train.non_finite.in_a_row)"
        if self._in_all >= limits.in_all:
            return f"; {self._in_all} steps in all were left out (train.non_finite.in_all)"
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
            f" the median of the last {len(self._norms)} steps"
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
                f"{what}; {self._spikes} steps in a row were left out (train.spike.in_a_row)",
                where=f"step {step + 1}",
                hint="the norm has moved for good: raise train.spike.factor, or set train.spike.policy=warn",
            )
        return f"{what}; no parameter was changed"
