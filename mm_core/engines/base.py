"""What engines have in common, however they spread a task: memory, optimizer, rates, evaluation, state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from mm_core.contracts import DataRanks, Loss, Randomness, Shard, WeightPlan
from mm_core.device import current_device
from mm_core.engines.local_shards import GlobalNorm, LocalSteps, local_gradients
from mm_core.errors import ContractError
from mm_core.modules.initialise import initialise
from mm_core.modules.quantised import fill_state, scale_names
from mm_core.modules.shards import like, local
from mm_core.modules.tying import state_of, tie
from mm_core.parallel.streamed_base import give_memory
from mm_core.plugin.checks.places import place_of_object


class EngineBase:
    """The part of an engine that does not depend on how it spreads a task over ranks.

    A subclass writes `plan`, `place_frozen`, `prepare` and `micro_step`. Its `prepare` sets `_task`,
    `_trained` and `_tied`, changes the modules, and calls `_allocate` and `_begin`; its `micro_step` calls
    `_backward`, and averages the gradients over ranks. Parameters and their gradients may be plain tensors or
    DTensors.

    Attributes:
        device: the device that computes.
        data_ranks: which share of the data this process reads; `prepare` sets it.
        late: see `SupportsUpdate`.
        base_lr: base learning rate of the first parameter group without `lr_scale`, or of the first group.
        _task: the task, which `evaluating` puts into evaluation mode; None: only `_trained` is.
        _trained: the trained components, by path in the task.
        _tied: their tied weights (`tied_names`) before memory is allocated, by path in the task.
        _parameters: their parameters as the optimizer gets them, by path in the task.
        _optimizer: the optimizer; None if nothing is trained. Where it can, it has plain views of the shards.
    """

    def __init__(self) -> None:
        self.device = current_device()
        self.data_ranks = DataRanks()
        self._task: nn.Module | None = None
        self._trained: dict[str, nn.Module] = {}
        self._tied: dict[str, dict[str, str]] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._steps: LocalSteps | None = None
        self._norm: GlobalNorm | None = None
        self._refused: Tensor | None = None
        self.late = False
        self._shards: list[Shard] = []
        self._memory: list[int] | None = None
        self._base_lrs: list[float] = []
        self.base_lr = 0.0

    # -- prepare -------------------------------------------------------------------------------

    def _allocate(
        self,
        home: torch.device,
        rng: Randomness,
        weights: WeightPlan | None,
        on_host: Collection[nn.Parameter] = (),
    ) -> None:
        """Gives the trained components memory, and random values where `weights` brings none.

        Args:
            home: the device of the weights.
            rng: the run's randomness.
            weights: initial weights; `_begin` fills them.
            on_host: parameters that get host memory instead.
        """
        spared = weights.names if weights is not None else ()
        for name, module in self._trained.items():
            give_memory(module, home, on_host)
            tie(module, self._tied[name])
            initialise(module, name, rng, {*spared, *scale_names(module, name)})

    def _begin(
        self,
        optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer] | None,
        weights: WeightPlan | None,
    ) -> None:
        """Collects the parameters, fills them with initial weights, and makes the optimizer.

        Args:
            optimizer: makes it from the trained parameters by path; None: nothing is trained.
            weights: initial weights.
        """
        named = [own for path, m in self._trained.items() for own in m.named_parameters(prefix=path)]
        self._parameters = dict(named) | self._parameters  # what the engine has set already takes precedence
        if weights is not None:
            fill_state(weights, self._model_state(), self._trained)
        trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        if optimizer is None:
            return
        self._optimizer = optimizer(trained)
        groups = self._optimizer.param_groups
        scales = [float(group.get("lr_scale", 1.0)) for group in groups]
        self._base_lrs = [float(group["lr"]) * scale for group, scale in zip(groups, scales, strict=True)]
        self.base_lr = self._base_lrs[scales.index(1.0) if 1.0 in scales else 0]

    def _step_on_shards(self, *, views: bool = True) -> None:
        """Prepares the gradients' norm; lets the optimizer step over views of the shards (`LocalSteps`)."""
        self._norm = self._new_norm()
        if self._optimizer is not None and views:
            self._steps = LocalSteps(self._optimizer)

    def _new_norm(self) -> GlobalNorm:
        return GlobalNorm([p for p in self._parameters.values() if p.requires_grad])

    # -- step ----------------------------------------------------------------------------------

    def _backward(self, loss: Loss, scale: float) -> Loss:
        """Runs the backward of `total * scale`; returns the loss, detached."""
        # A non-finite total may still have finite gradients (x + nan), which would update unnoticed.
        seed = torch.where(torch.isfinite(loss.total.detach()), scale, float("nan"))
        torch.autograd.backward(loss.total, seed.to(loss.total.dtype))
        return replace(loss, total=loss.total.detach())

    def grad_norm(self) -> float:
        """The global L2 norm of the engine's averaged gradients, equal on all ranks. Waits for the device."""
        return float((self._norm or self._new_norm())())

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

    def update(self, clip_grad_norm: float | None) -> Tensor:
        """See `SupportsUpdate`; for fused optimizers of torch."""
        assert self._optimizer is not None
        norm = (self._norm or self._new_norm())()
        if clip_grad_norm is not None:
            factor = (clip_grad_norm / (norm.double() + 1e-6)).float()
            torch._foreach_mul_(self._gradients(), torch.where(norm > clip_grad_norm, factor, 1.0))
        refused = (~torch.isfinite(norm)).float()
        self._refused = refused if self._refused is None else torch.maximum(self._refused, refused)
        self._optimizer.found_inf = self._refused  # type: ignore[attr-defined]
        self._optimizer.step()
        del self._optimizer.found_inf  # type: ignore[attr-defined]
        self._optimizer.zero_grad()
        return norm

    def settled(self) -> None:
        """See `SupportsUpdate`."""
        self._refused = None

    def discard(self) -> None:
        """Clears the engine's gradients without an optimizer update."""
        assert self._optimizer is not None
        self._optimizer.zero_grad()

    def _gradients(self) -> list[Tensor]:
        return local_gradients(self._parameters.values())

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context for evaluating the task: all of its modules in evaluation mode, without gradients."""
        roots = [*self._trained.values()] if self._task is None else [self._task]
        modes = {m: m.training for root in roots for m in root.modules()}
        for root in roots:
            root.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, training in modes.items():
                module.training = training

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

    def shards(self) -> Iterator[Shard]:
        """This rank's shards of the trained parameters, plain tensors and DTensors alike."""
        trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        memory = [getattr(p, "_local_tensor", p).data_ptr() for p in trained.values()]
        if memory != self._memory:
            self._memory = memory
            self._shards = [Shard(n, local(p), tuple(p.shape), partial(like, p)) for n, p in trained.items()]
        return iter(self._shards)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The training state for a checkpoint: {"model": {path: tensor}, "optimizer": {path.state: tensor}}.

        These are live tensors, not copies.

        Raises:
            ContractError: the optimizer has state that is not a tensor.
        """
        assert self._optimizer is not None
        state, steps = self._optimizer.state, self._steps
        lost = {key for values in state.values() for key, v in values.items() if not isinstance(v, Tensor)}
        if lost:
            raise _not_stored(self._optimizer, lost)
        optimizer = {
            f"{path}.{key}": value
            for path, parameter in self._parameters.items()
            for key, value in (
                state.get(parameter, {}) if steps is None else steps.state_of(parameter)
            ).items()
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


def _not_stored(optimizer: torch.optim.Optimizer, keys: Iterable[str]) -> ContractError:
    return ContractError(
        f"{type(optimizer).__name__} has state that is not a tensor, so a checkpoint cannot contain it:"
        f" {', '.join(sorted(keys))}",
        where=f"optimizer, {place_of_object(optimizer)}",
        accepted="tensors as state, such as a 0-dimensional one for a count",
    )
