"""A run that is out of memory names the next setting that needs less: each works, and is not named again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mm_custom_dit.model import CustomDiT

from mm_core.config.load import load_config
from mm_core.plan import make_plan
from mm_core.runtime.launch.rank_process import out_of_memory
from mm_core.training.optional import memory
from mm_core.training.optional.memory import advise, rungs
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


def advice(config, error: BaseException, world: int = 4) -> str | None:
    advise(error, config.engine, make_plan(config, world))
    found = out_of_memory(error)
    return found.hint if found is not None else None


def test_what_is_named_fits_the_memory_that_is_full(tiny, monkeypatch):
    small = ["train.micro_batch_size=1", "engine.recompute_modules=auto", "engine.accumulate=reduced"]
    monkeypatch.setattr(memory, "device_type", lambda: "cuda")
    config = load_config(tiny, small)
    words = "what it names is in host memory while it is not used"
    found = advice(config, torch.OutOfMemoryError(FULL))
    assert found == f"add engine.offload.optimizer=cpu to the command: {words}"
    half = "add engine.param_dtype=bf16 to the command: forward and backward compute in half of the bytes"
    assert advice(config, MemoryError()) == half
    monkeypatch.setattr(memory, "device_type", lambda: "cpu")
    assert advice(config, torch.OutOfMemoryError(FULL)) == half
    last = advice(load_config(tiny, [*small, "engine.param_dtype=bf16"]), MemoryError())
    assert last is not None and last.startswith(
        "shard over more ranks, spread the tokens of a sample (engine."
    )
    fault = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert advice(config, fault) is None and not hasattr(fault, "__notes__")
    plan = make_plan(config, 1)
    alone = [
        override for override, _ in rungs(config.engine, replace(plan, buckets=("any",)), offloads=False)
    ]
    assert alone == ["engine.param_dtype=bf16"]


@pytest.mark.slow
def test_a_step_that_is_out_of_memory_ends_the_run_with_the_advice(tiny, tmp_path, monkeypatch):
    """A stand-in for a full device: the model raises what torch raises there."""

    def full(*_, **__):
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(CustomDiT, "forward", full)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(load_config(tiny, [f"run.dir={tmp_path}"]))
    found = out_of_memory(caught.value)
    assert found is not None and found.what.startswith("out of memory: CUDA out of memory. Tried to allocate")
    assert found.hint == "add train.micro_batch_size=1 to the command: the same step in more micro-batches"
