"""For a run that is out of memory: the next setting that needs less and that the run has not taken."""

from __future__ import annotations

from collections.abc import Iterator

from mm_core.config.dump import plain
from mm_core.device import device_type
from mm_core.plan import RunPlan
from mm_core.runtime.launch.rank_process import out_of_memory
from mm_core.schema.fields import ComponentConfig

_LAST = (
    "shard over more ranks, spread the tokens of a sample (engine.context_parallel), or train smaller samples"
)


def advise(error: BaseException, engine: ComponentConfig, plan: RunPlan) -> None:
    """Adds to an error about memory, as a note, the override to try next; leaves other errors as they are.

    Args:
        error: what ended the run.
        engine: the run's config of it.
        plan: the run's.
    """
    if out_of_memory(error) is None:
        return
    of_host = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
    found = next(rungs(engine, plan, offloads=not of_host and device_type() != "cpu"), None)
    error.add_note(f"add {found[0]} to the command: {found[1]}" if found is not None else _LAST)


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
