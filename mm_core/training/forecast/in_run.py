"""The forecast of a run that starts: its first lines, whether it fits, and whether it was right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from mm_core.checkpoint.reading import adapters_begun
from mm_core.config.sections import RunConfig
from mm_core.contracts import Engine, TaskModule
from mm_core.device import (
    device_type,
    environment_world,
    free_host_bytes,
    free_memory_bytes,
    peak_memory_bytes,
)
from mm_core.device.machines import Machine, launched_machine, size_text
from mm_core.errors import PlanError, first_line, plural
from mm_core.plan import RunPlan, build_frozen, build_task, plan_shown
from mm_core.plan.planning import state_tensors
from mm_core.plan.run_plan import device_bytes
from mm_core.runtime.launch.signals import leaving_at_signals
from mm_core.runtime.ranks import Ranks

if TYPE_CHECKING:
    from mm_core.training.forecast.forecast import Forecast, Need

SMALL = 0.1
"""Model states of a host's ranks on CPUs, as a share of its memory, that need no forecast."""

TOO_MUCH = 1.15
"""What a run may need, as a multiple of the free memory: a forecast errs by less."""

RIGHT = 0.1
"""The share of a forecast by which what is measured may differ without a note."""


@dataclass(frozen=True)
class Foreseen:
    """What is known of a run before it starts.

    Attributes:
        forecast: of the run; None: there is none.
        plan: of the run, as the forecast has it.
        machine: runs it.
        notes: for its first lines.
    """

    forecast: Forecast | None = None
    plan: RunPlan | None = None
    machine: Machine | None = None
    notes: tuple[str, ...] = ()

    def need(self, phase: str) -> Need | None:
        """What a phase was predicted to need; None: unknown."""
        needs = self.forecast.needs if self.forecast is not None else ()
        return next((need for need in needs if need.phase == phase), None)


NOTHING = Foreseen()


def foresee(config: RunConfig) -> Foreseen:
    """What rank 0 foresees of a run before it joins the other ranks: a forecast has a process group of its
    own. On CPUs a small model has none. An error in it is a note."""
    if environment_world().rank > 0:
        return NOTHING
    try:
        with leaving_at_signals("forecasting the run", patience=1.0), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run shows them
            return _foreseen(config)
    except Exception as error:  # whatever it is, the run does without
        return Foreseen(notes=(f"there is no forecast: {first_line(error)}",))


def _foreseen(config: RunConfig) -> Foreseen:
    from mm_core.training.forecast.study import Study  # which imports what runs do

    machine, adapters = launched_machine(), adapters_begun(config.train.adapters, config.run.folder)
    task = build_task(config, adapters)
    if device_type() == "cpu" and _states(config, task, machine.world) < SMALL * machine.device.memory:
        return NOTHING
    plan, samples = plan_shown(config, machine.world, task)
    if plan.files_to_start:  # the run ends with them
        return NOTHING
    found = Study(config, plan, machine, samples, adapters).forecast()
    unknown = found.notes if found.peak is not None and found.peak.phase == "states" else ()
    return Foreseen(found, plan, machine, (f"forecast: {found.line()}", *unknown))


def _states(config: RunConfig, task: TaskModule, world: int) -> int:
    """Bytes of a rank's model states, without the data."""
    engine: Engine = config.registry.build("engine", config.engine)
    build_frozen(task)
    plan = engine.plan(task, world, state_tensors(config))
    return sum(device_bytes(plan).values()) + sum(part.device_bytes for part in plan.parts)


def checked(found: Foreseen, ranks: Ranks, free: Callable[[], int | None] = free_memory_bytes) -> Foreseen:
    """What rank 0 foresees, on all ranks, once compared with the memory that is free. All ranks call it.

    Args:
        found: of this rank.
        ranks: of the run.
        free: the bytes of a rank's device that are free, or on CPU of its host; None: unknown.

    Raises:
        PlanError: a device has far too little.
    """
    found = ranks.from_first(found)
    machine, forecast = found.machine, found.forecast
    peak = forecast.peak if forecast is not None else None
    if forecast is None or peak is None or machine is None:
        return found
    host, there = max(need.host_bytes for need in forecast.needs) * machine.ranks, free_host_bytes()
    if device_type() != "cpu" and there is not None and host > there:
        text = f"the ranks of a host need {size_text(host)} of its memory, {size_text(there)} are free"
        found = replace(found, notes=(*found.notes, f"warning: {text}"))
    known = [(size, rank) for rank, size in enumerate(ranks.gather(free())) if size is not None]
    (least, rank), on_cpu = min(known, default=(inf, 0)), device_type() == "cpu"
    # The driver's context is there already: it is made before free memory can be read.
    held = 0 if on_cpu else machine.device.context
    wanted = peak.device_bytes * (machine.ranks if on_cpu else 1) - held
    if wanted <= least:
        return found
    who = "the ranks of a host need" if on_cpu else "the run needs"
    what = f"{who} about {size_text(wanted)} at the peak ({peak.phase}), but {size_text(least)} are free"
    on = "" if least > 0.9 * machine.device.memory else f" --on {machine.sized(round(least))}"
    hint = f"add --dry-run{on} --fit to the command for settings that fit"
    if wanted > TOO_MUCH * least and not on_cpu:
        raise PlanError(
            what,
            where=f"rank {rank}, memory of the device",
            accepted=f"a forecast of at most {size_text(TOO_MUCH * least)}",
            hint=f"{hint}, or --no-forecast to start all the same",
        )
    return replace(found, notes=(*found.notes, f"warning: {what}; {hint}"))


class PeakCheck:
    """Compares what a device has allocated with the forecast, and notes the first large difference.

    Args:
        forecast: of the run.
        note: shows a message.
        measured: returns the peak of the device's allocator.
    """

    def __init__(
        self, forecast: Forecast, note: Callable[[str], None], measured: Callable[[], int] = peak_memory_bytes
    ) -> None:
        needs = forecast.needs if device_type() != "cpu" else ()
        self._needs, self._done = {need.phase: need.allocated for need in needs}, {"load"}
        self._note, self._measured = note, measured

    def __call__(self, phase: str) -> None:
        """Called when a phase has run, and with `end` after the last step."""
        at_end = phase == "end"
        if not at_end and (phase in self._done or phase not in self._needs):
            return
        self._done.add(phase)
        # An evaluation at the start has no optimizer's state yet.
        if "step" not in self._done or not self._needs:
            return
        expected, top = max((size, name) for name, size in self._needs.items() if name in self._done)
        measured = self._measured()
        # Later steps may need more: of a larger bucket, or with states that the first ones had not.
        least = expected * (1 - RIGHT) if at_end else 0
        if not least <= measured <= expected * (1 + RIGHT):
            self._needs = {}
            self._note(
                f"the forecast was wrong in {phase if measured > expected else top}: tensors took"
                f" {plural(measured, 'byte')}, predicted were {plural(expected, 'byte')}"
            )
