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
from mm_core.modules.casting import cast_inputs, check_dtypes, uncast_inputs
from mm_core.modules.tying import tied_names
from mm_core.parallel.activation_checkpointing import recompute
from mm_core.parallel.context.exchange import Peers
from mm_core.parallel.context.layout import decide_context
from mm_core.parallel.context.spreading import Spreading
from mm_core.parallel.frozen_placement import place, plan_frozen
from mm_core.parallel.gloo_averaging import average_by_sum, check_replicas
from mm_core.parallel.layout import ShardedPlan, decide_layout, gathered_bytes, mesh_shape, parameter_bytes
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
        self._roots: list[FSDPModule] = []
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
        purpose: Literal["train", "sample"] = "train",
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
        config = self.config if purpose == "train" else self._for_samples(world)
        context = decide_context(task, task.trainable, config.context_parallel, world, self.device.type)
        replicas, shards = mesh_shape(world, config.sharding_size, size := context.size if context else 1)
        check_replicas(self.device, replicas)
        layout = decide_layout(
            task,
            task.trainable,
            wrap=config.sub_modules_to_wrap,
            recompute=config.recompute_modules,
            ignore=config.ignored_modules,
            forward_prefetch=config.num_to_forward_prefetch,
            backward_prefetch=config.num_to_backward_prefetch,
        )
        check_dtypes(task, layout.roots)
        dtype, stream = _dtype(config.param_dtype), config.base.stream
        base = plan_base(task, layout, config.base.keep, dtype) if stream else None
        streamed = {p for path in base.blocks for _, p in frozen_in(task, path)} if base is not None else ()
        own, trained, left_alone = parameter_bytes(task, layout, shards, streamed)
        casts = config.param_dtype is not None and config.cast_forward_inputs
        return ShardedPlan(
            world=world,
            data_parallel=world // size,
            mesh={"replicate": replicas, "shard": shards // size, **({"context": size} if context else {})},
            recomputed=layout.recomputed,
            ignored=layout.ignored,
            parameter_bytes=own,
            gradient_bytes=trained,
            optimizer_bytes=round(trained * optimizer_state_tensors),
            frozen=plan_frozen(task, config.frozen, layout.ignored, shards),
            base=base,
            offloaded_bytes=own - left_alone if config.offload_to_cpu else 0,
            gathered_bytes=gathered_bytes(task, layout, dtype, config.reshard_after_forward, streamed),
            compute_dtype=config.param_dtype,
            cast_inputs=(*layout.wrapped, *task.trainable) if casts else (),
            details=layout.shown(),
            decided_by=layout.decided_by,
            wrapped=layout.wrapped,
            forward_prefetch=layout.forward_prefetch,
            backward_prefetch=layout.backward_prefetch,
            context=context,
        )

    def _for_samples(self, world: int) -> FSDP2Config:
        size, on_cpu = self.config.sharding_size, self.device.type == "cpu"
        context = self.config.context_parallel
        return replace(
            self.config,
            sharding_size="auto" if size == "auto" or world % size else size,
            context_parallel=replace(context, size=gcd(context.size, world)),
            param_dtype="fp32" if on_cpu else self.config.param_dtype,
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
        """Prepares a task in the engine: recompute -> shard -> allocate -> initialise or fill -> optimizer.

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
        self._trained = {name: task.get_submodule(name) for name in names}
        self._tied = {name: tied_names(module) for name, module in self._trained.items()}
        spreading = None if plan.context is None else Spreading(plan.context, self._peers(size))
        if plan.base is not None:
            self._base = StreamedBase(task, plan.base, self.device, _dtype(plan.compute_dtype))
        streamed = self._base.parameters if self._base is not None else ()
        for path in plan.recomputed:
            recompute(
                task.get_submodule(path), self.config.use_reentrant, spreading.kept if spreading else None
            )
        if spreading is not None:
            spreading.apply(task)
        self._shard(task, plan, streamed)
        home = torch.device("cpu") if self.config.offload_to_cpu else self.device
        self._allocate(home, rng, weights, streamed)
        if self.config.offload_to_cpu:
            for name in names:
                self._keep_on_device(task, name, plan.ignored)
        if scalars_of(self._trained):
            self._scalars = ScalarParameters(self._trained, self._sharding_mesh(plan), self.device)
            self._parameters |= self._scalars.replicated
        self._begin(optimizer, weights)
        if self._base is not None:
            self._base.begin()

    def _model_state(self) -> dict[str, Tensor]:
        held = self._base.host if self._base is not None else {}
        state = super()._model_state()  # a quantised weight stays the placeholder that it is
        return {name: tensor if tensor.is_meta else held.get(name, tensor) for name, tensor in state.items()}

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

    def _peers(self, size: int) -> Peers:
        return Peers(Ranks.current().rank % size, size, adjacent_group(size))

    def _sharding_mesh(self, plan: EnginePlan) -> DeviceMesh:
        return self._mesh(plan)["shard"] if plan.mesh["replicate"] == 1 else self._mesh(plan)

    def _shard(self, task: TaskModule, plan: ShardedPlan, streamed: Collection[nn.Parameter]) -> None:
        config, param_dtype = self.config, _dtype(plan.compute_dtype)
        policy = MixedPrecisionPolicy(
            param_dtype,
            _dtype(config.reduce_dtype),
            cast_forward_inputs=False,  # cast_inputs below leaves the timestep as it is
        )
        ignored = {p for path in plan.ignored for p in task.get_submodule(path).parameters()}
        pins = config.pin_memory and self.device.type != "cpu"
        shard = partial(
            fully_shard,
            mesh=self._sharding_mesh(plan),
            ignored_params=ignored.union(scalars_of(self._trained).values(), streamed),
            reshard_after_forward=config.reshard_after_forward,
            offload_policy=CPUOffloadPolicy(pins) if config.offload_to_cpu else OffloadPolicy(),
        )
        inner = sorted(plan.wrapped, key=lambda path: -path.count("."))
        for path in inner:
            shard(task.get_submodule(path), mp_policy=policy)
        for root in self._trained.values():
            shard(root, mp_policy=replace(policy, output_dtype=_dtype(config.output_dtype)))
        for path in plan.cast_inputs:
            assert param_dtype is not None
            cast_inputs(task.get_submodule(path), param_dtype)
        self._roots = [root for root in self._trained.values() if isinstance(root, FSDPModule)]
        chain = [m for p in plan.wrapped if isinstance(m := task.get_submodule(p), FSDPModule)]
        average_by_sum(self.device, [*chain, *self._roots])
        self._unused = UnusedModules([*chain, *self._trained.values()])
        set_prefetch(task, plan)

    # -- step ----------------------------------------------------------------------------------

    def micro_step(self, compute: Callable[[], Loss], *, last: bool, scale: float) -> Loss:
        """The engine's forward and backward of one micro-batch; the last one averages gradients over ranks.

        Args:
            compute: returns the loss.
            last: whether this is the step's last micro-batch.
            scale: the backward starts from `total * scale`.

        Returns:
            The loss, detached.
        """
        for root in self._roots:
            root.set_requires_gradient_sync(last)
            root.set_is_last_backward(last)
        with self._uncast_inputs():
            loss = compute()
        if not last:
            self._unused.exempt_from_sync()
        loss = self._backward(loss, scale)
        if self._base is not None:
            self._base.sweep()
        if last and self._scalars is not None:
            self._scalars.average()
        return loss

    def _uncast_inputs(self) -> AbstractContextManager[None]:
        if self._compute_dtype is None or self.config.cast_forward_inputs:
            return nullcontext()
        return uncast_inputs(self._compute_dtype)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context for evaluating the trained modules: evaluation mode, without gradients.

        A forward without a backward leaves the roots gathered; they are sharded again at the end, or training
        would continue with the tensors gathered here.
        """
        sharded = [m for root in self._trained.values() for m in root.modules() if isinstance(m, FSDPModule)]
        try:
            with super().evaluating(), self._uncast_inputs():
                yield
        finally:
            for module in sharded:
                module.reshard()
            if self._base is not None:
                self._base.sweep()


def _dtype(name: str | None) -> torch.dtype | None:
    return torch_dtype(name) if name else None
