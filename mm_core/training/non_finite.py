"""Where a step stopped being finite: the first module whose output, or gradient, is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from mm_core.contracts import Loss, TaskModule
from mm_core.modules.shards import local
from mm_core.runtime.ranks import on_any_rank


def first_non_finite(
    task: TaskModule, trained: Sequence[str], rerun: Callable[[], Iterator[Loss]], discard: Callable[[], None]
) -> str | None:
    """A sentence that names the first module at fault on this rank, or None where all is finite here.

    Called by all ranks, after a step whose gradients are not finite and before they are used: the
    micro-batches are computed once more, on every rank, with every module watched. Gradients are
    looked at before they are reduced over ranks, so that they tell the rank.

    Args:
        task: holds the modules, by path.
        trained: paths of the sharded roots.
        rerun: the losses of the step, with their graphs.
        discard: clears the gradients that the second look leaves.
    """
    bad = _parameter(task, trained)
    if on_any_rank(bad is not None):  # it may lie on another rank's shard: all of them leave here together
        return f"the parameter {bad} had been so before this step" if bad is not None else None
    watch = _Watch()
    handles = [
        module.register_forward_hook(watch.hook(path))
        for root in trained
        for path, module in task.get_submodule(root).named_modules(prefix=root)
    ]
    try:
        for loss in rerun():
            torch.autograd.backward(loss.total)
    finally:
        for handle in handles:
            handle.remove()
        discard()
    if watch.output is not None:
        return f"the first module whose output is not finite is {watch.output}"
    if watch.gradient is not None:
        return f"the first gradient that is not finite arose behind the output of {watch.gradient}"
    return None


def _parameter(task: TaskModule, trained: Sequence[str]) -> str | None:
    for root in trained:
        for name, parameter in task.get_submodule(root).named_parameters(prefix=root):
            if not bool(torch.isfinite(local(parameter)).all()):
                return name
    return None


class _Watch:
    """Notes the first output, in forward order, and the first gradient, in backward order."""

    def __init__(self) -> None:
        self.output: str | None = None
        self.gradient: str | None = None

    def hook(self, path: str) -> Callable[[nn.Module, object, object], None]:
        """What a module calls after its forward, inner modules first."""

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


def _tensors(values: object) -> Iterator[Tensor]:
    """The floating tensors of a module's input or output."""
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
