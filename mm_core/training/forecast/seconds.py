"""Seconds of a step from its operators: a roofline of the device, with shares of its peaks that kernels reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from mm_core.device.machines import Machine
from mm_core.training.forecast.meter import Work

REACHED: Mapping[str, float] = {
    "matmul": 0.70,
    "attention": 0.50,
    "elementwise": 0.75,
    "communication": 0.70,
}
"""The shares of the published peaks that kernels of large tensors reach."""

COMPILED = 0.45
"""Elementwise seconds of a compiled block, in those of an eager one: chains of operators become one."""

_SHORTEST = 2e-6
"""Seconds of the shortest kernel."""


@dataclass
class Seconds:
    """Seconds of a rank's step by what takes them, in the order in which they are shown."""

    parts: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> float:
        """All parts."""
        return sum(self.parts.values())


def seconds_of(step: Counter[Work], encoding: Counter[Work], machine: Machine, compiled: bool) -> Seconds:
    """The seconds of a step on a machine.

    What is communicated while the device computes is hidden; the first gather and the last reduction are not.
    A device waits where its process starts operators more slowly than it runs them.

    Args:
        step: operators of all micro-batches and the update.
        encoding: operators of encoders.
        machine: its device's speed is known.
        compiled: whether blocks are compiled.
    """
    times: Counter[str] = Counter()
    calls = 0
    for work, count in step.items():
        spent = of_call(work, machine)
        if compiled and work.kind == "elementwise":
            spent *= COMPILED
        times[work.kind] += spent * count
        calls += count
    sent = times.pop("communication", 0.0)
    busy = sum(times.values())
    host = max(0.0, calls * machine.device.call - busy)
    if machine.device.name == "cpu":
        host = calls * machine.device.call  # one thread after the other
    found = Seconds(Counter({name: times[name] for name in ("matmul", "attention", "elementwise")}))
    found.parts["communication not hidden"] = max(0.0, sent - busy)
    found.parts["encoding"] = sum(of_call(work, machine) * count for work, count in encoding.items())
    found.parts["host"] = host
    return found


def of_call(work: Work, machine: Machine) -> float:
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
    peak = device.fp32 if work.dtype in ("float32", "float64") else device.bf16
    return max(
        work.flops / (peak * share), work.bytes / (device.bandwidth * REACHED["elementwise"]), _SHORTEST
    )
