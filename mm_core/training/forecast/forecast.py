"""The forecast of a run on a machine: what it needs in each phase, and how long a step takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from mm_core.config.sections import RunConfig
from mm_core.device.machines import GIB, Machine, size_text
from mm_core.errors import plural
from mm_core.parallel.layout import ShardedPlan
from mm_core.plan import RunPlan
from mm_core.training.forecast.calibration import Factors, factors_of
from mm_core.training.forecast.composed import Counted, Phases
from mm_core.training.forecast.meter import Work
from mm_core.training.forecast.scale import Scale, scale_of
from mm_core.training.forecast.seconds import REACHED, roofline

ROUNDING = 0.03
"""Share that an accelerator's allocator adds: sizes are rounded up, and freed blocks leave gaps."""

GLOO = 2.5
"""Copies of the largest tensor of a collective that gloo makes in its threads: 0 to 4 at a time."""

BUFFERS = round(0.6 * GIB)
"""Bytes of the communication library on each of several devices."""

HOST_MEMORY = 2e11
"""Bytes per second of a host's memory, for an optimizer there: eight channels of a server."""


@dataclass(frozen=True)
class Need:
    """What a phase needs on a rank at its peak.

    Attributes:
        phase: load, step, evaluation or sample.
        device_bytes: on the device, with what no allocator shows.
        host_bytes: of tensors in host memory.
        parts: bytes by what they are for, the largest first.
        allocated: those of `device_bytes` that tensors take, which an allocator shows.
    """

    phase: str
    device_bytes: int
    host_bytes: int
    parts: dict[str, int]
    allocated: int


@dataclass(frozen=True)
class Forecast:
    """What a run needs on a machine.

    Attributes:
        machine: its title.
        memory: bytes of a device; 0: the host's memory is the device's.
        needs: by phase.
        seconds: of a step, by what takes them; empty: the device's speed is not known.
        samples: of a step; 0: not shown.
        steps: of the run; 0: unknown.
        notes: what is not counted, and why.
        scale: what its ranks share; None: unknown.
    """

    machine: str
    memory: int
    needs: tuple[Need, ...]
    seconds: dict[str, float]
    samples: int
    steps: int
    notes: tuple[str, ...]
    scale: Scale | None = None

    @property
    def peak(self) -> Need | None:
        """The phase that needs most."""
        return max(self.needs, key=lambda need: need.device_bytes, default=None)

    @property
    def lacking(self) -> int:
        """Bytes that the device lacks; 0: the run fits."""
        return max(0, self.peak.device_bytes - self.memory) if self.peak and self.memory else 0

    def to_mapping(self) -> dict[str, Any]:
        """As plain values, for `--json`."""
        step = sum(self.seconds.values())
        fit = {"fits": not self.lacking, "lacking_bytes": self.lacking}
        of_tensors = max((need.allocated for need in self.needs if need.phase != "states"), default=0)
        return {**asdict(self), **fit, "peak_of_tensors": of_tensors, "step_seconds": step}

    def line(self) -> str:
        """In one line."""
        if self.peak is None:
            return "nothing is known"
        of = f" of {size_text(self.memory)}" if self.memory else ""
        text = f"{size_text(self.peak.device_bytes)}{of} at the peak ({self.peak.phase})"
        if step := sum(self.seconds.values()):
            whole = (
                f"; {plural(self.steps, 'step')} take {time_text(step * self.steps)}" if self.steps else ""
            )
            text += f", about {time_text(step)} a step{whole}"
        return text

    def render(self) -> list[str]:
        """As text."""
        lines = [f"forecast for {self.machine}, per rank"]
        width = max((len(need.phase) for need in self.needs), default=0)
        for need in self.needs:
            parts = ", ".join(f"{name} {size_text(size)}" for name, size in [*need.parts.items()][:3])
            host = f" (host {size_text(need.host_bytes)})" if need.host_bytes else ""
            lines.append(f"  {need.phase:<{width}}  {size_text(need.device_bytes):>10}{host}  {parts}")
        if self.peak is not None and self.memory:
            lines.append(f"  {self._verdict(self.peak)}")
        if step := sum(self.seconds.values()):
            shares = ", ".join(
                f"{name} {100 * each / step:.0f} %" for name, each in self.seconds.items() if each
            )
            lines += ["", f"a step takes about {time_text(step)}: {shares}"]
            whole = (
                f"{plural(self.steps, 'step')} take {time_text(step * self.steps)}; " if self.steps else ""
            )
            if self.samples:
                lines.append(f"  {whole}{86400 / step * self.samples:,.0f} samples a day")
        if self.scale is not None:
            lines += ["", *self.scale.render()]
        return [*lines, *(f"  {note}" for note in self.notes)]

    def _verdict(self, peak: Need) -> str:
        if self.lacking:
            return f"does not fit, by {size_text(self.lacking)}, in: {peak.phase}"
        return f"fits: {size_text(self.memory - peak.device_bytes)} of {size_text(self.memory)} are left"


def of_phases(
    config: RunConfig,
    plan: RunPlan,
    machine: Machine,
    phases: Phases,
    notes: tuple[str, ...] = (),
    own: RunPlan | None = None,
) -> Forecast:
    """The forecast of a run from what its phases need.

    Args:
        config: the run's.
        plan: that the phases were counted with.
        machine: runs it.
        phases: see `Study.phases`.
        notes: what is not counted, and why.
        own: the run's plan, where `plan` is that of an engine that stands for its engine.
    """
    assert isinstance(plan.engine, ShardedPlan)
    if plan.engine.compiled:
        notes = (*notes, "the memory of compiled blocks is that of eager ones, which need no less")
    factors = measured_of(plan, machine)
    scale = scale_of(config, own or plan, machine, work_of(plan, phases)[0], factors)
    needs, seconds = needs_of(plan, machine, phases), seconds_of(plan, machine, phases, factors)
    if (host := max(need.host_bytes for need in needs)) > machine.host_share:
        counted = f"{size_text(machine.host_share)} that are counted for each"
        notes = (*notes, f"a rank needs {size_text(host)} of host memory, more than the {counted}")
    return _made(plan, machine, needs, seconds, scale, *notes)


def measured_of(plan: RunPlan, machine: Machine) -> Factors | None:
    """What was measured for a run's model on a machine's device; None: nothing."""
    return factors_of(machine.device.like or machine.device.name, plan.model)


def needs_of(plan: RunPlan, machine: Machine, phases: Phases) -> tuple[Need, ...]:
    """What each phase needs at its peak."""
    return tuple(_need(name, own, plan, machine) for name, own in phases.items())


def unknown(config: RunConfig, plan: RunPlan, machine: Machine, note: str) -> Forecast:
    """A forecast of the model states alone."""
    states, host = plan.device_bytes, sum(plan.host_bytes.values())
    held = sum(states.values())
    need = Need("states", held + machine.device.context, host, states, held)
    return _made(plan, machine, (need,), {}, scale_of(config, plan, machine, {}), note)


def _made(
    plan: RunPlan,
    machine: Machine,
    needs: tuple[Need, ...],
    seconds: dict[str, float],
    scale: Scale,
    *notes: str,
) -> Forecast:
    device = machine.device
    # The hours of a device that is a size alone are not those of any.
    samples, steps = (0, 0) if device.like else (plan.global_batch_size, plan.steps)
    return Forecast(machine.title, device.memory, needs, seconds, samples, steps, notes, scale)


def _need(name: str, segments: dict[str, Counted], plan: RunPlan, machine: Machine) -> Need:
    held = plan.host_bytes if machine.device.name != "cpu" else {}
    top = max(segments.values(), key=lambda each: each.bytes - sum(each.parts[key] for key in held))
    parts = dict(top.parts.most_common())
    if machine.device.name == "cpu":
        copies = max((w.bytes for each in segments.values() for w in each.work if w.group > 1), default=0)
        return Need(name, top.bytes + round(GLOO * copies), 0, parts, top.bytes)
    away = Counter(_kept(plan, top))
    for part in plan.engine.parts:
        away[part.name] += part.host_bytes
    tensors = top.bytes - away.total() - sum(top.parts[key] for key in held)
    own = Counter({key: size - away[key] for key, size in parts.items() if key not in held})
    device = round(tensors * (1 + ROUNDING)) + machine.device.context + BUFFERS * (machine.world > 1)
    return Need(name, device, sum(held.values()) + away.total(), dict((+own).most_common()), tensors)


def _kept(plan: RunPlan, top: Counted) -> dict[str, int]:
    """Bytes of activations in host memory by part: all but of the block that computes."""
    assert isinstance(plan.engine, ShardedPlan)
    if not plan.engine.activations_on_host:
        return {}
    blocks = max(len(plan.engine.wrapped), 1)
    return {key: size * (blocks - 1) // blocks for key, size in top.parts.items() if key.endswith(".*")}


def work_of(plan: RunPlan, phases: Phases) -> tuple[dict[Work, float], dict[Work, float]]:
    """How often operators of a step run on the device, and those of encoders; two micro-batches stand for
    all of it."""
    times = plan.accumulation / min(plan.accumulation, 2)
    step: dict[Work, float] = {}
    encoding: dict[Work, float] = {}
    for key, segment in phases["step"].items():
        into = encoding if key == "encoding" else step
        for work, count in segment.work.items():
            into[work] = into.get(work, 0.0) + count * (1 if key == "update" else times)
    return step, encoding


def seconds_of(plan: RunPlan, machine: Machine, phases: Phases, factors: Factors | None) -> dict[str, float]:
    """Those of a step; empty where the device's speed is not known."""
    assert isinstance(plan.engine, ShardedPlan)
    device, engine = machine.device, plan.engine
    if factors is None and not device.timed:
        return {}
    found = roofline(*work_of(plan, phases), machine, bool(engine.compiled), factors)
    if device.name == "cpu":
        return found
    kept = max(sum(_kept(plan, segment).values()) for segment in phases["step"].values())
    moved, trained = 2 * kept * plan.accumulation, engine.gradient_bytes
    if engine.offloaded_bytes:
        moved += (2 * engine.offloaded_bytes + trained) * plan.accumulation
    elif engine.optimizer_on_host:
        moved += 3 * trained
    # Of each trained number, the update reads the weight, its gradient and two moments, and writes three.
    update = 7 * trained * bool(plan.host_bytes) * machine.ranks
    found["host copies"] = moved / (device.to_host * REACHED["communication"]) + update / HOST_MEMORY
    return found


def time_text(seconds: float) -> str:
    """Seconds as people read them."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"
