"""The error for memory that ran out: a request that nothing could meet is not caused by the batch."""

from __future__ import annotations

import pytest
import torch

from mm_core.runtime.launch.rank_process import out_of_memory

BATCH = "use a smaller train.micro_batch_size, engine.recompute_modules=auto, or shard over more ranks"


def broadcast_wrongly() -> torch.Tensor:
    sigma = torch.ones(100_000_000)
    return sigma * sigma[:, None]  # 36 PiB, which no host has: refused at once, nothing is allocated


def test_one_tensor_larger_than_the_host_is_reported_with_its_place():
    with pytest.raises(RuntimeError) as caught:
        broadcast_wrongly()
    found = out_of_memory(caught.value)
    assert found.what.startswith("out of memory: one tensor needs 37,252,903.0 GiB, in broadcast_wrongly (")
    assert f"{__file__}:" in found.what and "), but the total memory is " in found.what
    assert found.what.endswith(" GiB")
    assert found.hint.startswith("check that code for unintended broadcasting (a [B] where")


# What torch 2.13 answers; there is no such device here.
ON_A_DEVICE = "CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 79.25 GiB of which"


def test_a_request_that_a_device_could_meet_is_a_matter_of_the_batch():
    found = out_of_memory(torch.OutOfMemoryError(ON_A_DEVICE.format("2.50")))
    assert found.hint == BATCH and found.what.startswith("out of memory: CUDA out of memory. Tried to")
    found = out_of_memory(torch.OutOfMemoryError(ON_A_DEVICE.format("80.00")))
    assert found.what.endswith("one tensor needs 80.0 GiB, but the total memory is 79.2 GiB")


# What torch_npu and older versions of torch answer.
CAPACITY_LAST = (
    "NPU out of memory. Tried to allocate {} GiB (NPU 0; 60.97 GiB total capacity; 2.00 GiB already"
)


def test_a_device_that_names_its_capacity_otherwise_is_judged_by_it():
    found = out_of_memory(RuntimeError(CAPACITY_LAST.format("60.00")))
    assert found.hint == BATCH and found.what.startswith("out of memory: NPU out of memory. Tried to")
    found = out_of_memory(RuntimeError(CAPACITY_LAST.format("61.00")))
    assert found.what.endswith("one tensor needs 61.0 GiB, but the total memory is 61.0 GiB")


def test_the_memory_of_the_host_is_no_measure_of_a_device():
    found = out_of_memory(RuntimeError("XPU out of memory. Tried to allocate 900000.00 GiB."))
    assert found.hint == BATCH


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."),
        RuntimeError("DefaultCPUAllocator: not enough memory, out of memory: tried to allocate a lot"),
    ],
)  # fmt: skip
def test_other_requests_keep_the_hint_of_the_batch(error):
    assert out_of_memory(error).hint == BATCH


def test_what_is_no_matter_of_memory_is_none():
    assert out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
