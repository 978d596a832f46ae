"""The engine on DeepSpeed's ZeRO: stages 0 to 3, the optimizer and the parameters in host memory if asked.

The loop's step maps onto DeepSpeed's: micro-batches are its backward, the norm is read before its update, and
a refused step is cleared without one. Checkpoints are ours: each rank stores its part of the float32 masters
and of the optimizer's state under the names of the task.

Reference: https://arxiv.org/abs/1910.02054.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mm_core.contracts import (
    DataRanks,
    EnginePlan,
    InitialWeights,
    Loss,
    Randomness,
    Shard,
    TaskModule,
    TrainingFacts,
    WeightPlan,
    torch_dtype,
)
from mm_core.engines import EngineBase, FSDP2Engine
from mm_core.errors import ConfigError, PlanError
from mm_core.modules import FlatShard, cast_as_planned, tied_names
from mm_core.parallel import place, recompute
from mm_deepspeed import building, library, zero
from mm_deepspeed.building import Root, handed_over, plan_of, split_rows, whole
from mm_deepspeed.config import DeepSpeedConfig
from mm_deepspeed.json_file import place_of
from mm_deepspeed.settings import Settings, completed

_SHAPED = {
    "core/muon": "orthogonalises whole matrices",
    "core/adamw_8bit": "quantises blocks of each parameter",
    "core/adamw_bf16": "rounds the state of each shard with numbers of its own",
}
"""Optimizers that need the shapes of parameters, or their shards -> why."""


class DeepSpeedEngine(EngineBase):
    """Trains with DeepSpeed's ZeRO; its fields are those of `DeepSpeedConfig` and described there.

    Sampling and evaluating a stored run needs no DeepSpeed: `fsdp2` does that.
    """

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.config = DeepSpeedConfig(**fields)
        self.settings = Settings.of(self.config.settings)
        self._completed: dict[str, Any] = {}
        self._zero: zero.Zero | None = None
        self._engine: Any = None
        self._held: dict[str, nn.Parameter] = {}
        self._frozen: dict[str, nn.Parameter] = {}  # values before they were rounded for the computation
        self._stale = self._loaded = False

    # -- plan ----------------------------------------------------------------------------------

    def plan(
        self,
        task: TaskModule,
        world: int,
        optimizer_state_tensors: float,
        *,
        purpose: Literal["train", "sample", "import"] = "train",
    ) -> EnginePlan:
        """Plans the stage of ZeRO for `world` ranks, with the bytes of each.

        Args:
            task: on the meta device.
            world: number of ranks.
            optimizer_state_tensors: tensors of optimizer state per parameter, in parameter sizes.
            purpose: `sample` plans as `fsdp2` does.
        """
        if purpose == "sample":
            return self._sampler().plan(task, world, optimizer_state_tensors, purpose=purpose)
        return plan_of(self.settings, task, world, optimizer_state_tensors)

    def check_training(self, facts: TrainingFacts) -> tuple[str, ...]:
        """Fills what the JSON leaves to the run, and checks what it repeats.

        Raises:
            MMError: a setting contradicts the run, or the optimizer needs the shapes of parameters.
        """
        if self.settings.stage and (why := _SHAPED.get(facts.optimizer.type)):
            raise PlanError(
                f"{facts.optimizer.type} {why}, but ZeRO gives an optimizer flat parts of all parameters",
                where="optimizer.type",
                accepted="adamw, adam, or another optimizer that treats each number alone",
                hint="set optimizer.type to adamw, or engine.type to fsdp2",
            )
        self._completed = completed(self.config.settings, facts)
        return self.settings.notes

    def _sampler(self) -> FSDP2Engine:
        half = self.settings.dtype if self.settings.dtype != "fp32" else None
        return FSDP2Engine(param_dtype="bf16" if half == "fp16" else half)

    def stand_in(self) -> FSDP2Engine:
        """`fsdp2` in the stage's preset: DeepSpeed cannot step on tensors without memory."""
        return building.stand_in_of(self.settings)

    def buffers(self, plan: EnginePlan) -> dict[str, dict[str, int]]:
        """DeepSpeed's buffers in a step."""
        return building.buffers_of(self.config.settings, self.settings, plan)

    # -- prepare -------------------------------------------------------------------------------

    def place_frozen(self, task: TaskModule, plan: EnginePlan, weights: InitialWeights) -> None:
        """Gives frozen components their memory and weights, one after another."""
        for part in plan.frozen:
            place(task.get_submodule(part.name), part, self.device, weights)

    def prepare(
        self,
        task: TaskModule,
        plan: EnginePlan,
        optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer] | None,
        rng: Randomness,
        weights: WeightPlan | None = None,
    ) -> None:
        """Prepares a task: its parameters are filled by rows over the ranks, then handed to DeepSpeed.

        At most one parameter is whole on a rank at a time at stage 3.

        Args:
            task: the task, on the meta device.
            plan: result of `plan`.
            optimizer: builds the optimizer from trained parameters by path; None for no training.
            rng: the run's randomness.
            weights: initial weights; None initialises everything randomly.
        """
        if optimizer is None:
            return self._prepare_samples(task, rng, weights)
        deepspeed = library.load(self.device, self.settings.dtype, self.config.settings)
        if not self._completed:  # the engine is used on its own
            self._completed = completed(self.config.settings, building.facts_of(plan.data_parallel))
        self.data_ranks = DataRanks(dist.get_rank(), plan.data_parallel)
        self._task, self._trained = task, {name: task.get_submodule(name) for name in task.trainable}
        self._tied = {name: tied_names(module) for name, module in self._trained.items()}
        for path in plan.recomputed:
            recompute(task.get_submodule(path), use_reentrant=False)
        split_rows(self._trained, self._tied)
        self._allocate(self.device, rng, weights)
        self._begin(optimizer, weights)
        assert self._optimizer is not None
        rows = self._parameters
        with library.starting():
            self._hand_over(deepspeed, task, plan, rows)
        if not self.settings.stage:
            self._parameters = self._held
            self._step_on_shards(views=False)
            return None
        self._zero = zero.zero_of(self._engine, self.settings.stage)
        if self.settings.dtype != "fp32":  # DeepSpeed made the masters from the rounded weights
            for name, parameter in self._held.items():
                if parameter.requires_grad:
                    _fill(self._zero.fragment(parameter), rows[name])
            self._stale = True
        self._parameters = {}
        kept = {n: p for n, p in rows.items() if not p.requires_grad and p.dtype != self._held[n].dtype}
        self._frozen = {name: p for name, p in kept.items() if p.is_floating_point()}
        return None

    def _hand_over(
        self, deepspeed: Any, task: TaskModule, plan: EnginePlan, rows: Mapping[str, nn.Parameter]
    ) -> None:
        """Makes DeepSpeed's engine of the components, whose parameters are filled in `rows`."""
        assert self._optimizer is not None
        deepspeed.init_distributed(dist_init_required=False, auto_mpi_discovery=False)  # joins torch's group
        split = partial(zero.split, config=self._completed) if self.settings.stage == 3 else None
        self._held = handed_over(self._trained, self._tied, rows, torch_dtype(self.settings.dtype), split)
        if split is not None:
            for module in self._trained.values():
                zero.gather_for_adapters(module)
        trained = {id(rows[name]): self._held[name] for name in rows}
        for group in self._optimizer.param_groups:
            group["params"] = [trained[id(p)] for p in group["params"]]
        root = Root(self._trained.values())
        buffers = [(m, n, b) for m in root.modules() for n, b in m.named_buffers(recurse=False)]
        try:
            self._engine, *_ = deepspeed.initialize(
                model=root, optimizer=self._optimizer, config=self._completed, dist_init_required=False
            )
        except (ValueError, AssertionError) as error:  # what its schema and its checks refuse
            what = f"DeepSpeed refuses the settings: {' '.join(str(error).split()) or 'an assertion fails'}"
            raise ConfigError(what, where=place_of(self.config.settings) or "engine.settings") from error
        for module, name, buffer in buffers:  # DeepSpeed has cast them too
            module._buffers[name] = buffer
        cast_as_planned(task, plan)

    def _prepare_samples(self, task: TaskModule, rng: Randomness, weights: WeightPlan | None) -> None:
        sampler = self._sampler()
        plan = sampler.plan(task, dist.get_world_size(), 0, purpose="sample")
        sampler.prepare(task, plan, None, rng, weights)
        self.data_ranks, self.evaluating = sampler.data_ranks, sampler.evaluating  # type: ignore[method-assign]
        self._trained, self._tied, self._parameters = sampler._trained, sampler._tied, sampler._parameters

    # -- step ----------------------------------------------------------------------------------

    def micro_step(self, compute: Callable[[], Loss], *, last: bool, scale: float) -> Loss:
        """Runs forward and backward of one micro-batch in DeepSpeed; the last one completes the gradients.

        Args:
            compute: returns the loss.
            last: whether this is the step's last micro-batch.
            scale: factor of the loss before backward.

        Returns:
            The loss, detached.
        """
        self._publish()
        found: list[Loss] = []

        def forward() -> Tensor:
            found.append(compute())
            return found[0].total

        self._engine.set_gradient_accumulation_boundary(last)
        total = self._engine(forward)  # stage 3 counts micro-batches by the forwards of its root
        # A non-finite total may still have finite gradients (x + nan), which would update unnoticed.
        seed = torch.where(torch.isfinite(total.detach()), scale, float("nan")).to(total.dtype)
        self._engine.backward(total * seed, scale_wrt_gas=False)
        if self._zero is not None:
            self._zero.received(last)
        return replace(found[0], total=found[0].total.detach())

    def grad_norm(self) -> float:
        """The global L2 norm of the averaged gradients, equal on all ranks. Waits for the device."""
        return super().grad_norm() if self._zero is None else self._zero.norm()

    def overflowed(self) -> str | None:
        """Lowers the loss scale after gradients beyond the range of float16; None if that cannot help."""
        scaler = self._zero.scaler if self._zero is not None else None
        if scaler is None or scaler.cur_scale <= scaler.min_scale:
            return None
        assert self._zero is not None
        before = self._zero.scale
        self._engine.step()
        return (
            f"the gradients are beyond float16 at the loss scale {before:g}, which is now"
            f" {self._zero.scale:g}; no parameter was changed"
        )

    def step(self, norm: float, clip_grad_norm: float | None) -> None:
        """Clips the gradients, updates the masters, and copies them into the parameters that compute.

        Args:
            norm: result of `grad_norm`.
            clip_grad_norm: largest norm; None for no clipping.
        """
        if self._zero is None:
            super().step(norm, clip_grad_norm)
        else:
            self._zero.step(clip_grad_norm)

    def discard(self) -> None:
        """Clears the gradients without an update."""
        if self._zero is None:
            super().discard()
        else:
            self._zero.discard()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context for evaluating the task: all of its modules in evaluation mode, without gradients."""
        self._publish(always=True)
        try:
            with super().evaluating():
                yield
        finally:
            self._stale = True  # an average that replaced the masters is taken out after this

    def _publish(self, always: bool = False) -> None:
        """Makes the next forward compute with the masters, after something else has written them."""
        if self._zero is None or not (self._stale or always):
            return
        self._stale = False
        self._zero.load_scale()
        if self._loaded:
            self._loaded = False
            for name, rows in self._frozen.items():
                _fill(self._zero.frozen(self._held[name]), rows)
        self._zero.publish()

    # -- state ---------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trained parameters by path in the task; from stage 1 on, this rank's part of the masters."""
        if self._zero is None:
            yield from super().named_parameters()
            return
        for shard in self.shards():
            made: Any = shard.stored(shard.master)
            yield shard.name, made.requires_grad_()

    def shards(self) -> Iterator[Shard]:
        """This rank's part of the trained parameters' float32 masters."""
        if self._zero is None:
            yield from super().shards()
            return
        for name, parameter in self._held.items():
            if parameter.requires_grad:
                part, shape = self._zero.fragment(parameter), _shape(parameter)
                yield Shard(name, part.master, tuple(shape), FlatShard(part.master, shape, part.start).like)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The training state for a checkpoint, as of any engine, and the numbers of a loss scaler."""
        if self._zero is None:
            return super().state_dict()
        optimizer = {}
        for name, parameter in self._held.items():
            if parameter.requires_grad:
                part = self._zero.fragment(parameter)
                for key, value in part.state.items():
                    flat = isinstance(value, Tensor) and value.dim() == 1
                    stored = FlatShard(value, _shape(parameter), part.start) if flat else value
                    optimizer[f"{name}.{key}"] = stored
        scale = self._zero.scale_state(loaded=self._stale)
        return {
            "model": self._model_state(),
            "optimizer": optimizer,
            **({"loss_scale": scale} if scale else {}),
        }

    def _model_state(self) -> dict[str, Tensor]:
        if self._zero is None:
            return super()._model_state()
        state: dict[str, Tensor] = {}
        for path, module in self._trained.items():
            for name in module.state_dict():
                if name not in self._tied[path]:
                    key = f"{path}.{name}"
                    state[key] = self._tensor(key) if key in self._held else _buffer(module, name)
        return state

    def _tensor(self, name: str) -> Tensor:
        """What a checkpoint stores of a parameter."""
        if name in self._frozen:
            return self._frozen[name]
        parameter = self._held[name]
        assert self._zero is not None
        trained = parameter.requires_grad
        if not trained and self.settings.stage < 3:  # whole on each rank
            return parameter
        part = self._zero.fragment(parameter) if trained else self._zero.frozen(parameter)
        return FlatShard(part.master, _shape(parameter), part.start)

    def state_template(self, stepped: Collection[str]) -> dict[str, dict[str, Tensor]]:
        """The training state as tensors to load a checkpoint into, in place.

        Args:
            stepped: parameters that have optimizer state in the checkpoint; the state of others is zero.
        """
        if self._zero is None:
            return super().state_template(stepped)
        if stepped and not any(self._zero.fragment(p).state for p in self._held.values() if p.requires_grad):
            assert self._optimizer is not None
            rates = [group["lr"] for group in self._optimizer.param_groups]
            for group in self._optimizer.param_groups:
                group["lr"] = 0.0  # the step only makes the tensors
            self._zero.make_state()
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        self._stale = self._loaded = True
        state = self.state_dict()
        state["optimizer"] = {
            key: value for key, value in state["optimizer"].items() if key.rpartition(".")[0] in stepped
        }
        return state


def _fill(part: zero.Fragment, rows: Tensor) -> None:
    """Copies a rank's part of the parameter in `rows` into it; called by all ranks."""
    part.master.copy_(whole(rows).flatten()[part.start : part.start + part.master.numel()])


def _shape(parameter: nn.Parameter) -> torch.Size:
    """The shape of the whole parameter, also where stage 3 has split it."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _buffer(module: nn.Module, name: str) -> Tensor:
    owner, _, key = name.rpartition(".")
    found = module.get_submodule(owner)._buffers[key]
    assert found is not None
    return found
