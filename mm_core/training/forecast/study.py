"""A run on a machine, studied on fakes: what its phases need, with its own settings or others."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial

import torch
from torch import Tensor

from mm_core.config.dump import plain
from mm_core.config.sections import RunConfig
from mm_core.contracts import Batch, Engine, SampleRequest, SupportsStandIn, TaskModule
from mm_core.data.loading.bucketed import BucketOrder
from mm_core.data.loading.sampler import SlotSpec
from mm_core.device.machines import Machine
from mm_core.device.torch_private import FakeTensorMode
from mm_core.errors import MMError, PlanError, RunWarning, first_line
from mm_core.evaluation.sampled_clips import with_trained_size
from mm_core.parallel.layout import ShardedPlan
from mm_core.plan import RunPlan, build_frozen, build_task, check_data
from mm_core.plan.planning import state_tensors
from mm_core.plan.run_plan import host_bytes
from mm_core.plan.samples import InBuckets, Samples
from mm_core.training.forecast.calibration import SECONDS, calibrate, keep
from mm_core.training.forecast.composed import Calls, Phases, counted, counted_whole, mixed, shortened
from mm_core.training.forecast.fake_rank import FakeRank, forward_of, groups_of
from mm_core.training.forecast.forecast import Forecast, of_phases, unknown, work_of
from mm_core.training.forecast.seconds import of_call, published
from mm_core.training.forecast.stand_in import with_own_states
from mm_core.training.training_samples import first_batch
from mm_core.weights.adapters.inject import Structure

_OF_FAKES = re.compile(
    r"\bmeta\b|fake|tensor subclass|data pointer|data-dependent|\bdevice\b|driver|cuda|\bnpu\b|triton", re.I
)
"""Words of errors of computations that need numbers, memory or a device."""


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
        stood_for: the run's engine if another one stands for it.
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
        # Without data, a sample of a bucket is the largest that there may be.
        self._guessed = samples is None and config.data.loader.mode == "variable"
        own: Engine = config.registry.build("engine", config.engine)
        self.stood_for = own if isinstance(own, SupportsStandIn) else None
        if self.stood_for is None and not isinstance(plan.engine, ShardedPlan):
            what = "only the model states are known: the steps of"
            self.unknown = f"{what} {config.engine.type} are not"
            return
        self.task = self._build()
        self._batch, why = _batch(config, plan, samples, self.task)
        self._forward = forward_of(self.task, config) if self._batch is None else None
        self._request = _request(config) if not _lacking(plan) else None
        if self._batch is None:
            self.notes = (f"encoders are not counted, and captions are as long as they can be: {why}",)
            self.unknown = "" if self._forward else f"activations and seconds are unknown: {why}"

    def _build(self) -> TaskModule:
        task = build_task(self.config, self.adapters)
        # Components may find their sizes by a forward, once, which must not be fake.
        check_data(self.config, task)
        build_frozen(task)
        return task

    @property
    def _on_cpu(self) -> bool:
        return self.machine.device.name == "cpu"

    def engine(self, changes: Mapping[str, object]) -> Engine:
        """The run's engine with some settings changed."""
        settings = plain(self.config.engine)
        assert isinstance(settings, dict)
        engine: Engine = self.config.registry.build("engine", {**settings, **changes})
        if isinstance(engine, SupportsStandIn):
            engine = engine.stand_in()
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
        whole = self._planned(self.engine(changes), self.task)
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

    def _planned(self, engine: Engine, task: TaskModule) -> ShardedPlan:
        plan = engine.plan(task, self.machine.world, state_tensors(self.config))
        assert isinstance(plan, ShardedPlan)
        return plan

    def _rank(self, changes: Mapping[str, object], task: TaskModule) -> FakeRank:
        engine = self.engine(changes)
        own = replace(self._planned(engine, task), compiled=())  # the compiler would compile
        given = (self._batch, self._forward, self._request)
        return FakeRank(self.config, task, engine, own, self.plan.accumulation, self._on_cpu, *given)

    def _measure(self, phases: Phases) -> None:
        """Measures the run's operators on this machine, on a processor a short step too; keeps the result."""
        device = self.machine.device
        step, encoding = work_of(self.plan, phases)
        whole = {work: step.get(work, 0.0) + encoding.get(work, 0.0) for work in self.calls}
        seen = {work: call for work, call in self.calls.items() if whole[work]}
        factors = calibrate(seen, whole, lambda work: published(work, device))
        if device.name == "cpu":
            short = partial(shortened, self.task, self._build, self._planned(self.engine({}), self.task))
            own = counted_whole(self._rank({}, short()), {})
            work = sum((segment.work for segment in own["step"].values()), Counter())
            alone = sum(of_call(each, self.machine, factors) * count for each, count in work.items())
            memory = max(segment.bytes for segment in own["step"].values())
            if alone < SECONDS / 5 and memory < device.memory / 2:
                rest = self._rank({}, short()).seconds() - alone
                if rest > 0:  # else operators took longer one by one than in the step
                    factors = replace(factors, call=rest / work.total())
        keep(device.name, factors, self.plan.model)

    def forecast(self, measure: bool = False) -> Forecast:
        """What the run needs on the machine, computed without its weights.

        Args:
            measure: whether to measure the run's operators on this machine first, and to keep the result.
        """
        config, plan, machine = self.config, self.plan, self.machine
        try:
            phases = self.phases()
        except PlanError as error:
            if not self._guessed and error.__cause__ is not None and not _of_fakes(error.__cause__):
                first = f"{type(error.__cause__).__name__}: {first_line(error.__cause__)}".rstrip(".")
                what = f"the run on tensors without numbers stopped: {first}"
                warnings.warn(f"{what}; it will probably stop there, too", RunWarning, stacklevel=2)
            return unknown(config, plan, machine, error.what)
        if measure:
            self._measure(phases)
        if self.stood_for is None:
            return of_phases(config, plan, machine, phases, self.notes)
        other = self._planned(self.engine({}), self.task)
        phases = with_own_states(phases, self.stood_for, plan.engine, other, self._on_cpu)
        found = of_phases(config, replace(plan, engine=other), machine, phases, self.notes, plan)
        host = 0 if self._on_cpu else sum(host_bytes(plan.engine).values())
        needs = tuple(replace(need, host_bytes=need.host_bytes + host) for need in found.needs)
        return replace(found, needs=needs)

    def _recomputed(self, whole: ShardedPlan) -> float:
        """The share of blocks that are recomputed, in a list with others that are not; 0: there is none."""
        chosen = {*whole.recomputed}
        for group in groups_of(self.task):
            if 0 < len(own := chosen.intersection(group.paths)) < len(group.paths) and own == chosen:
                return len(own) / len(group.paths)
        return 0.0


def _of_fakes(error: BaseException | None) -> bool:
    """Whether an error or one behind it is of tensors without numbers, memory or a device, and not of the
    model."""
    while error is not None:
        of_torch = type(error).__module__ == FakeTensorMode.__module__
        wordless = isinstance(error, AssertionError) and not str(error)
        if of_torch or wordless or isinstance(error, NotImplementedError) or _OF_FAKES.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _batch(
    config: RunConfig, plan: RunPlan, samples: Samples | None, task: TaskModule
) -> tuple[Batch | None, str]:
    """The first micro-batch, in buckets one of the largest; or None, and why there is none."""
    if samples is None or _lacking(plan):
        return None, "files are missing"
    try:
        largest = _InLargest(samples.dataset) if isinstance(samples, InBuckets) else samples
        return first_batch(config, plan, largest, task), ""
    except MMError as error:  # the run would end with it
        return None, f"no batch can be read: {first_line(error)}"


def _lacking(plan: RunPlan) -> bool:
    """Whether files are missing of which a step needs more than their sizes."""
    return not all(file.of_weights for file in plan.missing)


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
