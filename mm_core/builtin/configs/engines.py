"""Config of the built-in engine, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

from mm_core.schema.fields import Range, Resume

T = TypeVar("T")

ComputeDType = Literal["fp32", "bf16"]
"""fp16 would need loss scaling, which the engine does not do."""

Placement = Literal["replicated", "sharded", "offloaded"]
"""Where a frozen component's weights are: on every rank, sharded, or in host memory between calls."""

# How a changed key is judged at a resume.
_Speed = Annotated[T, Resume("safe", "changes speed, memory or what is shown")]
_Precision = Annotated[T, Resume("allow", "changes the precision")]


@dataclass(frozen=True)
class ContextParallelConfig:
    """How the tokens of a sample are spread over ranks, so that long clips fit."""

    size: Annotated[int, Range(ge=1)] = 1  # ranks that share a sample; it divides the ranks of a shard group
    kind: Literal["ulysses", "ring"] = (
        "ulysses"  # each rank attends with some heads, or keys and values go round the ranks
    )


@dataclass(frozen=True)
class BaseConfig:
    """Where the frozen weights below adapters are: section `base` of the engine."""

    stream: _Speed[bool] = False  # recomputed blocks in host memory, and on the device only while in use
    keep: _Speed[Annotated[int, Range(ge=0)]] = (
        1  # blocks on the device besides the one in use; from 1 on, the next is copied ahead
    )


@dataclass(frozen=True)
class FSDP2Config:
    """Config of the engine `fsdp2`: settings of PyTorch's fully_shard.

    Paths are relative to the task and follow the path grammar: `predictor.blocks.{*}`, `{0-23}`, `{1,3,5}`,
    `{0-20,22-40}`; `auto` uses the model's own plan (`shard_plan`), else the blocks that it declares.
    """

    sharding_size: _Speed[Annotated[int, Range(ge=1)] | Literal["auto"]] = (
        "auto"  # ranks per shard group; auto: all
    )
    sub_modules_to_wrap: _Speed[Literal["auto"] | tuple[str, ...]] = "auto"  # modules gathered one at a time
    ignored_modules: _Speed[tuple[str, ...]] = ()  # frozen modules, or ones without parameters, not sharded
    context_parallel: _Speed[ContextParallelConfig] = field(
        default_factory=ContextParallelConfig  # ranks that share the tokens of a sample
    )
    frozen: _Speed[Mapping[str, Placement]] = field(
        default_factory=dict  # frozen component -> where its weights are
    )
    base: BaseConfig = field(default_factory=BaseConfig)  # frozen weights below adapters
    recompute_modules: _Speed[Literal["auto"] | tuple[str, ...] | None] = (
        None  # modules with activations recomputed in backward; null: those of the model's plan
    )
    use_reentrant: _Speed[bool] = False  # use the older autograd path for recomputation
    reshard_after_forward: _Speed[bool] = True  # false: keep gathered parameters until backward (ZeRO-2)
    param_dtype: _Precision[ComputeDType | None] = (
        None  # dtype in forward and backward; null: as stored (fp32)
    )
    reduce_dtype: _Precision[ComputeDType | None] = (
        "fp32"  # dtype of gradients during reduction; null: param_dtype
    )
    output_dtype: _Precision[ComputeDType | None] = (
        None  # dtype of the trained modules' outputs; null: as computed
    )
    cast_forward_inputs: _Precision[bool] = (
        True  # to param_dtype, except timesteps; false: the model casts its inputs
    )
    num_to_forward_prefetch: _Speed[Annotated[int, Range(ge=0)] | None] = (
        None  # wrapped modules gathered ahead in forward; null: those of the model's plan
    )
    num_to_backward_prefetch: _Speed[Annotated[int, Range(ge=0)] | None] = (
        None  # wrapped modules gathered ahead in backward; null: those of the model's plan
    )
    offload_to_cpu: _Speed[bool] = False  # keep shards, gradients and optimizer state in host memory
    pin_memory: _Speed[bool] = True  # page-locked host memory for offloaded shards
