"""The engine under test, and what is expected of what it computes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from mm_core.testing.kit import NotApplicable, Probe
from mm_core.testing.tensors import names
from mm_core.testing.training.engines.task import MakeOptimizer, Trial, adamw, network_values

_CLOSE = 1e-5
"""Relative to the largest element of a tensor."""


class EngineProbe(Probe):
    """The engine under test, with what its ranks have found.

    Args:
        probe: the engine.
    """

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe.registered, probe.registry, probe.folder)
        self.outcomes: Any = None
        """What one rank and each of two ranks have returned, or their error."""

    def require_device(self, device: torch.device) -> None:
        """NotApplicable if the engine declares that it does not run on the device."""
        if device.type == "cpu" and self.registered.component.capabilities.get("cpu", True) is False:
            raise NotApplicable("the engine declares that it needs an accelerator (`cpu: False`)")

    def trained(self, make: MakeOptimizer | None = adamw) -> Trial:
        """The task in a new engine, with the weights that `Plain` begins with."""
        return Trial(self.build(), make, network_values())

    def expect_none(
        self, wrong: Collection[str], what: str, hint: str | None = None, accepted: str | None = None
    ) -> None:
        """Expects that there are none of some names; `what` shows them in the place of {}."""
        self.expect(not wrong, what.format(names(wrong)), accepted=accepted, hint=hint)

    def expect_weights(
        self,
        found: Mapping[str, Tensor],
        wanted: Mapping[str, Tensor],
        when: str,
        hint: str | None = None,
        of: str = "plain torch",
    ) -> None:
        """Expects trained parameters that are known.

        Args:
            found: the engine's parameters, unsharded, by path in the task.
            wanted: the known ones.
            when: the moment, for the ContractError.
            hint: what to do next.
            of: where the known ones are from.
        """
        other = found.keys() ^ wanted.keys()
        accepted = "each trained parameter once, by its path in the task"
        self.expect_none(
            other, "named_parameters has other trained parameters than the task: {}", accepted=accepted
        )
        wrong = [name for name, tensor in wanted.items() if off(found[name], tensor)]
        largest = max((float((found[n] - wanted[n]).abs().max()) for n in wrong), default=0.0)
        accepted = f"a relative difference of at most {_CLOSE:g}"
        self.expect_none(wrong, f"{when}, {{}} differs by {largest:.1e} from {of}", hint, accepted)

    def expect_number(self, what: str, found: float, wanted: float, of: str = "in plain torch") -> None:
        """Expects a number that is known.

        Args:
            what: what it is.
            found: the engine's.
            wanted: the known one.
            of: where the known one is from.
        """
        self.expect(
            isinstance(found, float) and math.isclose(found, wanted, rel_tol=_CLOSE),
            f"{what} is {found!r}, but {wanted:.7g} {of}",
            accepted=f"a float, with a relative difference of at most {_CLOSE:g}",
        )


def off(found: Tensor, wanted: Tensor) -> bool:
    """Whether a tensor differs from a known one by more than rounding."""
    return not torch.allclose(found, wanted, rtol=0, atol=_CLOSE * float(wanted.abs().max()) + 1e-6)
