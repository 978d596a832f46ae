"""The device stack: the only room that names accelerators and their communication backends.

`cuda` uses nccl, Ascend `npu` (through torch_npu, found by import) uses hccl, `cpu` uses gloo. Every process
group also has gloo for CPU tensors: the loop's small collectives and checkpoints use it.
"""

from mm_core.device.kernels import (
    ATTENTION_OPERATORS,
    attend_part,
    attend_part_backward,
    attention_of_any_length,
    missing_compiler,
    returns_log_sums,
    set_deterministic,
    set_numerics,
)
from mm_core.device.kind import (
    ACCELERATOR_NAMES,
    CPU_BACKEND,
    World,
    bind_device,
    communication_backends,
    current_device,
    device_count,
    device_stack,
    device_type,
    environment_world,
    synchronize,
    untested_torch,
)
from mm_core.device.measurement import (
    DeviceClock,
    MemoryRecorder,
    copied_to,
    copied_to_host,
    free_host_bytes,
    free_memory_bytes,
    memory_recorder,
    peak_memory_bytes,
    reset_peak_memory,
)
from mm_core.device.operators import with_numbers
from mm_core.device.peaks import peak_flops, published_peak

__all__ = [
    "ACCELERATOR_NAMES",
    "ATTENTION_OPERATORS",
    "CPU_BACKEND",
    "DeviceClock",
    "MemoryRecorder",
    "World",
    "attend_part",
    "attend_part_backward",
    "attention_of_any_length",
    "bind_device",
    "communication_backends",
    "copied_to",
    "copied_to_host",
    "current_device",
    "device_count",
    "device_stack",
    "device_type",
    "environment_world",
    "free_host_bytes",
    "free_memory_bytes",
    "memory_recorder",
    "missing_compiler",
    "peak_flops",
    "peak_memory_bytes",
    "published_peak",
    "reset_peak_memory",
    "returns_log_sums",
    "set_deterministic",
    "set_numerics",
    "synchronize",
    "untested_torch",
    "with_numbers",
]
