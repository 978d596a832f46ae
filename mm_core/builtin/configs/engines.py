"""Config of the built-in engine, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from mm_core.schema.fields import Range

ComputeDType = Literal["fp32", "bf16"]
"""fp16 would need loss scaling, which the engine does not do."""

Placement = Literal["replicated", "sharded", "offloaded"]
"""Where a frozen component's weights are: on every rank, sharded, or in host memory between calls."""


@dataclass(frozen=True)
class FSDP2Config:
    """Config of the engine `fsdp2`: settings of PyTorch's fully_shard.

    Paths are relative to the task and follow the path grammar: `predictor.blocks.{*}`, `{0-23}`, `{1,3,5}`,
    `{0-20,22-40}`; `auto` uses the model's own plan (`shard_plan`), else the blocks that it declares.
    """

    sharding_size: Annotated[int, Range(ge=1)] | Literal["auto"] = "auto"  # ranks per shard group; auto: all
    sub_modules_to_wrap: Literal["auto"] | tuple[str, ...] = "auto"  # modules gathered one at a time
    ignored_modules: tuple[str, ...] = ()  # frozen modules, or modules without parameters, not sharded
    frozen: Mapping[str, Placement] = field(default_factory=dict)  # frozen component -> where its weights are
    recompute_modules: Literal["auto"] | tuple[str, ...] | None = (
        None  # modules with activations recomputed in backward; null: those of the model's plan
    )
    use_reentrant: bool = False  # use the older autograd path for recomputation
    reshard_after_forward: bool = True  # false: keep gathered parameters until backward (ZeRO-2)
    param_dtype: ComputeDType | None = None  # dtype in forward and backward; null: as stored (fp32)
    reduce_dtype: ComputeDType | None = "fp32"  # dtype of gradients during reduction; null: param_dtype
    output_dtype: ComputeDType | None = None  # dtype of the trained modules' outputs; null: as computed
    cast_forward_inputs: bool = True  # to param_dtype, except timesteps; false: the model casts its inputs
    num_to_forward_prefetch: Annotated[int, Range(ge=0)] | None = (
        None  # wrapped modules gathered ahead in forward; null: those of the model's plan
    )
    num_to_backward_prefetch: Annotated[int, Range(ge=0)] | None = (
        None  # wrapped modules gathered ahead in backward; null: those of the model's plan
    )
    offload_to_cpu: bool = False  # keep shards, gradients and optimizer state in host memory
    pin_memory: bool = True  # page-locked host memory for offloaded shards
