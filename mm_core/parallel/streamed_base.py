"""The frozen base below adapters, streamed: its blocks are in host memory, and on the device while in use.

A block comes before its forward and before its backward, and leaves after each; one that is fetched ahead is
copied while another computes. Coming and leaving happen within the recomputed function: without recomputation
the backward would use weights that have left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mm_core.contracts import FrozenPlan, TaskModule
from mm_core.device.torch_private import in_backward
from mm_core.errors import PlanError
from mm_core.modules.adapter_layers import adapter_of
from mm_core.modules.forwards import around_forward
from mm_core.parallel.layout import Layout, shared_outside

WHERE = "engine.base.stream"


def plan_base(task: TaskModule, layout: Layout, keep: int, dtype: torch.dtype | None) -> FrozenPlan:
    """Plans the streaming of a task's frozen base: its blocks are the recomputed modules.

    Args:
        task: with its adapters in place.
        layout: its sharding layout.
        keep: blocks on the device besides the one in use.
        dtype: dtype in which the base computes; None for its own.

    Raises:
        PlanError: nothing is recomputed, nothing in the recomputed modules is frozen, or they share weights.
    """
    paths = layout.recomputed
    blocks = [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]
    blocks = [path for path in blocks if any(True for _ in frozen_in(task, path))]
    if not blocks:
        what = "contains no frozen weight" if paths else "is empty"
        raise PlanError(
            f"only recomputed modules can be streamed, and engine.recompute_modules {what}",
            where=WHERE,
            accepted="a run with adapters whose blocks are recomputed",
            hint="set engine.recompute_modules: auto" if not paths else "remove engine.base",
        )
    if tied := shared_outside(task, blocks):
        path, (own, other) = next(iter(tied.items()))
        raise PlanError(
            f"{path} shares {own} with {other} outside of it, so it cannot be streamed",
            where=WHERE,
            hint="leave it out of engine.recompute_modules",
        )
    sizes = [sum(p.numel() * _kind(p, dtype).itemsize for _, p in frozen_in(task, path)) for path in blocks]
    stay = staying(keep, len(blocks))
    kept = [
        parameter.nbytes
        for index, path in enumerate(blocks)
        for _, parameter in frozen_in(task, path)
        if index >= stay or _kind(parameter, dtype) != parameter.dtype
    ]
    moving = sorted(sizes[stay:])[-min(keep + 1 - stay, 2) :] if stay < len(sizes) else []
    return FrozenPlan("base", "streamed", tuple(blocks), sum(sizes[:stay]), sum(kept), sum(moving), keep)


def staying(keep: int, blocks: int) -> int:
    """How many blocks never leave: with `keep`, one of them is the place of the next block, copied ahead."""
    return blocks if keep + 1 >= blocks else max(0, keep - 1)


def _kind(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a weight computes: `dtype` for a floating-point one."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def frozen_in(task: TaskModule, path: str) -> Iterator[tuple[str, nn.Parameter]]:
    """The frozen parameters of a module that are not an adapter's, by path in the task."""
    for name, parameter in task.get_submodule(path).named_parameters(prefix=path):
        if not parameter.requires_grad and adapter_of(name) is None and parameter.dim():
            yield name, parameter


@dataclass
class _Block:
    """A block's frozen parameters. Off the device they are views of one number: they keep shape and dtype."""

    device: torch.device
    dtype: torch.dtype | None
    stays: bool
    kept: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    arriving: list[Tensor] | None = None
    event: torch.Event | None = None
    present: bool = False

    def begin(self, named: Iterator[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
        """Takes the filled parameters; returns those in host memory by name, in the dtype of checkpoints."""
        held = {}
        for name, parameter in named:
            if self.stays and _kind(parameter, self.dtype) == parameter.dtype:
                parameter.data = parameter.data.to(self.device)
            else:
                held[name] = parameter.data.pin_memory() if self.device.type != "cpu" else parameter.data
                self.kept.append((parameter, held[name]))
        self._empty()
        return held

    def fetch(self, side: torch.Stream | None) -> None:
        """Starts the copy to the device."""
        if self.stays or self.present or self.arriving is not None:
            return
        # Allocated where they are used: the memory is free again in the order of the computation.
        self.arriving = [
            torch.empty_like(kept, device=self.device, dtype=_kind(kept, self.dtype)) for _, kept in self.kept
        ]
        if side is None:
            self._copy()
            return
        side.wait_stream(torch.accelerator.current_stream(self.device))
        with side:
            self._copy()
            self.event = side.record_event()

    def _copy(self) -> None:
        assert self.arriving is not None
        for target, (_, kept) in zip(self.arriving, self.kept, strict=True):
            target.copy_(kept, non_blocking=True)

    def come(self, side: torch.Stream | None) -> None:
        """Puts the weights in place; computations after this use them."""
        if self.present:
            return
        if self.stays:
            # At the first use: a resume fills the memory of the host after `begin`.
            for parameter, kept in self.kept:
                parameter.data = kept.to(self.device, _kind(kept, self.dtype))
            self.present = True
            return
        self.fetch(side)
        assert self.arriving is not None
        if self.event is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.event)
        for (parameter, _), arrived in zip(self.kept, self.arriving, strict=True):
            parameter.data = arrived
        self.arriving, self.event, self.present = None, None, True

    def leave(self) -> None:
        """Frees the device's memory. Frozen weights do not change, so nothing is copied back."""
        if self.stays:
            return
        if self.event is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.event)
        self.arriving, self.event, self.present = None, None, False
        self._empty()

    def _empty(self) -> None:
        for parameter, kept in self.kept:
            one = torch.empty((), dtype=_kind(kept, self.dtype), device=self.device)
            parameter.data = one.expand(kept.shape)


class StreamedBase:
    """The streamed base of a task.

    Args:
        task: on the meta device; the blocks' forwards are replaced, before `recompute` replaces them.
        plan: result of `plan_base`.
        device: the device that computes.
        dtype: dtype in which the base computes; None for its own. Host memory keeps its own.

    Attributes:
        parameters: the frozen parameters of the blocks, which the engine must neither shard nor put on the
            device.
        host: the weights in host memory, by path in the task; empty until `begin`.
    """

    def __init__(
        self, task: TaskModule, plan: FrozenPlan, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self._task, self._paths, self._ahead = task, plan.blocks, plan.keep > 0
        stay = staying(plan.keep, len(plan.blocks))
        self._blocks = [_Block(device, dtype, index < stay) for index in range(len(plan.blocks))]
        self._side = torch.Stream(device) if device.type != "cpu" else None
        self.host: dict[str, Tensor] = {}
        self.parameters: set[nn.Parameter] = set()
        for index, path in enumerate(plan.blocks):
            self.parameters |= {parameter for _, parameter in frozen_in(task, path)}
            self._wrap(task.get_submodule(path), index)

    def begin(self) -> None:
        """Takes the filled blocks: pins them in host memory, or moves those that stay to the device."""
        for path, block in zip(self._paths, self._blocks, strict=True):
            self.host |= block.begin(frozen_in(self._task, path))

    def sweep(self) -> None:
        """Sends all blocks away: those whose input needs no gradient, or that were fetched and not used."""
        for block in self._blocks:
            if block.present or block.arriving is not None:
                block.leave()

    def _wrap(self, module: nn.Module, index: int) -> None:
        block = self._blocks[index]

        def streamed(forward: Callable[..., object], *args: object, **kwargs: object) -> object:
            again = in_backward()
            self._come(index)
            if torch.is_grad_enabled():
                args, kwargs = _watched((args, kwargs), block.leave)
            out = forward(*args, **kwargs)
            if again:
                return out  # it leaves when the gradient of its input has come
            block.leave()
            if torch.is_grad_enabled():
                _on_gradient(out, lambda: self._come(index))
            return out

        around_forward(module, streamed)

    def _come(self, index: int) -> None:
        self._blocks[index].come(self._side)
        near = index - 1 if in_backward() else index + 1
        if self._ahead and 0 <= near < len(self._paths) and _siblings(self._paths[index], self._paths[near]):
            self._blocks[near].fetch(self._side)


def give_memory(module: nn.Module, home: torch.device, on_host: Collection[nn.Parameter]) -> None:
    """Allocates a module's tensors at `home`, without values; those of `on_host` in host memory."""
    held = set(on_host)

    def give(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="cpu" if tensor in held else home)

    module._apply(give)  # type: ignore[no-untyped-call]


def _siblings(one: str, other: str) -> bool:
    return one.rpartition(".")[0] == other.rpartition(".")[0]


def _watched(inputs: tuple[tuple[object, ...], dict[str, object]], then: Callable[[], None]) -> Sequence:  # type: ignore[type-arg]
    """The inputs with a view in place of the first that needs a gradient, whose gradient calls `then`.

    It is the first node of the block in the graph, so its gradient is the last that the backward computes.
    """
    found: list[Tensor] = []

    def view(tensor: Tensor) -> Tensor:
        if found or not tensor.requires_grad:
            return tensor
        found.append(seen := tensor.view_as(tensor))
        seen.register_hook(lambda gradient: then())  # type: ignore[no-untyped-call]
        return seen

    watched: Sequence[object] = tree_map_only(Tensor, view, inputs)
    return watched


def _on_gradient(outputs: object, then: Callable[[], None]) -> None:
    """Calls `then` when a gradient of the outputs arrives, before the block's backward."""

    def hook(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: then())  # type: ignore[no-untyped-call]
        return tensor

    tree_map_only(Tensor, hook, outputs)
