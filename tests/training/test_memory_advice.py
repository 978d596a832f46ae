"""A run that is out of memory says where it was, and names settings that need less: each works, and is not
named again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mm_custom_dit.model import CustomDiT

from mm_core.checkpoint.store import CheckpointStore
from mm_core.config.load import load_config
from mm_core.device.machines import GIB
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.plan import make_plan
from mm_core.runtime.launch.rank_process import out_of_memory
from mm_core.training import run
from mm_core.training.forecast.forecast import Forecast, Need
from mm_core.training.forecast.in_run import NOTHING, Foreseen
from mm_core.training.optional import memory
from mm_core.training.optional.memory import advise, rungs, suggested
from mm_core.training.run import train

FULL = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.25 GiB of which"
DEAR = ("engine.preset=ddp", "engine.recompute=selective")


def test_each_override_is_one_that_a_run_takes_until_none_is_left(tiny):
    taken: list[str] = []
    while True:
        config = load_config(tiny, [*DEAR, *taken])
        left = [override for override, _ in rungs(config.engine, make_plan(config, 4), offloads=True)]
        if not left:
            break
        assert left[0] not in taken
        taken.append(left[0])
    assert taken == [
        "train.micro_batch_size=1",
        "engine.recompute_modules=auto",
        "engine.recompute=full",
        "engine.accumulate=reduced",
        "engine.sharding_size=auto",
        "engine.reshard_after_forward=true",
        "engine.offload.optimizer=cpu",
        "engine.offload.parameters=cpu",
        "engine.offload.activations=cpu",
        "engine.param_dtype=bf16",
    ]


def foreseen(config, world: int = 4) -> Foreseen:
    """What each phase needs, in as many GiB on the device as its name has letters, and one on the host."""
    phases = ("load", "step", "evaluation", "sample")
    needs = tuple(Need(phase, len(phase) * GIB, GIB, {}, 0) for phase in phases)
    return Foreseen(Forecast("any", 80 * GIB, needs, {}, 8, 12, ()), make_plan(config, world))


def advice(config, error: BaseException, known: Foreseen | None = None) -> str | None:
    advise(error, config.engine, known or foreseen(config))
    found = out_of_memory(error)
    return found.hint if found is not None else None


@pytest.fixture
def on_a_device(monkeypatch):
    """A mock: a device with 3 GiB that are free, and a host with 7."""
    monkeypatch.setattr(memory, "device_type", lambda: "cuda")
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: 3 * GIB)
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 7 * GIB)


def test_the_advice_has_the_phase_its_forecast_free_memory_and_three_overrides(tiny, on_a_device):
    config = load_config(tiny)
    assert advice(config, torch.OutOfMemoryError(FULL)) == (
        "the run was in step: 4.0 GiB were predicted for it, 3.0 GiB are free now; add to the command"
        " train.micro_batch_size=1 (the same step in more micro-batches), or"
        " engine.recompute_modules=auto (activations of blocks are computed again in the backward), or"
        " engine.offload.optimizer=cpu (what it names is in host memory while it is not used)"
    )
    host = advice(config, MemoryError())
    assert host is not None and host.startswith(
        "the run was in step: 1.0 GiB were predicted for it, 7.0 GiB are free now; add to the command"
    )
    unknown = advice(config, MemoryError(), NOTHING)
    assert unknown is not None and unknown.startswith("the run was in step: 7.0 GiB are free now; shard over")
    fault = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert advice(config, fault) is None and not hasattr(fault, "__notes__")


def test_what_is_named_fits_the_memory_that_is_full(tiny, on_a_device, monkeypatch):
    small = ["train.micro_batch_size=1", "engine.recompute_modules=auto", "engine.accumulate=reduced"]
    config = load_config(tiny, small)
    offload, half = (
        "add to the command engine.offload.optimizer=cpu (",
        "add to the command engine.param_dtype=bf16 (",
    )
    assert offload in advice(config, torch.OutOfMemoryError(FULL))
    assert half in advice(config, MemoryError())
    monkeypatch.setattr(memory, "device_type", lambda: "cpu")
    assert half in advice(config, torch.OutOfMemoryError(FULL))
    last = advice(load_config(tiny, [*small, "engine.param_dtype=bf16"]), MemoryError())
    assert last is not None and "; shard over more ranks, spread the tokens of a sample (engine." in last
    plan = make_plan(config, 1)
    alone = [
        override for override, _ in rungs(config.engine, replace(plan, buckets=("any",)), offloads=False)
    ]
    assert alone == ["engine.param_dtype=bf16"]


@pytest.mark.parametrize(("phase", "first"), [
    ("load", "engine.offload.optimizer"),
    ("evaluation", "train.micro_batch_size"),
    ("sample", "engine.offload.optimizer"),
])  # fmt: skip
def test_what_changes_a_step_alone_is_not_named_for_other_phases(tiny, phase, first):
    config = load_config(tiny)
    found = [override for override, _ in suggested(config.engine, make_plan(config, 4), phase, True)]
    assert found[0].startswith(first)
    assert not any(each.startswith(("engine.recompute", "engine.offload.activations")) for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["load", "step", "evaluation", "sample", "save"])
def test_a_run_that_is_out_of_memory_says_in_which_phase(tiny, tmp_path, monkeypatch, phase):
    """A stand-in for a full device: what the phase calls raises what torch raises there."""

    def full(*_, **__):
        raise torch.OutOfMemoryError(FULL)

    inputs = ("type", "annotations", "num_frames", "height", "width")
    held_out = [f"data.validation.{key}=${{data.train.{key}}}" for key in inputs]
    sampled = "validation={every: 1, clips: 2, samples: {prompts: [a circle], steps: 1}}"
    config = load_config(tiny, [f"run.dir={tmp_path}", *held_out, sampled])
    task = config.registry.resolve("task", config.task.type).load_target()
    owner, name = {
        "load": (FSDP2Engine, "prepare"),
        "step": (CustomDiT, "forward"),
        "evaluation": (task, "evaluate"),
        "sample": (task, "sample"),
        "save": (CheckpointStore, "save"),
    }[phase]
    # The forecast is made by hand, since a tiny model on a CPU has none.
    monkeypatch.setattr(run, "foresee", lambda config: replace(foreseen(config, 1), forecast=None))
    monkeypatch.setattr(owner, name, full)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(config)
    found = out_of_memory(caught.value)
    assert found is not None and found.what.startswith("out of memory: CUDA out of memory. Tried to allocate")
    assert found.hint is not None and found.hint.startswith(f"the run was in {phase}: ")
    assert (" train.micro_batch_size=1 (" in found.hint) is (phase in ("step", "evaluation"))
