"""The checks of what a noise scheduler may have besides its contract refuse a faulty one."""

from __future__ import annotations

import torch

from mm_core.diffusion.flow_match import FlowMatch
from support.conformance import examined, refusal


class Forgetful(FlowMatch):
    def for_tokens(self, tokens):
        self.tokens = tokens


class Uneven(FlowMatch):
    def for_tokens(self, tokens):
        self.calls = getattr(self, "calls", 0) + 1
        return FlowMatch(shift=self.calls)


class Parted(FlowMatch):
    """It draws from all timesteps whatever the interval, and returns the interval's right share."""

    def mass(self, low, high=None):
        drawn = self.timestep_quantile(torch.linspace(1e-4, 1 - 1e-4, 10_001))
        return float(((drawn >= low) & (drawn < (high or float("inf")))).double().mean())

    def truncated(self, low, high=None):
        return self


class Negative(Parted):
    def mass(self, low, high=None):
        return -3.0


def test_a_shift_by_tokens_is_checked() -> None:
    reason = refusal("core/flow_match", "by_tokens", Forgetful)
    assert "for_tokens(256) returned a NoneType; accepted: a noise scheduler: this one, or another" in reason
    assert "for_tokens(256) has the noise levels" in refusal("core/flow_match", "by_tokens", Uneven)


def test_intervals_of_experts_are_checked() -> None:
    assert "mass(0, " in (reason := refusal("core/flow_match", "intervals", Negative)) and " is -3" in reason
    assert "accepted: timesteps of the interval" in refusal("core/flow_match", "intervals", Parted)


def test_both_apply_to_shipped_schedulers() -> None:
    assert examined("core/flow_match").run("by_tokens").status == "passed"
    assert examined("wan/flow_match").run("intervals").status == "passed"
