"""For a run that is out of memory: its phase, and settings that need less and that it has not taken."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from itertools import islice

from mm_core.config.dump import plain
from mm_core.device import device_type, free_host_bytes, free_memory_bytes
from mm_core.device.machines import size_text
from mm_core.plan import RunPlan
from mm_core.runtime.launch.rank_process import out_of_memory
from mm_core.schema.fields import ComponentConfig
from mm_core.training.forecast.in_run import NOTHING, Foreseen

_LAST = (
    "shard over more ranks, spread the tokens of a sample (engine.context_parallel), or train smaller samples"
)

_PHASES = {
    "mm_core.training.assembly.assemble": "load",
    "mm_core.training.loop.run_steps": "step",
    "mm_core.evaluation.validator.Validator.run": "evaluation",
    "mm_core.evaluation.validator.Validator.sample": "sample",
    "mm_core.training.between_steps.BetweenSteps.save": "save",
}
"""A function of a run -> the phase in which it is called."""

_OF_STEP = (
    "train.micro_batch_size",
    "engine.recompute",
    "engine.accumulate",
    "engine.offload.activations",
)
"""Keys that change nothing in other phases, except the micro-batch in an evaluation."""


def advise(
    error: BaseException, engine: ComponentConfig, foreseen: Foreseen = NOTHING, plan: RunPlan | None = None
) -> None:
    """Adds to an error about memory, as a note, the phase, what was predicted for it and is free, and what to
    try; leaves other errors as they are.

    Args:
        error: what ended the run.
        engine: the run's config of it.
        foreseen: what was known of the run before it started.
        plan: the run's; None: the one that was foreseen, if any.
    """
    if out_of_memory(error) is None:
        return
    of_host = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
    on_device, phase = not of_host and device_type() != "cpu", phase_of(error)
    need, free = foreseen.need(phase), free_memory_bytes() if on_device else free_host_bytes()
    own = (
        None if need is None else need.host_bytes if of_host and device_type() != "cpu" else need.device_bytes
    )
    sizes = ((own, "were predicted for it"), (free, "are free now"))
    known = ", ".join(f"{size_text(size)} {what}" for size, what in sizes if size is not None)
    plan = plan if plan is not None else foreseen.plan
    found = suggested(engine, plan, phase, on_device) if plan is not None else []
    tries = ", or ".join(f"{override} ({does})" for override, does in found)
    way = f"add to the command {tries}" if found else _LAST
    error.add_note(f"the run was in {phase}{': ' * bool(known)}{known}; {way}")


def phase_of(error: BaseException) -> str:
    """The phase of the run in which an error was raised."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    names = [f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}" for frame in frames]
    return next((_PHASES[name] for name in reversed(names) if name in _PHASES), "step")


def suggested(
    engine: ComponentConfig, plan: RunPlan, phase: str, offloads: bool, count: int = 3
) -> list[tuple[str, str]]:
    """Overrides with which a phase needs less memory, what costs least first, each with what it does."""
    useless = _OF_STEP[phase == "evaluation" :] if phase != "step" else ()
    found = (each for each in rungs(engine, plan, offloads=offloads) if not each[0].startswith(useless))
    return [*islice(found, count)]


def rungs(section: ComponentConfig, plan: RunPlan, *, offloads: bool) -> Iterator[tuple[str, str]]:
    """Overrides that need less memory than a run, what costs least first, each with what it does.

    Args:
        section: the run's config of its engine.
        plan: the run's.
        offloads: whether host memory may be used in place of the device's.
    """
    engine, micro, world = plain(section), plan.micro_batch_size, plan.engine.world
    assert isinstance(engine, dict)
    if micro > 1 and not plan.buckets:
        fewer = max(count for count in range(1, micro) if micro % count == 0)
        yield f"train.micro_batch_size={fewer}", "the same step in more micro-batches"
    if "recompute_modules" in engine and not plan.engine.recomputed:
        yield "engine.recompute_modules=auto", "activations of blocks are computed again in the backward"
    if engine.get("recompute", "full") != "full":
        yield "engine.recompute=full", "nothing within recomputed blocks is kept"
    if engine.get("accumulate") == "deferred" and plan.accumulation > 1 and world > 1:
        yield "engine.accumulate=reduced", "gradients between micro-batches are kept as shards"
    if "sharding_size" in engine and plan.engine.mesh.get("replicate", 1) > 1:
        yield "engine.sharding_size=auto", "weights and states of the optimizer are sharded over all ranks"
    if "reshard_after_forward" in engine and world > 1:
        set_to = engine["reshard_after_forward"]
        if not (engine["preset"] == "zero3" if set_to is None else set_to is True):
            yield "engine.reshard_after_forward=true", "weights are gathered again in the backward"
    kept = engine.get("offload", {}) if offloads else {}
    here = [part for part in kept if not kept[part]]
    if engine.get("offload_to_cpu") or kept.get("parameters"):
        here = [
            part for part in here if part not in ("optimizer", "parameters")
        ]  # the one includes the other
    for part in here:
        yield f"engine.offload.{part}=cpu", "what it names is in host memory while it is not used"
    if engine.get("param_dtype", "bf16") in (None, "fp32"):
        yield "engine.param_dtype=bf16", "forward and backward compute in half of the bytes"
