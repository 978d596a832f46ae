"""The forecast of a run on a machine: what it needs in each phase, and how long a step takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mm_core.config.sections import RunConfig
from mm_core.contracts import Batch, Engine, EnginePlan, SampleRequest, SupportsStandIn, TaskModule
from mm_core.data.loading.bucketed import BucketOrder
from mm_core.data.loading.sampler import SlotSpec
from mm_core.device.machines import GIB, Device, Machine
from mm_core.errors import MMError, first_line, plural
from mm_core.evaluation.sampled_clips import with_trained_size
from mm_core.parallel.layout import ShardedPlan
from mm_core.plan import RunPlan, build_frozen, build_task, check_data
from mm_core.plan.planning import state_tensors
from mm_core.plan.run_plan import host_bytes
from mm_core.plan.samples import InBuckets, Samples
from mm_core.training.forecast.calibration import calibrate, factors_of, keep
from mm_core.training.forecast.composed import Calls, Counted, Phases, counted
from mm_core.training.forecast.fake_rank import FakeRank, forward_of
from mm_core.training.forecast.meter import Work
from mm_core.training.forecast.scale import Scale, scale_of
from mm_core.training.forecast.seconds import published, seconds_of
from mm_core.training.forecast.stand_in import with_own_states
from mm_core.training.training_samples import first_batch
from mm_core.weights.adapters.inject import Structure

ROUNDING = 0.03
"""Share that an accelerator's allocator adds: sizes are rounded up, and freed blocks leave gaps."""

GLOO = 2.5
"""Copies of the largest tensor of a collective that gloo makes in its threads: 0 to 4 at a time."""

BUFFERS = round(0.6 * GIB)
"""Bytes of the communication library on each of several devices."""


@dataclass(frozen=True)
class Need:
    """What a phase needs on a rank at its peak.

    Attributes:
        phase: load, step, evaluation or sample.
        device_bytes: on the device, with what no allocator shows.
        host_bytes: of tensors in host memory.
        parts: bytes by what they are for, the largest first.
    """

    phase: str
    device_bytes: int
    host_bytes: int
    parts: dict[str, int]


@dataclass(frozen=True)
class Forecast:
    """What a run needs on a machine.

    Attributes:
        machine: its title.
        memory: bytes of a device; 0: the host's memory is the device's.
        needs: by phase.
        seconds: of a step, by what takes them; empty: the device's speed is not known.
        samples: of a step.
        steps: of the run.
        notes: what is not counted, and why.
        scale: what its ranks share.
    """

    machine: str
    memory: int
    needs: tuple[Need, ...]
    seconds: dict[str, float]
    samples: int
    steps: int
    notes: tuple[str, ...]
    scale: Scale

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
        return {**asdict(self), "fits": not self.lacking, "lacking_bytes": self.lacking, "step_seconds": step}

    def render(self) -> list[str]:
        """As text."""
        lines = [f"forecast for {self.machine}, per rank"]
        width = max((len(need.phase) for need in self.needs), default=0)
        for need in self.needs:
            parts = ", ".join(f"{name} {_size(size)}" for name, size in [*need.parts.items()][:3])
            host = f" (host {_size(need.host_bytes)})" if need.host_bytes else ""
            lines.append(f"  {need.phase:<{width}}  {_size(need.device_bytes):>10}{host}  {parts}")
        if self.peak is not None and self.memory:
            lines.append(f"  {self._verdict(self.peak)}")
        if step := sum(self.seconds.values()):
            shares = ", ".join(
                f"{name} {100 * each / step:.0f} %" for name, each in self.seconds.items() if each
            )
            lines += ["", f"a step takes about {_time(step)}: {shares}"]
            day = 86400 / step * self.samples
            whole = f"{plural(self.steps, 'step')} take {_time(step * self.steps)}; " if self.steps else ""
            lines.append(f"  {whole}{day:,.0f} samples a day")
        lines += ["", *self.scale.render()]
        return [*lines, *(f"  {note}" for note in self.notes)]

    def _verdict(self, peak: Need) -> str:
        if self.lacking:
            return f"does not fit, by {_size(self.lacking)}, in: {peak.phase}"
        return f"fits: {_size(self.memory - peak.device_bytes)} of {_size(self.memory)} are left"


def forecast(
    config: RunConfig,
    plan: RunPlan,
    machine: Machine,
    samples: Samples | None,
    adapters: Structure,
    measure: bool = False,
) -> Forecast:
    """What a run needs on a machine, computed without its weights.

    Args:
        config: the run's.
        plan: of the run for the machine's ranks.
        machine: runs it.
        samples: of data.train; None: data are missing.
        adapters: see `build_task`.
        measure: whether to measure the run's operators on this machine first, and to keep the result.
    """
    unknown = partial(_unknown, config, plan, machine)

    def build() -> TaskModule:
        task = build_task(config, adapters)
        check_data(config, task)  # components may find their sizes by a forward, once, which must not be fake
        build_frozen(task)
        return task

    own: Engine = config.registry.build("engine", config.engine)
    stood = isinstance(own, SupportsStandIn)
    if not stood and not isinstance(plan.engine, ShardedPlan):
        return unknown(f"only the model states are known: the steps of {config.engine.type} are not")
    task = build()
    run = replace(plan, engine=_engine(config, task, machine.world)[1]) if stood else plan
    batch, why = _batch(config, plan, samples, task)
    forward = forward_of(task, config) if batch is None else None
    if batch is None and forward is None:
        return unknown(f"activations and seconds are unknown: {why}")

    request = _request(config) if not plan.missing else None

    def rank(task: TaskModule) -> FakeRank:
        made = _engine(config, task, machine.world)
        return FakeRank(config, task, *made, plan.accumulation, on_cpu, batch, forward, request)

    calls: Calls = {}
    on_cpu = machine.device.name == "cpu"
    try:
        phases = counted(task, build, run.engine, rank, calls)
    except Exception as error:  # whatever a model does that needs numbers: the plan is shown all the same
        parts = ", ".join(task.trainable)
        return unknown(f"activations and seconds are unknown: {parts} stopped ({first_line(error)})")
    host = 0
    if isinstance(own, SupportsStandIn):
        phases = with_own_states(phases, own, plan.engine, run.engine, on_cpu)
        host = 0 if on_cpu else sum(host_bytes(plan.engine).values())
    needs = tuple(_need(name, each, run, machine, host) for name, each in phases.items())
    step, encoding = _works(phases, plan)
    if measure:
        _measure(step, encoding, calls, machine.device)
    seconds, scale = _seconds(step, encoding, run, machine), scale_of(config, plan, machine, step)
    return _made(plan, machine, needs, seconds, scale, *_notes(plan.engine, batch, why))


def _notes(plan: EnginePlan, batch: Batch | None, why: str) -> Iterator[str]:
    if batch is None:
        yield f"encoders are not counted, and captions are as long as they can be: {why}"
    if isinstance(plan, ShardedPlan) and plan.compiled:
        yield "the memory of compiled blocks is that of eager ones, which need no less"


def _unknown(config: RunConfig, plan: RunPlan, machine: Machine, note: str) -> Forecast:
    """A forecast of the model states alone."""
    states, host = plan.device_bytes, sum(plan.host_bytes.values())
    need = Need("states", sum(states.values()) + machine.device.context, host, states)
    return _made(plan, machine, (need,), {}, scale_of(config, plan, machine, {}), note)


def _made(
    plan: RunPlan,
    machine: Machine,
    needs: tuple[Need, ...],
    seconds: dict[str, float],
    scale: Scale,
    *notes: str,
) -> Forecast:
    size, samples = machine.device.memory, plan.global_batch_size
    return Forecast(machine.title, size, needs, seconds, samples, plan.steps, notes, scale)


def _engine(config: RunConfig, task: TaskModule, world: int) -> tuple[Engine, EnginePlan]:
    engine: Engine = config.registry.build("engine", config.engine)
    if isinstance(engine, SupportsStandIn):
        engine = engine.stand_in()
    engine.device = torch.device("cpu")
    plan = engine.plan(task, world, state_tensors(config))
    assert isinstance(plan, ShardedPlan)
    return engine, replace(plan, compiled=())  # the compiler would compile


def _batch(
    config: RunConfig, plan: RunPlan, samples: Samples | None, task: TaskModule
) -> tuple[Batch | None, str]:
    """The first micro-batch, in buckets one of the largest; or None, and why there is none."""
    if samples is None or plan.missing:
        return None, "files are missing"
    try:
        largest = _InLargest(samples.dataset) if isinstance(samples, InBuckets) else samples
        return first_batch(config, plan, largest, task), ""
    except MMError as error:  # the run would end with it
        return None, f"no batch can be read: {first_line(error)}"


class _InLargest(InBuckets):
    """Samples of which each step reads those of the largest bucket."""

    def order(self, config: RunConfig, global_batch_size: int, lengths: Tensor | None = None) -> BucketOrder:
        order = super().order(config, global_batch_size, lengths)
        return _LargestOrder(**{each.name: getattr(order, each.name) for each in fields(order) if each.init})


class _LargestOrder(BucketOrder):
    def micro_batches(self, step: int, rank: int, data_parallel: int) -> list[list[SlotSpec]]:
        return self.largest()[:1]


def _request(config: RunConfig) -> SampleRequest | None:
    """Of the first clip that a run samples, with two of its solver's steps; None: it needs files."""
    given = config.validation.samples if config.validation is not None else None
    if given is None or given.images or given.inputs:
        return None
    request = SampleRequest(
        prompts=given.prompts[:1], negative_prompt=given.negative_prompt, steps=2, guidance=given.guidance
    )
    return with_trained_size(request, config.task, config.data.train)


def _need(name: str, segments: dict[str, Counted], plan: RunPlan, machine: Machine, on_host: int = 0) -> Need:
    held = plan.host_bytes if machine.device.name != "cpu" else {}
    top = max(segments.values(), key=lambda each: each.bytes - sum(each.parts[key] for key in held))
    parts = dict(top.parts.most_common())
    if machine.device.name == "cpu":
        copies = max((w.bytes for each in segments.values() for w in each.work if w.group > 1), default=0)
        return Need(name, top.bytes + round(GLOO * copies), 0, parts)
    frozen = sum(part.host_bytes for part in plan.engine.parts)
    host, there = sum(held.values()) + frozen, sum(top.parts[key] for key in held) + frozen
    assert isinstance(plan.engine, ShardedPlan)
    if plan.engine.activations_on_host:  # but of the block that computes
        kept, blocks = sum(parts[key] for key in parts if key.endswith(".*")), len(plan.engine.wrapped)
        kept = kept * (blocks - 1) // max(blocks, 1)
        host, there = host + kept, there + kept
    device = round((top.bytes - there) * (1 + ROUNDING))
    device += machine.device.context + BUFFERS * (machine.world > 1)
    return Need(name, device, host + on_host, {key: size for key, size in parts.items() if key not in held})


def _works(phases: Phases, plan: RunPlan) -> tuple[dict[Work, float], dict[Work, float]]:
    """How often each operator of a step runs, and of its encoders; two micro-batches stand for all of it."""
    times = plan.accumulation / min(plan.accumulation, 2)
    step: dict[Work, float] = {}
    encoding: dict[Work, float] = {}
    for key, segment in phases["step"].items():
        into = encoding if key == "encoding" else step
        for work, count in segment.work.items():
            into[work] = into.get(work, 0.0) + count * (1 if key == "update" else times)
    return step, encoding


def _measure(step: dict[Work, float], encoding: dict[Work, float], calls: Calls, device: Device) -> None:
    """Measures the operators of a step on this machine, and keeps the result."""
    whole = {work: step.get(work, 0.0) + encoding.get(work, 0.0) for work in calls}
    seen = {work: call for work, call in calls.items() if whole[work]}
    keep(device.name, calibrate(seen, whole, lambda work: published(work, device)))


def _seconds(
    step: dict[Work, float], encoding: dict[Work, float], plan: RunPlan, machine: Machine
) -> dict[str, float]:
    """Those of a step, by what takes them; empty: the device's speed is not known."""
    factors = factors_of(machine.device.name)
    if factors is None and not machine.device.timed:
        return {}
    assert isinstance(plan.engine, ShardedPlan)
    return seconds_of(step, encoding, machine, bool(plan.engine.compiled), factors)


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"
