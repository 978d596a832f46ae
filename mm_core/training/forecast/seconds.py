"""Seconds of a step from its operators: a roofline of the device, with what kernels reach of its peaks."""

from __future__ import annotations

from collections.abc import Mapping

from mm_core.device.machines import Device, Machine
from mm_core.training.forecast.calibration import Factors
from mm_core.training.forecast.meter import Work

REACHED: Mapping[str, float] = {
    "matmul": 0.70,
    "attention": 0.35,
    "elementwise": 0.60,
    "communication": 0.70,
}
"""The shares of the published peaks that kernels of large tensors reach."""

COMPILED = 0.45
"""Elementwise seconds of a compiled block, in those of an eager one: chains of operators become one."""

_SHORTEST = 2e-6
"""Seconds of the shortest kernel."""


def roofline(
    step: Mapping[Work, float],
    encoding: Mapping[Work, float],
    machine: Machine,
    compiled: bool,
    factors: Factors | None = None,
) -> dict[str, float]:
    """The seconds of a step on a machine, by what takes them.

    What is communicated while the device computes is hidden. A device waits where its process starts
    operators more slowly than it runs them; a processor does one after the other.

    Args:
        step: how often each operator of all micro-batches and the update runs.
        encoding: the same of encoders.
        machine: its device's speed is known.
        compiled: whether blocks are compiled.
        factors: what was measured for the device.
    """
    times = dict.fromkeys(REACHED, 0.0)
    for work, count in step.items():
        share = COMPILED if compiled and work.kind == "elementwise" else 1.0
        times[work.kind] += of_call(work, machine, factors) * share * count
    sent = times.pop("communication")
    busy, calls = sum(times.values()), sum(step.values())
    on_cpu = "cpu" in (machine.device.name, machine.device.like)
    host = calls * (machine.device.call if factors is None else factors.call)
    return {
        **times,
        "communication not hidden": sent if on_cpu else max(0.0, sent - busy),
        "encoding": sum(of_call(work, machine, factors) * count for work, count in encoding.items()),
        "host": host if on_cpu else max(0.0, host - busy),
    }


def of_call(work: Work, machine: Machine, factors: Factors | None = None) -> float:
    """Seconds of one call of an operator."""
    device, share = machine.device, REACHED[work.kind]
    if work.kind == "communication":
        if work.group < 2:
            return 0.0
        inside = max(1, min(work.group, machine.ranks * work.group // work.span))
        speed = device.link if work.span <= machine.ranks else min(device.link, device.network * inside)
        # A ring sends all but a rank's own part; sum and spread of an all-reduce are two of them.
        times = 2 if "allreduce" in work.name else 1
        return times * work.bytes * (work.group - 1) / work.group / (speed * share)
    if factors is not None:
        return factors.of(work, published(work, device))
    moved = work.bytes / (device.bandwidth * REACHED["elementwise"])
    return max(work.flops / (_peak(work, device) * share), moved, _SHORTEST)


def published(work: Work, device: Device) -> float:
    """Seconds of an operator at the device's published peaks."""
    return max(work.flops / _peak(work, device), work.bytes / device.bandwidth)


def _peak(work: Work, device: Device) -> float:
    return device.fp32 if work.dtype in ("float32", "float64") else device.bf16
