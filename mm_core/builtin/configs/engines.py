"""Config of the built-in engine, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

from mm_core.schema.fields import DType, Range, Resume

T = TypeVar("T")

ComputeDType = Literal["fp32", "bf16"]


Placement = Literal["replicated", "sharded", "offloaded"]
"""Where a frozen component's weights are: on every rank, sharded, or in host memory between calls."""

Attention = Literal[
    "auto", "sdpa", "flash", "efficient", "cudnn", "math", "flash_2", "flash_3", "torch_npu", "xformers"
]
"""Kernels of attention: `flash`, `efficient`, `cudnn` and `math` are torch's own, behind its `sdpa`."""

# How a changed key is judged at a resume.
_Speed = Annotated[T, Resume("safe", "changes speed, memory or what is shown")]
_Rounding = Annotated[T, Resume("allow", "changes the kernels, and so the rounding")]
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
class CompileConfig:
    """Which modules torch.compile compiles, each into one graph; nothing falls back to eager."""

    modules: Literal["auto"] | bool | tuple[str, ...] = False  # auto or on: the repeated blocks; off: none
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        "default"  # of torch.compile
    )
    dynamic: bool = True  # one graph for all sizes; false: one for each size


@dataclass(frozen=True)
class OffloadConfig:
    """What is kept in host memory while it is not used."""

    optimizer: Literal["cpu"] | None = None  # the state of the optimizer, which then updates there
    parameters: Literal["cpu"] | None = None  # shards, with their gradients and the state of the optimizer
    activations: Literal["cpu"] | None = None  # what the wrapped modules keep for the backward


@dataclass(frozen=True)
class FSDP2Config:
    """Config of the engine `fsdp2`: settings of PyTorch's fully_shard.

    Paths are relative to the task and follow the path grammar: `predictor.blocks.{*}`, `{0-23}`, `{1,3,5}`,
    `{0-20,22-40}`; `auto` uses the model's own plan (`shard_plan`), else the blocks that it declares.
    """

    preset: _Speed[Literal["ddp", "zero2", "zero3"]] = (
        "zero3"  # of sharding_size and reshard_after_forward, where they are null
    )
    sharding_size: _Speed[Annotated[int, Range(ge=1)] | Literal["auto"] | None] = (
        None  # ranks per shard group; auto: all; null: of the preset
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
    attention: _Rounding[Attention] = "auto"  # kernel of attention; auto: what the model's library takes
    recompute: _Speed[Literal["full", "selective"] | tuple[str, ...]] = (
        "full"  # selective keeps the outputs of attention and matmul; or a list of those and of operators
    )
    compile: _Rounding[CompileConfig] = field(
        default_factory=CompileConfig  # torch.compile of modules
    )
    use_reentrant: _Speed[bool] = False  # use the older autograd path for recomputation
    reshard_after_forward: _Speed[bool | tuple[str, ...] | None] = (
        None  # false: keep gathered parameters until backward; or modules that do not; null: of the preset
    )
    accumulate: _Rounding[Literal["deferred", "reduced"]] = (
        "deferred"  # gradients are averaged at the last micro-batch; reduced: at each, and kept as shards
    )
    late_norm: _Speed[bool] = (
        False  # on an accelerator, the host reads a step's norm after the next forward and backward
    )
    param_dtype: _Precision[DType | None] = (
        None  # dtype in forward and backward, fp16 with a loss scale; null: as stored (fp32)
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
    offload: _Speed[OffloadConfig] = field(
        default_factory=OffloadConfig  # what is kept in host memory
    )
    offload_to_cpu: _Speed[bool] = False  # the same as offload: {parameters: cpu}
    pin_memory: _Speed[bool] = True  # page-locked host memory for offloaded shards

    def offloads_parameters(self) -> bool:
        """Whether shards, gradients and the state of the optimizer are in host memory."""
        return self.offload_to_cpu or self.offload.parameters == "cpu"

    def offloads_optimizer(self) -> bool:
        """Whether the optimizer alone is in host memory, and its parameters are on the device."""
        return self.offload.optimizer == "cpu" and not self.offloads_parameters()

    def sharding(self) -> int | Literal["auto"]:
        """Ranks per shard group: what the config sets, else of the preset."""
        return self.sharding_size or (1 if self.preset == "ddp" else "auto")

    def reshards(self) -> bool | tuple[str, ...]:
        """Whether or which modules drop gathered parameters after forward: of the config, else the preset."""
        reshards = self.reshard_after_forward
        return self.preset == "zero3" if reshards is None else reshards
