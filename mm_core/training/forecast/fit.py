"""The fastest settings with which a run fits a machine, composed from what its blocks need.

A few steps are counted: with nothing recomputed, and with all blocks recomputed in each kind. What a run
needs with some of its blocks recomputed lies between them, and what is in host memory is a part less. Only if
too few of these settings fit, steps of others are counted: smaller micro-batches, tokens spread over ranks,
frozen weights elsewhere.
"""

from __future__ import annotations

import json
import math
import shlex
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from mm_core.config.dump import to_mapping
from mm_core.config.sections import RunConfig
from mm_core.device.machines import Machine, ranked, size_text
from mm_core.errors import MMError
from mm_core.parallel.layout import ShardedPlan
from mm_core.plan import RunPlan, build_task, plan_shown
from mm_core.plan.planning import state_tensors
from mm_core.plan.samples import Samples
from mm_core.training.forecast.composed import Phases, mixed
from mm_core.training.forecast.forecast import (
    Forecast,
    measured_of,
    needs_of,
    of_phases,
    seconds_of,
    time_text,
)
from mm_core.training.forecast.study import Study

SHOWN = 3
ROOM = 0.05
"""Share of the memory that is left free: what the forecast may be off by."""

_KINDS: Mapping[str, object] = {"selective": "selective", "attention": ["attention"], "full": "full"}
_MODULES, _KIND, _COMPILE = "engine.recompute_modules", "engine.recompute", "engine.compile.modules"
_MARKS = ("", "rounding", "precision")

Values = dict[str, Any]
"""Config key -> value."""


@dataclass(frozen=True)
class Setting:
    """Settings with which a run fits.

    Attributes:
        overrides: to add to the command.
        changes: what becomes of the run's numbers: rounding or precision; empty: they stay.
        forecast: of the run with them.
    """

    overrides: tuple[str, ...]
    changes: str
    forecast: Forecast


@dataclass(frozen=True)
class _Candidate:
    values: Values
    changes: str
    seconds: float
    phases: Phases
    notes: tuple[str, ...]


@dataclass
class Search:
    """The search for settings of a run.

    Attributes:
        load: the run's config, with overrides that those of the user follow, so that these stay.
        fixed: keys that the user has set.
        study: the run as it is.
        least: bytes at the peak of what needs least; 0: nothing was counted.
    """

    load: Callable[[Sequence[str]], RunConfig]
    fixed: Sequence[str]
    study: Study
    least: int = 0
    _found: list[_Candidate] = field(default_factory=list)
    _roomy: bool = False
    _refused: bool = False

    def __post_init__(self) -> None:
        self.machine, self._own = self.study.machine, to_mapping(self.study.config)
        self._room = self.machine.device.memory * (1 - ROOM)
        self._factors = measured_of(self.study.plan, self.machine)

    def settings(self) -> list[Setting]:
        """The fastest settings that fit; last those that change numbers, one of them if it is the fastest.

        Raises:
            MMError: the engine or the model has no forecast, or the machine no memory.
        """
        if self.study.stood_for is not None:
            what = f"--fit does not know the settings of {self.study.config.engine.type}"
            raise MMError(what, where="engine", accepted="core/fsdp2, or --dry-run without --fit")
        if not self.machine.device.memory:
            what = f"{self.machine.title} has no memory that something could fit"
            raise MMError(what, where="--on", accepted="a device, or a size such as 1x24GB")
        for values, changes in self._rungs():
            self._refused = False
            try:
                own = [*self._candidates(self._study(values), values, changes)]
                # Whether it fits with nothing recomputed and nothing on the host.
                self._roomy = any(each.values.keys() <= {*values, _MODULES} for each in own)
                self._found += own
            except MMError:  # the task, the engine or this number of ranks has no such setting
                if not self.least:
                    raise
                self._refused = True
        order = sorted(self._found, key=lambda each: (_MARKS.index(each.changes), each.seconds))
        found: dict[tuple[str, ...], Setting] = {}
        quickest = math.inf
        for candidate in order:
            words, wanted = self.overrides(candidate.values), len(found) < SHOWN
            if not wanted and candidate.changes and candidate.seconds < quickest:
                wanted = not any(each.changes for each in found.values())
            if wanted and words not in found and (one := self._confirmed(words, candidate)):
                found[words] = one
                quickest = min(quickest, candidate.seconds)
        return [*found.values()]

    def overrides(self, values: Values) -> tuple[str, ...]:
        """The overrides that set what the run's config does not have."""
        words = []
        for key, value in values.items():
            if value != self._now(key):
                text = value if isinstance(value, str) else json.dumps(value)
                words.append(f"{key}={text}")
        return tuple(words)

    def _now(self, key: str) -> Any:
        place: Any = self._own
        for name in key.split("."):
            place = place.get(name) if isinstance(place, dict) else None
        return place

    def _free(self, *keys: str) -> bool:
        """Whether the user has set none of these keys, no key above them and none below."""
        pairs = ((f"{key}.", f"{one}.") for key in keys for one in self.fixed)
        return not any(one.startswith(key) or key.startswith(one) for key, one in pairs)

    def _study(self, values: Values) -> Study:
        if not (words := self.overrides(values)):
            return self.study
        config, plan, samples = self._planned(words)
        return Study(config, plan, self.machine, samples, self.study.adapters)

    def _planned(self, words: Sequence[str]) -> tuple[RunConfig, RunPlan, Samples | None]:
        config = self.load(words)
        return config, *plan_shown(config, self.machine.world, build_task(config, self.study.adapters))

    def _confirmed(self, words: Sequence[str], candidate: _Candidate) -> Setting | None:
        """A candidate with the plan of its own config; None if the run refuses it, or it does not fit."""
        try:
            config, plan, samples = self._planned(words)
        except MMError:
            return None
        phases = candidate.phases
        if "engine.offload.activations" in candidate.values:  # which copies what the others keep once
            phases = Study(config, plan, self.machine, samples, self.study.adapters).phases()
        found = of_phases(config, plan, self.machine, phases, candidate.notes)
        fits = found.peak is not None and found.peak.device_bytes <= self._room
        host = max(need.host_bytes for need in found.needs) <= self.machine.host_share
        return Setting(tuple(words), candidate.changes, found) if fits and host else None

    # -- what is tried -------------------------------------------------------------------------

    def _rungs(self) -> Iterator[tuple[Values, str]]:
        """Settings whose steps are counted; those that need less, each with the ones before it, until
        enough fit."""
        offloads = [f"engine.offload.{part}" for part in ("optimizer", "parameters", "activations")]
        values: Values = {key: None for key in offloads if self._now(key) and self._free(key)}
        if self._now("engine.offload_to_cpu") and self._free("engine.offload_to_cpu"):
            values["engine.offload_to_cpu"] = False
        yield values, ""
        plan = self.study.plan
        micro, size = plan.micro_batch_size, plan.global_batch_size
        batch = not plan.buckets and self._free("train.micro_batch_size")  # the global size stays
        if batch:
            whole = size // plan.engine.data_parallel
            for more in (n for n in range(micro + 1, whole + 1) if whole % n == 0):
                if not self._roomy:
                    break
                yield {**values, "train.micro_batch_size": more, "train.global_batch_size": size}, ""
        for own, changes in self._leaner(plan, micro if batch else 1):
            if sum(not each.changes for each in self._found) >= SHOWN:
                return
            wanted = {key: value for key, value in own.items() if value != self._now(key)}
            if wanted and self._free(*wanted):
                yield {**values, **wanted}, changes
                values = values if self._refused else {**values, **wanted}

    def _leaner(self, plan: RunPlan, micro: int) -> Iterator[tuple[Values, str]]:
        """Settings that need less, what costs least first."""
        world, size = plan.engine.world, plan.global_batch_size
        for fewer in (n for n in range(micro - 1, 0, -1) if micro % n == 0):
            yield {"train.micro_batch_size": fewer, "train.global_batch_size": size}, ""
        for part in plan.engine.frozen:
            if part.placement == "replicated":
                yield {f"engine.frozen.{part.name}": "offloaded"}, ""
        engine = plan.engine
        assert isinstance(engine, ShardedPlan)
        whole = {*engine.wrapped}.difference(engine.resharded)
        if world > 1 and (whole or engine.mesh.get("replicate", 1) > 1):
            yield {"engine.sharding_size": "auto", "engine.reshard_after_forward": True}, ""
        if self._now("train.adapters"):
            yield {"engine.base.stream": True}, ""
        if plan.accumulation > 1 or micro > 1:
            yield {"engine.accumulate": "reduced"}, "rounding"
        for ranks in range(2, self.machine.ranks + 1):
            if self.machine.ranks % ranks == 0:
                yield {"engine.context_parallel.size": ranks, "engine.accumulate": "reduced"}, "rounding"
        if self._now("engine.param_dtype") in (None, "fp32"):
            yield {"engine.param_dtype": "bf16"}, "precision"
        if self._now("train.adapters"):
            yield {"train.base_dtype": "int8"}, "precision"
            yield {"train.base_dtype": "nf4"}, "precision"

    def _candidates(self, study: Study, values: Values, changes: str) -> Iterator[_Candidate]:
        """Settings that fit, each with as few recomputed blocks as possible."""
        lists = self._lists(study)
        steps = range(max(map(len, lists.values()), default=0) + 1)
        blocks = sum(map(len, lists.values()))
        for kind, none, every in self._counted(study, bool(lists)):

            def of(step: int, none: Phases = none, every: Phases = every) -> Phases:
                share = sum(_count(step, own, steps) for own in lists.values()) / max(blocks, 1)
                return every if none is every else mixed(none, every, share)

            for placed in self._placements():
                plan = _placed(study.plan, placed)
                fitting = bisect_left(steps, True, key=partial(self._fits, plan, of))
                if fitting == len(steps):
                    continue
                phases, own = of(fitting), {}
                if none is not every:
                    own = {_MODULES: self._modules(study, lists, fitting, steps), **(kind if fitting else {})}
                now = _Candidate({**values, **placed, **own}, changes, 0.0, phases, study.notes)
                yield self._timed(now, plan)
                if (compiled := self._compiled(plan)) is not None:
                    named = {**now.values, _COMPILE: "auto"}
                    yield self._timed(replace(now, values=named, changes=changes or "rounding"), compiled)

    def _counted(self, study: Study, blocks: bool) -> Iterator[tuple[Values, Phases, Phases]]:
        """What phases need with no block recomputed and with each, for each kind of recomputation."""
        if not blocks:
            phases = study.phases()
            yield {}, phases, phases
            return
        none = study.phases(recompute_modules=[])
        own = {_KIND: self._now(_KIND)}
        first = not self._found and not self.least
        kinds = [{_KIND: kind} for kind in _KINDS.values()] if self._free(_KIND) and first else [own]
        for kind in kinds:
            yield kind, none, study.phases(recompute_modules="auto", recompute=kind[_KIND])

    def _lists(self, study: Study) -> dict[str, list[str]]:
        """The blocks that may be recomputed, by the list that they are in; none if that is settled."""
        stream = study.plan.engine.base is not None
        if stream or self._now(_KIND) is None or not self._free(_MODULES):
            return {}
        try:
            engine = study.engine({"recompute_modules": "auto"})
            plan = engine.plan(study.task, self.machine.world, state_tensors(study.config))
        except MMError:  # there are no blocks
            return {}
        found: dict[str, list[str]] = {}
        for path in plan.recomputed:
            found.setdefault(path.rpartition(".")[0], []).append(path.rpartition(".")[2])
        return found if all(name.isdecimal() for own in found.values() for name in own) else {}

    def _modules(self, study: Study, lists: Mapping[str, list[str]], step: int, steps: range) -> Any:
        """The value of engine.recompute_modules for a step."""
        every = {f"{path}.{name}" for path, own in lists.items() for name in own}
        if step == len(steps) - 1:
            return self._now(_MODULES) if {*study.plan.engine.recomputed} == every else "auto"
        counts = {path: _count(step, own, steps) for path, own in lists.items()}
        return [f"{path}.{{{lists[path][0]}-{lists[path][n - 1]}}}" for path, n in counts.items() if n]

    def _placements(self) -> Iterator[Values]:
        """What is in host memory, beside what is there already."""
        on_cpu = self.machine.device.name == "cpu"
        parts = [{}, *({f"engine.offload.{part}": "cpu"} for part in ("optimizer", "parameters"))]
        blocks = [{}, {"engine.offload.activations": "cpu"}]
        average = [{}, {"ema.device": "cpu"}] if self._now("ema") else [{}]
        for several in product(parts, blocks, average):
            values: Values = {key: value for one in several for key, value in one.items()}
            known = all(self._now(key.rpartition(".")[0]) is not None for key in values)
            if not values or (not on_cpu and known and self._free(*values, "engine.offload_to_cpu")):
                yield values

    def _fits(self, plan: RunPlan, of: Callable[[int], Phases], step: int) -> bool:
        needs = needs_of(plan, self.machine, of(step))
        peak = max(need.device_bytes for need in needs)
        self.least = min(self.least or peak, peak)
        return peak <= self._room and max(need.host_bytes for need in needs) <= self.machine.host_share

    def _timed(self, candidate: _Candidate, plan: RunPlan) -> _Candidate:
        found = seconds_of(plan, self.machine, candidate.phases, self._factors)
        found = found or seconds_of(plan, ranked(self.machine), candidate.phases, None)
        return replace(candidate, seconds=sum(found.values()))

    def _compiled(self, plan: RunPlan) -> RunPlan | None:
        """The plan with compiled blocks; None: they are, or the user decides, or it gains nothing."""
        engine = plan.engine
        assert isinstance(engine, ShardedPlan)
        settled = engine.compiled or engine.activations_on_host or self._now(_KIND) is None
        if settled or self.machine.device.name == "cpu" or not self._free(_COMPILE):
            return None
        return replace(plan, engine=replace(engine, compiled=engine.wrapped))


def shown(settings: Sequence[Setting], machine: Machine, least: int) -> list[str]:
    """The settings as text."""
    if not settings:
        host = f"with {size_text(machine.host_share)} of host memory for each device"
        lacking = least - round(machine.device.memory * (1 - ROOM))
        why = (
            f"{size_text(lacking)} are lacking at least"
            if lacking > 0
            else "what fits the device needs more there"
        )
        return [f"no settings were found that fit {machine.title} {host}: {why}"]
    lines = [f"settings that fit {machine.title}, the fastest first; add one line to the command"]
    for each in settings:
        peak, step = each.forecast.peak, sum(each.forecast.seconds.values())
        assert peak is not None
        facts = [f"{time_text(step)} a step"] * bool(step) + [
            f"{size_text(peak.device_bytes)} in: {peak.phase}"
        ]
        lines.append(f"  {', '.join(facts)}{f' (changes the {each.changes})' if each.changes else ''}")
        lines.append(f"    {shlex.join(each.overrides) or '(as it is)'}")
    return lines


def _count(step: int, blocks: Sequence[str], steps: range) -> int:
    """How many blocks of a list are recomputed at a step; at the last one all of each list."""
    return -(-step * len(blocks) // (len(steps) - 1))


def _placed(plan: RunPlan, values: Values) -> RunPlan:
    """A plan with parts in host memory."""
    engine = plan.engine
    assert isinstance(engine, ShardedPlan)
    if "engine.offload.activations" in values:
        engine = replace(engine, activations_on_host=True)
    if "engine.offload.optimizer" in values:
        engine = replace(engine, optimizer_on_host=True)
    if "engine.offload.parameters" in values:
        engine = replace(engine, offloaded_bytes=engine.parameter_bytes)
    return replace(plan, engine=engine, ema_on_host=plan.ema_on_host or "ema.device" in values)
