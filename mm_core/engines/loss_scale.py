"""The scale of losses in float16, whose small gradients would vanish (https://arxiv.org/abs/1710.03740)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mm_core.runtime.ranks import gather_rows

_FIRST, _MOST, _PATIENCE = 2.0**16, 2.0**24, 2000


class LossScale:
    """A power of two, so that gradients lose nothing by it: halved where they overflow, doubled after 2000
    steps without that.

    Attributes:
        state: `scale` and `good_steps` since its last change, for the checkpoint; float32 of shape [].
    """

    def __init__(self) -> None:
        self.state = {"scale": torch.tensor(_FIRST), "good_steps": torch.tensor(0.0)}
        self._finite: list[Tensor] = []
        self._scaled = False

    @property
    def scale(self) -> float:
        """The number by which losses are multiplied."""
        return float(self.state["scale"])

    def ran(self, total: Tensor) -> None:
        """Notes the loss of a micro-batch, [], whose backward began with the scale."""
        self._finite.append(torch.isfinite(total))
        self._scaled = True

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divides gradients by the scale, in place; once for each step."""
        if self._scaled and gradients:
            torch._foreach_mul_(list(gradients), 1 / self.scale)
        self._scaled = False

    def overflowed(self) -> str | None:
        """Lowers the scale after gradients that are not finite. Called by all ranks.

        Returns:
            Why the step is skipped; None where the scale is not at fault: a loss is not finite, or it is 1.
        """
        finite = all(bool(each) for each in self._finite)
        before = self.scale
        if before <= 1 or not bool(gather_rows([float(finite)]).all()):
            return None
        self.state["scale"].mul_(0.5)
        self.state["good_steps"].zero_()
        return f"gradients overflow float16 at the loss scale {before:.0f}, which is now {self.scale:.0f}"

    def stepped(self) -> None:
        """Ends a step that updated the weights."""
        self.state["good_steps"].add_(1)
        if float(self.state["good_steps"]) >= _PATIENCE:
            self.state["good_steps"].zero_()
            self.state["scale"].mul_(2).clamp_(max=_MOST)

    def forget(self) -> None:
        """Begins the next step."""
        self._finite, self._scaled = [], False
