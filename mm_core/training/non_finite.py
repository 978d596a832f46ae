"""Finding where a training step goes wrong: the first module whose output or gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from mm_core.contracts import Engine, Loss, TaskModule
from mm_core.modules.shards import local
from mm_core.runtime.ranks import on_any_rank
from mm_core.telemetry.align.recorder import flatten


def first_non_finite(
    task: TaskModule,
    trained: Sequence[str],
    forwards: Sequence[Callable[[], Loss]],
    engine: Engine,
) -> str | None:
    """Finds the first module of a training step that is not finite on this rank; returns a message, or None.

    Called by all ranks after a step whose gradients are not finite, before they are used: every rank computes
    its micro-batches again with hooks on all modules. Gradients are checked before they are reduced over
    ranks, which shows the rank that caused it.

    Args:
        task: contains the modules, by path.
        trained: paths of the sharded roots.
        forwards: of the step's micro-batches.
        engine: runs them, and clears the gradients of the second computation.
    """
    bad = _parameter(task, trained, engine)
    if on_any_rank(bad is not None):  # it may be in another rank's shard: all ranks return here together
        return f"the parameter {bad} was not finite before this step" if bad is not None else None
    watch = _Watch()
    handles = [
        module.register_forward_hook(watch.hook(path))
        for root in trained
        for path, module in task.get_submodule(root).named_modules(prefix=root)
    ]
    try:
        for forward in forwards:
            engine.micro_step(forward, last=forward is forwards[-1], scale=1.0)
    finally:
        for handle in handles:
            handle.remove()
        engine.discard()
    if watch.output is not None:
        return f"the first module whose output is not finite is {watch.output}"
    if watch.gradient is not None:
        return f"the first gradient that is not finite is that of the output of {watch.gradient}"
    return None


def _parameter(task: TaskModule, trained: Sequence[str], engine: Engine) -> str | None:
    for shard in engine.shards():
        if not bool(torch.isfinite(shard.master).all()):
            return shard.name
    for root in trained:
        for name, parameter in task.get_submodule(root).named_parameters(prefix=root):
            if not bool(torch.isfinite(local(parameter)).all()):
                return name
    return None


class _Watch:
    """Records the first output (in forward order) and gradient (in backward order) that is not finite."""

    def __init__(self) -> None:
        self.output: str | None = None
        self.gradient: str | None = None

    def hook(self, path: str) -> Callable[[nn.Module, object, object], None]:
        """A forward hook for a module of the training step; inner modules call theirs first."""

        def hook(module: nn.Module, inputs: object, output: object) -> None:
            for tensor in _tensors(output):
                if self.output is None and not _finite(tensor):
                    self.output = path if _finite(inputs) else f"{path} (its inputs were not finite either)"
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._note(path, gradient))  # type: ignore[no-untyped-call]

        return hook

    def _note(self, path: str, gradient: Tensor) -> None:
        if self.gradient is None and not bool(torch.isfinite(gradient).all()):
            self.gradient = path


def _finite(values: object) -> bool:
    return all(bool(torch.isfinite(tensor.detach()).all()) for tensor in _tensors(values))


def _tensors(values: object) -> list[Tensor]:
    """The floating tensors of a module's input or output."""
    return [tensor for _, tensor in flatten(values) if tensor.is_floating_point()]
