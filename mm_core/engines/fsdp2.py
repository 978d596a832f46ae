"""The engine on PyTorch's `fully_shard` (FSDP2).

It covers one process, sharded, replicated and hybrid training: parameters are always on the mesh (replicas,
shards), and (W, 1) is replicated training. With context parallelism, neighbours within a shard group compute
the same samples. Reference: https://arxiv.org/abs/2304.11277 and the documentation of
torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from mm_core.builtin.configs.engines import FSDP2Config
from mm_core.contracts import (
    DataRanks,
    EnginePlan,
    InitialWeights,
    Loss,
    Randomness,
    TaskModule,
    WeightPlan,
    torch_dtype,
)
from mm_core.engines.base import EngineBase
from mm_core.engines.local_shards import skips
from mm_core.engines.loss_scale import LossScale
from mm_core.modules.casting import cast_as_planned, check_dtypes, uncast_inputs
from mm_core.modules.quantised import check_device, shard_codes
from mm_core.modules.tying import tied_names
from mm_core.parallel.activation_checkpointing import kept_by, offload_activations, recompute, selective
from mm_core.parallel.attention import check_kernel, decide_attention, kernel_named, set_attention
from mm_core.parallel.compiling import check_compiler, compile_module, decide_compiled
from mm_core.parallel.context.exchange import Peers
from mm_core.parallel.context.layout import decide_context
from mm_core.parallel.context.spreading import Spreading
from mm_core.parallel.frozen_placement import place, plan_frozen
from mm_core.parallel.gloo_averaging import average_by_sum, check_replicas
from mm_core.parallel.host_optimizer import HostOptimizer
from mm_core.parallel.layout import (
    Layout,
    ShardedPlan,
    decide_layout,
    gathered_bytes,
    mesh_shape,
    parameter_bytes,
    resharded,
)
from mm_core.parallel.prefetch import set_prefetch
from mm_core.parallel.scalar_parameters import ScalarParameters, scalars_of
from mm_core.parallel.streamed_base import StreamedBase, frozen_in, plan_base
from mm_core.parallel.unused_modules import UnusedModules
from mm_core.runtime.groups import adjacent_group, device_mesh
from mm_core.runtime.ranks import Ranks


class FSDP2Engine(EngineBase):
    """The FSDP2 engine: shards a task's trained modules, steps them in mixed precision, owns the optimizer.

    Its fields are those of `FSDP2Config` and described there.
    """

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.config = FSDP2Config(**fields)
        self._compute_dtype: str | None = None
        self._loss_scale: LossScale | None = None
        self._roots: list[FSDPModule] = []
        self._synced = True
        self._unused = UnusedModules(())
        self._scalars: ScalarParameters | None = None
        self._ranks: DeviceMesh | None = None
        self._base: StreamedBase | None = None

    # -- plan ----------------------------------------------------------------------------------

    def plan(
        self,
        task: TaskModule,
        world: int,
        optimizer_state_tensors: float,
        *,
        purpose: Literal["train", "sample", "import"] = "train",
    ) -> ShardedPlan:
        """Plans the engine's sharding for `world` ranks, with the bytes of rank 0, whose shards are largest.

        Args:
            task: on the meta device.
            world: number of ranks.
            optimizer_state_tensors: tensors of optimizer state per parameter, in parameter sizes.
            purpose: for `sample`, sizes that do not divide `world` change, and a CPU computes in float32.

        Raises:
            PlanError: a setting of the engine that does not fit the task or the number of ranks.
        """
        config = self._for_samples(world) if purpose == "sample" else self.config
        context = decide_context(task, task.trainable, config.context_parallel, world, self.device.type)
        size = 1 if context is None else context.size
        replicas, shards = mesh_shape(world, config.sharding(), size, preset=config.sharding_size is None)
        check_replicas(self.device, replicas)
        layout, dtype = self._layout(task, config), _dtype(config.param_dtype)
        check_dtypes(task, task.trainable)
        check_device(task, self.device)
        compiled = decide_compiled(task, task.trainable, config, layout.recomputed)
        reshards = resharded(task, layout, config.reshards())
        self._check_host(purpose, config, compiled)
        base = plan_base(task, layout, config.base.keep, dtype) if config.base.stream else None
        streamed = {p for path in base.blocks for _, p in frozen_in(task, path)} if base is not None else ()
        own, trained, left_alone = parameter_bytes(task, layout, shards, streamed)
        return ShardedPlan(
            **vars(layout),
            world=world,
            data_parallel=world // size,
            mesh={"replicate": replicas, "shard": shards // size, **({"context": size} if context else {})},
            parameter_bytes=own,
            gradient_bytes=trained,
            optimizer_bytes=round(trained * optimizer_state_tensors),
            frozen=plan_frozen(task, config.frozen, layout.ignored, shards),
            base=base,
            offloaded_bytes=own - left_alone if config.offloads_parameters() else 0,
            optimizer_on_host=config.offloads_optimizer(),
            gathered_bytes=gathered_bytes(task, layout, dtype, reshards, streamed),
            compute_dtype=config.param_dtype,
            cast_inputs=(*layout.wrapped, *task.trainable) if dtype and config.cast_forward_inputs else (),
            details=layout.shown() | ({"compiled": compiled} if compiled else {}),
            context=context,
            compiled=compiled,
            resharded=reshards,
            attention=decide_attention(task, task.trainable, config.attention, context),
            kept=kept_by(config),
            activations_on_host=config.offload.activations == "cpu",
        )

    def _check_host(self, purpose: str, config: FSDP2Config, compiled: Sequence[str]) -> None:
        if purpose != "import":  # which computes nothing
            check_compiler(compiled)
            check_kernel(config.attention, self.device, _dtype(config.param_dtype) or torch.float32)

    def _layout(self, task: TaskModule, config: FSDP2Config) -> Layout:
        return decide_layout(
            task,
            task.trainable,
            wrap=config.sub_modules_to_wrap,
            recompute=config.recompute_modules,
            ignore=config.ignored_modules,
            forward_prefetch=config.num_to_forward_prefetch,
            backward_prefetch=config.num_to_backward_prefetch,
        )

    def _for_samples(self, world: int) -> FSDP2Config:
        size, on_cpu = self.config.sharding(), self.device.type == "cpu"
        context = self.config.context_parallel
        return replace(
            self.config,
            sharding_size="auto" if size == "auto" or world % size else size,
            context_parallel=replace(context, size=gcd(context.size, world)),
            param_dtype="fp32" if on_cpu else self.config.param_dtype,
            attention="auto" if on_cpu else self.config.attention,
            compile=replace(self.config.compile, modules=False),  # it would take longer than it saves
        )

    # -- prepare -------------------------------------------------------------------------------

    def place_frozen(self, task: TaskModule, plan: EnginePlan, weights: InitialWeights) -> None:
        """The engine's loading of frozen components: allocates and fills those in `plan.frozen` in turn."""
        mesh = self._mesh(plan) if any(part.placement == "sharded" for part in plan.frozen) else None
        for part in plan.frozen:
            place(task.get_submodule(part.name), part, self.device, weights, mesh["shard"] if mesh else None)

    def prepare(
        self,
        task: TaskModule,
        plan: ShardedPlan,
        optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer] | None,
        rng: Randomness,
        weights: WeightPlan | None = None,
    ) -> None:
        """Prepares a task: recompute -> compile -> shard -> allocate -> initialise or fill -> optimizer.

        `task` changes in place. Call it on all ranks.

        Args:
            task: the task, on the meta device.
            plan: result of `plan`.
            optimizer: builds the optimizer from trained parameters by path; None for no training.
            rng: the run's randomness.
            weights: initial weights; None initialises everything randomly.
        """
        names = task.trainable
        rank, size = Ranks.current().rank, plan.mesh.get("context", 1)
        self.data_ranks = DataRanks(rank // size, plan.data_parallel, leads=rank % size == 0)
        self._compute_dtype = plan.compute_dtype
        self._loss_scale = LossScale() if plan.compute_dtype == "fp16" else None
        self._task, self._trained = task, {name: task.get_submodule(name) for name in names}
        self._tied = {name: tied_names(module) for name, module in self._trained.items()}
        spreading = None
        if plan.context is not None:
            spreading = Spreading(plan.context, Peers(rank % size, size, adjacent_group(size)))
        if plan.base is not None:
            self._base = StreamedBase(task, plan.base, self.device, _dtype(plan.compute_dtype))
        streamed = self._base.parameters if self._base is not None else ()
        self._make_blocks(task, plan, spreading)
        if spreading is not None:
            spreading.apply(task)
        self._shard(task, plan, streamed)
        home = torch.device("cpu") if self.config.offloads_parameters() else self.device
        self._allocate(home, rng, weights, streamed)
        if self.config.offloads_parameters():
            for name in names:
                self._keep_on_device(task, name, plan.ignored)
        if scalars_of(self._trained):
            self._scalars = ScalarParameters(self._trained, self._sharding_mesh(plan), self.device)
            self._parameters |= self._scalars.replicated
        if optimizer is not None and self.config.offloads_optimizer():
            optimizer = partial(HostOptimizer, optimizer, pin_memory=self.config.pin_memory)
        self._begin(optimizer, weights)
        self._step_on_shards()
        skipping = self._loss_scale is None and skips(self._optimizer)
        self.late = self.config.late_norm and self.device.type != "cpu" and skipping
        if self._base is not None:
            self._base.begin()

    def _model_state(self) -> dict[str, Tensor]:
        held = self._base.host if self._base is not None else {}
        state = super()._model_state()  # a quantised weight stays the placeholder that it is
        return {name: tensor if tensor.is_meta else held.get(name, tensor) for name, tensor in state.items()}

    def _make_blocks(self, task: TaskModule, plan: ShardedPlan, spreading: Spreading | None) -> None:
        """Recomputes modules, compiles over that, and offloads what is left, which only runs then."""
        config = self.config
        set_attention(task, task.trainable, config.attention, plan.recomputed)
        contexts = spreading.kept if spreading else None
        if plan.kept:
            contexts = selective(plan.kept, contexts)
        for path in plan.recomputed:
            recompute(task.get_submodule(path), config.use_reentrant, contexts)
        for path in plan.compiled:
            compile_module(task.get_submodule(path), path, config.compile.mode, config.compile.dynamic)
        for path in plan.wrapped if config.offload.activations == "cpu" else ():
            offload_activations(task.get_submodule(path), config.pin_memory)

    def _keep_on_device(self, task: TaskModule, root: str, ignored: Sequence[str]) -> None:
        """Moves tensors that offloading does not copy for a call to the device: buffers, ignored modules."""
        for path in ignored:
            if path == root or path.startswith(f"{root}."):
                task.get_submodule(path).to(self.device)
        for owner in task.get_submodule(root).modules():
            for key, buffer in owner.named_buffers(recurse=False):
                setattr(owner, key, buffer.to(self.device))

    def _mesh(self, plan: EnginePlan) -> DeviceMesh:
        if self._ranks is None:  # only one: each mesh creates its own process groups
            shape = plan.mesh["replicate"], plan.mesh["shard"] * plan.mesh.get("context", 1)
            self._ranks = device_mesh(shape, ("replicate", "shard"))
        return self._ranks

    def _sharding_mesh(self, plan: EnginePlan) -> DeviceMesh:
        return self._mesh(plan)["shard"] if plan.mesh["replicate"] == 1 else self._mesh(plan)

    def _shard(self, task: TaskModule, plan: ShardedPlan, streamed: Collection[nn.Parameter]) -> None:
        config, param_dtype = self.config, _dtype(plan.compute_dtype)
        policy = MixedPrecisionPolicy(
            param_dtype,
            _dtype(config.reduce_dtype),
            cast_forward_inputs=False,  # cast_as_planned below leaves the timestep as it is
        )
        ignored = {p for path in plan.ignored for p in task.get_submodule(path).parameters()}
        pins = config.pin_memory and self.device.type != "cpu"
        shard = partial(
            fully_shard,
            mesh=self._sharding_mesh(plan),
            ignored_params=ignored.union(scalars_of(self._trained).values(), streamed),
            offload_policy=CPUOffloadPolicy(pins) if config.offloads_parameters() else OffloadPolicy(),
        )

        def group(module: nn.Module, path: str, policy: MixedPrecisionPolicy) -> None:
            of = partial(shard, reshard_after_forward=path in plan.resharded)
            shard_codes(module, partial(of, mp_policy=MixedPrecisionPolicy()))
            if not isinstance(module, FSDPModule):
                of(module, mp_policy=policy)

        for path in sorted(plan.wrapped, key=lambda path: -path.count(".")):
            group(task.get_submodule(path), path, policy)
        for path, root in self._trained.items():
            group(root, path, replace(policy, output_dtype=_dtype(config.output_dtype)))
        cast_as_planned(task, plan)
        self._roots = [root for root in self._trained.values() if isinstance(root, FSDPModule)]
        chain = [m for p in plan.wrapped if isinstance(m := task.get_submodule(p), FSDPModule)]
        average_by_sum(self.device, [*chain, *self._roots])
        self._unused = UnusedModules([*chain, *self._trained.values()])
        set_prefetch(task, plan)

    # -- step ----------------------------------------------------------------------------------

    def micro_step(self, compute: Callable[[], Loss], *, last: bool, scale: float) -> Loss:
        """The engine's forward and backward of one micro-batch; the last one averages gradients over ranks,
        or each one with `accumulate: reduced`.

        Args:
            compute: returns the loss.
            last: whether this is the step's last micro-batch.
            scale: the backward starts from `total * scale`.

        Returns:
            The loss, detached.
        """
        sync = last or self.config.accumulate == "reduced"
        for root in self._roots:
            if not (sync and self._synced):  # torch visits all modules
                root.set_requires_gradient_sync(sync)
            root.set_is_last_backward(last)
        self._synced = sync
        with self._uncast_inputs(), kernel_named(self.config.attention):
            loss = compute()
        if not last and self.config.accumulate == "deferred":
            self._unused.exempt_from_sync()
        if self._loss_scale is not None:
            scale *= self._loss_scale.scale
            self._loss_scale.ran(loss.total.detach())
        loss = self._backward(loss, scale)
        if self._base is not None:
            self._base.sweep()
        if last and self._scalars is not None:
            self._scalars.average()
        return loss

    def grad_norm(self) -> float:
        """The global L2 norm of the engine's averaged gradients, without a loss scale."""
        if self._loss_scale is not None:
            self._loss_scale.unscale(self._gradients())
        return super().grad_norm()

    def overflowed(self) -> str | None:
        """Whether the engine lowers its loss scale after a norm that is not finite; None without a scale."""
        return self._loss_scale.overflowed() if self._loss_scale is not None else None

    def step(self, norm: float, clip_grad_norm: float | None) -> None:
        """The engine's update over the shards, as `EngineBase.step`; a loss scale grows with them."""
        super().step(norm, clip_grad_norm)
        if self._loss_scale is not None:
            self._loss_scale.stepped()
            self._loss_scale.forget()

    def discard(self) -> None:
        """Clears the engine's gradients without an optimizer update."""
        super().discard()
        if self._loss_scale is not None:
            self._loss_scale.forget()

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """The engine's training state for a checkpoint, with `loss_scale` where there is one."""
        scale = {} if self._loss_scale is None else {"loss_scale": self._loss_scale.state}
        return super().state_dict() | scale

    def _uncast_inputs(self) -> AbstractContextManager[None]:
        if self._compute_dtype is None or self.config.cast_forward_inputs:
            return nullcontext()
        return uncast_inputs(self._compute_dtype)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context for evaluating the task: all of its modules in evaluation mode, without gradients.

        A forward without a backward leaves the roots gathered; they are sharded again at the end, or training
        would continue with the tensors gathered here.
        """
        sharded = [m for root in self._trained.values() for m in root.modules() if isinstance(m, FSDPModule)]
        try:
            with super().evaluating(), self._uncast_inputs(), kernel_named(self.config.attention):
                yield
        finally:
            for module in sharded:
                module.reshard()
            if self._base is not None:
                self._base.sweep()


def _dtype(name: str | None) -> torch.dtype | None:
    return torch_dtype(name) if name else None
