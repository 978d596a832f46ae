"""The forecast of a run on a machine: what it needs in each phase, and how long a step takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mm_core.config.dump import plain
from mm_core.config.sections import RunConfig
from mm_core.contracts import Batch, Engine, SampleRequest, TaskModule
from mm_core.data.loading.bucketed import BucketOrder
from mm_core.data.loading.sampler import SlotSpec
from mm_core.device.machines import GIB, Machine, size_text
from mm_core.errors import MMError, PlanError, first_line, plural
from mm_core.evaluation.sampled_clips import with_trained_size
from mm_core.parallel.layout import ShardedPlan
from mm_core.plan import RunPlan, build_frozen, build_task, check_data
from mm_core.plan.planning import state_tensors
from mm_core.plan.samples import InBuckets, Samples
from mm_core.training.forecast.calibration import SECONDS, calibrate, factors_of, keep
from mm_core.training.forecast.composed import (
    Calls,
    Counted,
    Phases,
    counted,
    counted_whole,
    mixed,
    shortened,
)
from mm_core.training.forecast.fake_rank import FakeRank, forward_of, groups_of
from mm_core.training.forecast.meter import Work
from mm_core.training.forecast.seconds import REACHED, of_call, published, roofline
from mm_core.training.training_samples import first_batch
from mm_core.weights.adapters.inject import Structure

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
    """

    machine: str
    memory: int
    needs: tuple[Need, ...]
    seconds: dict[str, float]
    samples: int
    steps: int
    notes: tuple[str, ...]

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
        return [*lines, *(f"  {note}" for note in self.notes)]

    def _verdict(self, peak: Need) -> str:
        if self.lacking:
            return f"does not fit, by {size_text(self.lacking)}, in: {peak.phase}"
        return f"fits: {size_text(self.memory - peak.device_bytes)} of {size_text(self.memory)} are left"


class Study:
    """A run on a machine: what its forecasts with other settings of the engine have in common.

    Args:
        config: the run's.
        plan: of the run for the machine's ranks.
        machine: runs it.
        samples: of data.train; None: data are missing.
        adapters: see `build_task`.

    Attributes:
        calls: an example of each operator, after `phases`.
        unknown: why phases are not known; empty: they are.
        notes: what is not counted, and why.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: RunPlan,
        machine: Machine,
        samples: Samples | None,
        adapters: Structure,
    ) -> None:
        self.config, self.plan, self.machine, self.adapters = config, plan, machine, adapters
        self.calls: Calls = {}
        self._known: dict[object, Phases] = {}
        self.unknown = ""
        self.notes: tuple[str, ...] = ()
        if not isinstance(plan.engine, ShardedPlan):
            what = "only the model states are known: the steps of the engine"
            self.unknown = f"{what} {config.engine.type} are not"
            return
        self.task = self._build()
        self._batch, why = _batch(config, plan, samples, self.task)
        self._forward = forward_of(self.task, config) if self._batch is None else None
        self._request = _request(config) if not plan.missing else None
        if self._batch is None:
            self.notes = (f"encoders are not counted, and captions are as long as they can be: {why}",)
            self.unknown = "" if self._forward else f"activations and seconds are unknown: {why}"

    def _build(self) -> TaskModule:
        task = build_task(self.config, self.adapters)
        # Components may find their sizes by a forward, once, which must not be fake.
        check_data(self.config, task)
        build_frozen(task)
        return task

    def engine(self, changes: Mapping[str, object]) -> Engine:
        """The run's engine with some settings changed."""
        settings = plain(self.config.engine)
        assert isinstance(settings, dict)
        engine: Engine = self.config.registry.build("engine", {**settings, **changes})
        engine.device = torch.device("cpu")
        return engine

    def phases(self, **changes: object) -> Phases:
        """What the phases of the run need with some settings of the engine changed.

        Of lists in which some blocks are recomputed and others not, both are counted and mixed.

        Raises:
            PlanError: the engine is another, or the model needs what fakes have not: numbers, or data.
        """
        if self.unknown:
            raise PlanError(self.unknown, hint="only the model states are known")
        engine = self.engine(changes)
        whole = engine.plan(self.task, self.machine.world, state_tensors(self.config))
        assert isinstance(whole, ShardedPlan)
        key = whole.recomputed, whole.kept
        if key not in self._known:
            self._known[key] = self._count(whole, changes)
        return self._known[key]

    def _count(self, whole: ShardedPlan, changes: Mapping[str, object]) -> Phases:
        if share := self._recomputed(whole):
            none = self.phases(**{**changes, "recompute_modules": []})
            return mixed(none, self.phases(**{**changes, "recompute_modules": "auto"}), share)

        try:
            return counted(self.task, self._build, whole, partial(self._rank, changes), self.calls)
        except Exception as error:  # whatever a model does that needs numbers: the plan is shown all the same
            parts = ", ".join(self.task.trainable)
            what = f"activations and seconds are unknown: {parts} stopped ({first_line(error)})"
            raise PlanError(what, hint="only the model states are known") from error

    def _rank(self, changes: Mapping[str, object], task: TaskModule) -> FakeRank:
        engine = self.engine(changes)
        own = engine.plan(task, self.machine.world, state_tensors(self.config))
        assert isinstance(own, ShardedPlan)
        own = replace(own, compiled=())  # the compiler would compile
        on_cpu, given = self.machine.device.name == "cpu", (self._batch, self._forward, self._request)
        return FakeRank(self.config, task, engine, own, self.plan.accumulation, on_cpu, *given)

    def _measure(self, phases: Phases) -> None:
        """Measures the run's operators on this machine, on a processor a short step too; keeps the result."""
        device = self.machine.device
        step, encoding = _work_of(self.plan, phases)
        whole = {work: step.get(work, 0.0) + encoding.get(work, 0.0) for work in self.calls}
        seen = {work: call for work, call in self.calls.items() if whole[work]}
        factors = calibrate(seen, whole, lambda work: published(work, device))
        if device.name == "cpu":
            short = partial(shortened, self.task, self._build, self.plan.engine)
            own = counted_whole(self._rank({}, short()), {})
            work = sum((segment.work for segment in own["step"].values()), Counter())
            alone = sum(of_call(each, self.machine, factors) * count for each, count in work.items())
            memory = max(segment.bytes for segment in own["step"].values())
            if alone < SECONDS / 5 and memory < device.memory / 2:
                rest = self._rank({}, short()).seconds() - alone
                factors = replace(factors, call=max(0.0, rest / work.total()))
        keep(device.name, factors)

    def forecast(self, measure: bool = False) -> Forecast:
        """See `forecast`."""
        try:
            phases = self.phases()
        except PlanError as error:
            return _unknown(self.plan, self.machine, error.what)
        if measure:
            self._measure(phases)
        return of_phases(self.plan, self.machine, phases, self.notes)

    def _recomputed(self, whole: ShardedPlan) -> float:
        """The share of blocks that are recomputed, in a list with others that are not; 0: there is none."""
        chosen = {*whole.recomputed}
        for group in groups_of(self.task):
            if 0 < len(own := chosen.intersection(group.paths)) < len(group.paths) and own == chosen:
                return len(own) / len(group.paths)
        return 0.0


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
    return Study(config, plan, machine, samples, adapters).forecast(measure)


def of_phases(plan: RunPlan, machine: Machine, phases: Phases, notes: tuple[str, ...] = ()) -> Forecast:
    """The forecast of a run from what its phases need."""
    assert isinstance(plan.engine, ShardedPlan)
    if plan.engine.compiled:
        notes = (*notes, "the memory of compiled blocks is that of eager ones, which need no less")
    return _made(plan, machine, needs_of(plan, machine, phases), seconds_of(plan, machine, phases), *notes)


def needs_of(plan: RunPlan, machine: Machine, phases: Phases) -> tuple[Need, ...]:
    """What each phase needs at its peak."""
    return tuple(_need(name, own, plan, machine) for name, own in phases.items())


def _unknown(plan: RunPlan, machine: Machine, note: str) -> Forecast:
    """A forecast of the model states alone."""
    states, host = plan.device_bytes, sum(plan.host_bytes.values())
    held = sum(states.values())
    need = Need("states", held + machine.device.context, host, states, held)
    return _made(plan, machine, (need,), {}, note)


def _made(
    plan: RunPlan, machine: Machine, needs: tuple[Need, ...], seconds: dict[str, float], *notes: str
) -> Forecast:
    device = machine.device
    # The hours of a device that is a size alone are not those of any.
    samples, steps = (0, 0) if device.like else (plan.global_batch_size, plan.steps)
    return Forecast(machine.title, device.memory, needs, seconds, samples, steps, notes)


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


def _need(name: str, segments: dict[str, Counted], plan: RunPlan, machine: Machine) -> Need:
    held = plan.host_bytes if machine.device.name != "cpu" else {}
    top = max(segments.values(), key=lambda each: each.bytes - sum(each.parts[key] for key in held))
    parts = dict(top.parts.most_common())
    if machine.device.name == "cpu":
        copies = max((w.bytes for each in segments.values() for w in each.work if w.group > 1), default=0)
        return Need(name, top.bytes + round(GLOO * copies), 0, parts, top.bytes)
    frozen = sum(part.host_bytes for part in plan.engine.parts)
    kept = _kept(plan, top)
    host, there = sum(held.values()) + frozen + kept, sum(top.parts[key] for key in held) + frozen + kept
    device = round((top.bytes - there) * (1 + ROUNDING))
    device += machine.device.context + BUFFERS * (machine.world > 1)
    own = {key: size for key, size in parts.items() if key not in held}
    return Need(name, device, host, own, top.bytes - there)


def _kept(plan: RunPlan, top: Counted) -> int:
    """Bytes of activations in host memory: all but of the block that computes."""
    assert isinstance(plan.engine, ShardedPlan)
    if not plan.engine.activations_on_host:
        return 0
    blocks = len(plan.engine.wrapped)
    return sum(size for key, size in top.parts.items() if key.endswith(".*")) * (blocks - 1) // max(blocks, 1)


def _work_of(plan: RunPlan, phases: Phases) -> tuple[dict[Work, float], dict[Work, float]]:
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


def seconds_of(plan: RunPlan, machine: Machine, phases: Phases) -> dict[str, float]:
    """Those of a step; empty where the device's speed is not known."""
    assert isinstance(plan.engine, ShardedPlan)
    device, engine = machine.device, plan.engine
    factors = factors_of(device.like or device.name)
    if factors is None and not device.timed:
        return {}
    found = roofline(*_work_of(plan, phases), machine, bool(engine.compiled), factors)
    if device.name == "cpu":
        return found
    kept = max(_kept(plan, segment) for segment in phases["step"].values())
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
