"""Forecasts for engines whose own step cannot run on fake tensors: another engine stands for it."""

from __future__ import annotations

from collections import Counter

from mm_core.contracts import EnginePlan, SupportsStandIn
from mm_core.plan.run_plan import device_bytes, host_bytes
from mm_core.training.forecast.composed import Counted, Phases
from mm_core.training.forecast.fake_rank import WHOLE
from mm_core.training.forecast.meter import GATHERED

_OF_STAND_IN = ("parameters", "gradients", "optimizer", "weights being loaded", GATHERED, WHOLE)


def with_own_states(
    phases: Phases, engine: SupportsStandIn, plan: EnginePlan, other: EnginePlan, on_cpu: bool
) -> Phases:
    """The phases of the engine that stood for another, with the other's states in place of its own.

    Args:
        phases: as computed.
        engine: the run's.
        plan: its own.
        other: that of the engine that stood for it; gradients that it keeps whole are counted as they come.
        on_cpu: whether its device is the host.
    """
    alike = {"gradients", WHOLE} if other.mesh.get("shard") == 1 else set()
    replaced = {*_OF_STAND_IN} - alike
    held = Counter(device_bytes(plan)) + Counter(host_bytes(plan) if on_cpu else {})
    extra = engine.buffers(plan)

    def own(phase: str, key: str, counted: Counted) -> Counted:
        parts = Counter({name: size for name, size in counted.parts.items() if name not in replaced})
        for name, size in held.items():
            parts[name] += size * (name != "gradients" or (phase == "step" and not alike))
        parts.update((extra["update" if key == "update" else "backward"]) if phase == "step" else {})
        return Counted(+parts, counted.work)

    return {
        phase: {key: own(phase, key, each) for key, each in segments.items()}
        for phase, segments in phases.items()
    }
