"""The engine on PyTorch's `fully_shard` (FSDP2).

It covers one process, sharded, replicated and hybrid training: the mesh is always (replicas, shards), and
(W, 1) is replicated training. Reference: https://arxiv.org/abs/2304.11277 and the documentation of
torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
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
from torch.distributed.tensor import DTensor

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
from mm_core.device import current_device
from mm_core.errors import ContractError
from mm_core.modules.casting import cast_inputs, check_dtypes, uncast_inputs
from mm_core.modules.initialise import initialise
from mm_core.modules.tying import state_of, tie, tied_names
from mm_core.parallel.activation_checkpointing import recompute
from mm_core.parallel.frozen_placement import place, plan_frozen
from mm_core.parallel.gloo_averaging import average_by_sum, check_replicas
from mm_core.parallel.layout import ShardedPlan, decide_layout, gathered_bytes, mesh_shape, parameter_bytes
from mm_core.parallel.prefetch import set_prefetch
from mm_core.parallel.scalar_parameters import ScalarParameters, scalars_of
from mm_core.parallel.unused_modules import UnusedModules
from mm_core.plugin.checks.places import place_of_object
from mm_core.runtime.groups import device_mesh
from mm_core.runtime.ranks import Ranks


class FSDP2Engine:
    """The FSDP2 engine: shards a task's trained modules, steps them in mixed precision, owns the optimizer.

    Its fields are those of `FSDP2Config` and described there.
    """

    def __init__(self, **fields: Any) -> None:
        self.config = FSDP2Config(**fields)
        self.device = current_device()
        self.data_ranks = DataRanks()
        self._compute_dtype: str | None = None
        self._trained: dict[str, nn.Module] = {}
        self._tied: dict[str, dict[str, str]] = {}
        self._roots: list[FSDPModule] = []
        self._unused = UnusedModules(())
        self._scalars: ScalarParameters | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._base_lrs: list[float] = []
        self._ranks: DeviceMesh | None = None

    # -- plan ----------------------------------------------------------------------------------

    def plan(
        self,
        task: TaskModule,
        world: int,
        optimizer_state_tensors: float,
        purpose: Literal["train", "sample"] = "train",
    ) -> ShardedPlan:
        """Plans the engine's sharding for `world` ranks, with the bytes of rank 0, whose shards are largest.

        Args:
            task: on the meta device.
            world: number of ranks.
            optimizer_state_tensors: tensors of optimizer state per parameter, in parameter sizes.
            purpose: with `sample`, a sharding size that does not divide `world` becomes `auto`, and a CPU
                computes in float32.

        Raises:
            PlanError: a setting of the engine that does not fit the task or the number of ranks.
        """
        config = self.config if purpose == "train" else self._for_samples(world)
        replicas, shards = mesh_shape(world, config.sharding_size)
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
        own, trained, left_alone = parameter_bytes(task, layout, shards)
        roots = (*layout.wrapped, *task.trainable)
        return ShardedPlan(
            world=world,
            data_parallel=world,
            mesh={"replicate": replicas, "shard": shards},
            recomputed=layout.recomputed,
            ignored=layout.ignored,
            parameter_bytes=own,
            gradient_bytes=trained,
            optimizer_bytes=round(trained * optimizer_state_tensors),
            frozen=plan_frozen(task, config.frozen, layout.ignored, shards),
            offloaded_bytes=own - left_alone if config.offload_to_cpu else 0,
            gathered_bytes=gathered_bytes(
                task, layout, _dtype(config.param_dtype), config.reshard_after_forward
            ),
            compute_dtype=config.param_dtype,
            cast_inputs=roots if config.param_dtype is not None and config.cast_forward_inputs else (),
            details=layout.shown(),
            decided_by=layout.decided_by,
            wrapped=layout.wrapped,
            forward_prefetch=layout.forward_prefetch,
            backward_prefetch=layout.backward_prefetch,
        )

    def _for_samples(self, world: int) -> FSDP2Config:
        size, on_cpu = self.config.sharding_size, self.device.type == "cpu"
        return replace(
            self.config,
            sharding_size="auto" if size == "auto" or world % size else size,
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
        self.data_ranks = DataRanks(Ranks.current().rank, plan.data_parallel)
        self._compute_dtype = plan.compute_dtype
        self._trained = {name: task.get_submodule(name) for name in names}
        self._tied = {name: tied_names(module) for name, module in self._trained.items()}
        for path in plan.recomputed:
            recompute(task.get_submodule(path), self.config.use_reentrant)
        self._shard(task, plan)
        home = torch.device("cpu") if self.config.offload_to_cpu else self.device
        spared = weights.names if weights is not None else ()
        for name, module in self._trained.items():
            module.to_empty(device=home)
            tie(module, self._tied[name])
            initialise(module, name, rng, spared)
            if self.config.offload_to_cpu:
                self._keep_on_device(task, name, plan.ignored)
            self._parameters |= dict(module.named_parameters(prefix=name))
        if scalars_of(self._trained):
            self._scalars = ScalarParameters(self._trained, self._sharding_mesh(plan), self.device)
            self._parameters |= self._scalars.replicated
        if weights is not None:
            weights.fill(self._model_state())
        if optimizer is None:
            return
        self._optimizer = optimizer({n: p for n, p in self._parameters.items() if p.requires_grad})
        groups = self._optimizer.param_groups
        self._base_lrs = [float(group["lr"]) * float(group.get("lr_scale", 1.0)) for group in groups]

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
            self._ranks = device_mesh((plan.mesh["replicate"], plan.mesh["shard"]), ("replicate", "shard"))
        return self._ranks

    def _sharding_mesh(self, plan: EnginePlan) -> DeviceMesh:
        return self._mesh(plan)["shard"] if plan.mesh["replicate"] == 1 else self._mesh(plan)

    def _shard(self, task: TaskModule, plan: ShardedPlan) -> None:
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
            ignored_params=ignored.union(scalars_of(self._trained).values()),
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
        # A non-finite total may still have finite gradients (x + nan), which would update unnoticed.
        seed = torch.where(torch.isfinite(loss.total.detach()), scale, float("nan"))
        torch.autograd.backward(loss.total, seed.to(loss.total.dtype))
        if last and self._scalars is not None:
            self._scalars.average()
        return replace(loss, total=loss.total.detach())

    def _uncast_inputs(self) -> AbstractContextManager[None]:
        if self._compute_dtype is None or self.config.cast_forward_inputs:
            return nullcontext()
        return uncast_inputs(self._compute_dtype)

    def grad_norm(self) -> float:
        """The global L2 norm of the engine's averaged gradients, equal on all ranks. Waits for the device."""
        total = torch.nn.utils.get_total_norm(self._gradients())
        return float(total.full_tensor() if isinstance(total, DTensor) else total)

    def step(self, norm: float, clip_grad_norm: float | None) -> None:
        """The engine's update: clips gradients, steps the optimizer over the shards, clears the gradients.

        Args:
            norm: result of `grad_norm`.
            clip_grad_norm: largest norm; None for no clipping.
        """
        assert self._optimizer is not None
        if clip_grad_norm is not None and norm > clip_grad_norm:
            torch._foreach_mul_(self._gradients(), clip_grad_norm / (norm + 1e-6))
        self._optimizer.step()
        self._optimizer.zero_grad()

    def discard(self) -> None:
        """Clears the engine's gradients without an optimizer update."""
        assert self._optimizer is not None
        self._optimizer.zero_grad()

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters.values() if p.grad is not None]

    @property
    def base_lr(self) -> float:
        """The base learning rate of the first parameter group without `lr_scale`, or of the first group."""
        assert self._optimizer is not None
        groups = list(zip(self._optimizer.param_groups, self._base_lrs, strict=True))
        plain = [rate for group, rate in groups if group.get("lr_scale", 1.0) == 1.0]
        return plain[0] if plain else groups[0][1]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context for evaluating the trained modules: evaluation mode, without gradients.

        A forward without a backward leaves the roots gathered; they are sharded again at the end, or training
        would continue with the tensors gathered here.
        """
        modes = {m: m.training for module in self._trained.values() for m in module.modules()}
        for module in self._trained.values():
            module.eval()
        try:
            with torch.no_grad(), self._uncast_inputs():
                yield
        finally:
            for module, training in modes.items():
                module.training = training
                if isinstance(module, FSDPModule):
                    module.reshard()

    # -- learning rate -------------------------------------------------------------------------

    def scale_lr(self, factor: float) -> float:
        """Sets each parameter group's learning rate to its base rate times `factor`.

        Returns:
            `base_lr` times `factor`.
        """
        assert self._optimizer is not None
        for group, base in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base * factor
        return self.base_lr * factor

    # -- state ---------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the engine's trained modules (sharded), by path in the task."""
        yield from self._parameters.items()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The training state for a checkpoint: {"model": {path: tensor}, "optimizer": {path.state: tensor}}.

        These are live tensors, not copies.

        Raises:
            ContractError: the optimizer has state that is not a tensor.
        """
        assert self._optimizer is not None
        state = self._optimizer.state
        lost = {key for values in state.values() for key, v in values.items() if not isinstance(v, Tensor)}
        if lost:
            raise ContractError(
                f"{type(self._optimizer).__name__} has state that is not a tensor, so a checkpoint cannot"
                f" contain it: {', '.join(sorted(lost))}",
                where=f"optimizer, {place_of_object(self._optimizer)}",
                accepted="tensors as state, such as a 0-dimensional one for a count",
            )
        optimizer = {
            f"{path}.{key}": value
            for path, parameter in self._parameters.items()
            for key, value in state.get(parameter, {}).items()
        }
        return {"model": self._model_state(), "optimizer": optimizer}

    def _model_state(self) -> dict[str, Tensor]:
        """Parameters (a shared one once) and buffers, by path in the task."""
        state: dict[str, Tensor] = {}
        for name, module in self._trained.items():
            state |= state_of(module, name, self._tied[name])
        return state

    def state_template(self, stepped: Collection[str]) -> dict[str, dict[str, Tensor]]:
        """The engine's training state as tensors to load a checkpoint into, in place.

        Args:
            stepped: parameters that have optimizer state in the checkpoint; a parameter that never had a
                gradient has none.
        """
        assert self._optimizer is not None
        if stepped and not self._optimizer.state:
            rates = [group["lr"] for group in self._optimizer.param_groups]
            for group in self._optimizer.param_groups:
                group["lr"] = 0.0  # the step below only makes the state tensors
            for name, parameter in self._parameters.items():
                if parameter.requires_grad and name in stepped:
                    parameter.grad = torch.zeros_like(parameter)
            self._optimizer.step()
            self._optimizer.zero_grad()
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copies a training state from `state_dict`, such as a checkpoint's, into the engine's tensors."""
        stepped = {name.rpartition(".")[0] for name in state["optimizer"]}
        for part, tensors in self.state_template(stepped).items():
            for key, tensor in tensors.items():
                with torch.no_grad():
                    tensor.copy_(state[part][key])


def _dtype(name: str | None) -> torch.dtype | None:
    return torch_dtype(name) if name else None
