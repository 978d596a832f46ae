"""Seconds of a step from its operators: a roofline of the device, with what kernels reach of its peaks."""

from __future__ import annotations

import math
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

_HOP = (2e-6, 1e-5)
"""Seconds until a byte is passed on to the next device of a host, and to the next host."""


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
        hosts = -(-work.group // inside)
        steps = _HOP[0] * _hops(work, inside) + _HOP[1] * _hops(work, hosts)
        return sent_bytes(work) / (speed * share) + steps
    if factors is not None:
        return factors.of(work, published(work, device))
    moved = work.bytes / (device.bandwidth * REACHED["elementwise"])
    return max(work.flops / (_peak(work, device) * share), moved, _SHORTEST)


def sent_bytes(work: Work) -> float:
    """Bytes that a collective sends from each rank: a ring sends all but the rank's own part; sum and spread
    of an all-reduce are two rings."""
    return (1 + _sums(work)) * work.bytes * (work.group - 1) / work.group


def _hops(work: Work, places: int) -> float:
    """How often the first byte is passed on between places: around a ring, or up and down a tree."""
    return 2 * math.log2(places) if _sums(work) else places - 1


def _sums(work: Work) -> bool:
    return "reduce" in work.name and "scatter" not in work.name


def published(work: Work, device: Device) -> float:
    """Seconds of an operator at the device's published peaks."""
    return max(work.flops / _peak(work, device), work.bytes / device.bandwidth)


def _peak(work: Work, device: Device) -> float:
    return device.fp32 if work.dtype in ("float32", "float64") else device.bf16
