"""Config of the built-in engines: torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from mm_core.schema.fields import Range

ComputeDType = Literal["fp32", "bf16"]
"""fp16 would need loss scaling, which the engine does not do."""

Placement = Literal["replicated", "sharded", "offloaded"]
"""Of a frozen component's weights: on every rank, 1/shards a rank, or in host memory between calls."""


@dataclass(frozen=True)
class FSDP2Config:
    """Keys of PyTorch's fully_shard. Paths are relative to the task and follow the path grammar:
    `predictor.blocks.{*}`, `{0-23}`, `{1,3,5}`, `{0-20,22-40}`; `auto` takes the model's own blocks."""

    sharding_size: Annotated[int, Range(ge=1)] | Literal["auto"] = "auto"  # ranks a shard group; auto: all
    sub_modules_to_wrap: Literal["auto"] | tuple[str, ...] = "auto"  # modules gathered one at a time
    ignored_modules: tuple[str, ...] = ()  # frozen modules, or parts without parameters, left alone
    frozen: Mapping[str, Placement] = field(default_factory=dict)  # frozen component -> where its weights lie
    recompute_modules: Literal["auto"] | tuple[str, ...] = ()  # activations recomputed in backward
    use_reentrant: bool = False  # the older autograd path of recomputation
    reshard_after_forward: bool = True  # false: keeps gathered parameters until backward (ZeRO-2)
    param_dtype: ComputeDType | None = None  # parameters in forward and backward; none: as stored (fp32)
    reduce_dtype: ComputeDType | None = "fp32"  # gradients while they are reduced; none: param_dtype
    output_dtype: ComputeDType | None = None  # of the trained modules' outputs; none: as computed
    cast_forward_inputs: bool = True  # to param_dtype, timesteps excepted; false: the model casts itself
    num_to_forward_prefetch: Annotated[int, Range(ge=0)] = 0  # wrapped modules gathered ahead in forward
    num_to_backward_prefetch: Annotated[int, Range(ge=0)] = 0  # and in backward
    offload_to_cpu: bool = False  # shards, gradients and optimizer live in host memory
    pin_memory: bool = True  # page-locked host memory for offloaded shards
