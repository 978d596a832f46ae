"""Placing the weights of frozen components: on every rank, sharded over ranks, or in host memory.

Shards are PyTorch's `fully_shard` (FSDP2) without gradients. Offloaded weights stay in host memory and are
on the device only during a call, block by block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from mm_core.contracts import Frozen, FrozenPlan, InitialWeights, Streamed, TaskModule
from mm_core.errors import ContractError, PlanError, did_you_mean, plural
from mm_core.modules.patterns import match
from mm_core.modules.tying import state_of, tie, tied_names
from mm_core.parallel.layout import like_blocks


def blocks_of(component: nn.Module, name: str) -> tuple[str, ...]:
    """The paths of a frozen component's blocks, which are gathered or moved one at a time.

    Empty if blocks share weights: moving them one at a time would save nothing.

    Args:
        component: a `Streamed` component.
        name: its name in the task.
    """
    assert isinstance(component, Streamed)
    if component.block_patterns == "auto":
        found = like_blocks(component, name)
    else:
        paths = [path for path, _ in component.named_modules() if path]
        found = [
            f"{name}.{path}" for path in match(component.block_patterns, paths, f"block_patterns of {name}")
        ]
    # A pattern may match lists within lists.
    outer = [path for path in found if not any(path.startswith(f"{other}.") for other in found)]
    users: dict[int, str] = {}
    for path in outer:
        for parameter in component.get_submodule(path[len(name) + 1 :]).parameters():
            if users.setdefault(id(parameter), path) != path:
                return ()
    return tuple(outer)


def plan_frozen(
    task: TaskModule, placements: Mapping[str, str], ignored: Sequence[str], shards: int
) -> tuple[FrozenPlan, ...]:
    """Plans the placement of the weights of a task's frozen components; components not built are left out.

    Args:
        task: the task.
        placements: `engine.frozen`: component -> placement.
        ignored: paths that the engine does not shard.
        shards: ranks in a shard group; with one, nothing is sharded.

    Raises:
        PlanError: a name that is not a frozen component's, or a placement that a component cannot have.
    """
    names = task.frozen
    for name, placement in placements.items():
        where = f"engine.frozen.{name}"
        if name not in names and isinstance(getattr(task, name, None), Frozen):
            continue  # nothing needs it: its features are cached
        if name not in names:
            raise PlanError(
                f"the task has no frozen component {name!r}",
                where="engine.frozen",
                accepted=", ".join(names) or "no name: this task has no frozen components",
                hint=did_you_mean(name, names) or "remove this name",
            )
        if placement != "replicated" and not isinstance(getattr(task, name), Streamed):
            raise PlanError(
                f"{name!r} loads its weights itself, in full on every rank",
                where=where,
                accepted="replicated",
                hint=f"set {where}: replicated",
            )
        if placement == "sharded" and (inside := [p for p in ignored if f"{p}.".startswith(f"{name}.")]):
            raise PlanError(
                f"{inside[0]!r} would be sharded, but engine.ignored_modules excludes it from sharding",
                where=where,
                hint="remove it from engine.ignored_modules",
            )
    return tuple(
        _plan_of(getattr(task, name), name, placements.get(name, "replicated"), shards)
        for name in names
        if isinstance(getattr(task, name), Streamed) and any(True for _ in getattr(task, name).parameters())
    )


def _plan_of(component: nn.Module, name: str, placement: str, shards: int) -> FrozenPlan:
    if placement == "replicated" or (placement == "sharded" and shards == 1):
        return FrozenPlan(name, "replicated", (), bytes_of(component), 0, 0)
    blocks = blocks_of(component, name)
    units = [sum(p.nbytes for p in own) for own in _units(component, name, blocks).values()]
    call = units[0] + max(units[1:], default=0)
    if placement == "sharded":
        return FrozenPlan(name, placement, blocks, bytes_of(component, shards), 0, call)
    tables = sum(buffer.nbytes for buffer in component.buffers())
    return FrozenPlan(name, placement, blocks, tables, bytes_of(component) - tables, call)


def bytes_of(component: nn.Module, shards: int = 1) -> int:
    """Bytes of a frozen component on the rank with the largest shard; shared tensors count once."""
    kept = sum(
        prod(p.shape[1:]) * -(-p.shape[0] // shards) * p.element_size() if p.dim() else p.element_size()
        for p in component.parameters()
    )
    return kept + sum(buffer.nbytes for buffer in component.buffers())


def place(
    component: nn.Module,
    plan: FrozenPlan,
    device: torch.device,
    weights: InitialWeights,
    mesh: DeviceMesh | None = None,
) -> None:
    """Allocates a frozen component's memory in its planned placement, and fills it with weights.

    Args:
        component: a `Streamed` component, built empty.
        plan: its placement.
        device: the device that computes.
        weights: source of the tensors, by path in the task.
        mesh: the ranks that share a sharded component; all of them call this.

    Raises:
        ContractError: a buffer that is not stored in files has no values.
    """
    name, offloaded = plan.name, plan.placement == "offloaded"
    assert isinstance(component, Streamed)
    component.requires_grad_(False)
    tied = tied_names(component)
    stored = component.state_dict()
    empty = {key for key, tensor in stored.items() if tensor.is_meta}
    if tables := [key for key, buffer in component.named_buffers() if buffer.is_meta and key not in stored]:
        raise ContractError(
            f"build_empty of {type(component).__name__} leaves {plural(len(tables), 'buffer')} without"
            f" values: {', '.join(tables[:8])}",
            where=name,
            accepted="computed values in every buffer that is not stored in files",
            hint="build the modules within mm_core.contracts.empty_parameters",
        )
    if plan.placement == "sharded":
        _shard(component, name, plan.blocks, mesh)
    home = torch.device("cpu") if offloaded else device
    _materialise(component, home, device)
    tie(component, tied)
    state = state_of(component, name, tied)
    found = weights.covers(state)
    for path in {f"{name}.{key}" for key in empty - tied.keys()}.difference(found.names):
        state[path].zero_()  # no result depends on it, but unset memory may contain NaN
    found.fill(state)
    if offloaded:
        _offload(component, name, plan.blocks, device)
    component.eval()


def _materialise(component: nn.Module, home: torch.device, device: torch.device) -> None:
    """Allocates missing memory at `home`; buffers, which are used in computations, go to the device."""

    def give(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=home) if tensor.is_meta else tensor

    component._apply(give)  # type: ignore[no-untyped-call]
    for module in component.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device)


# -- shards ----------------------------------------------------------------------------------------


def _shard(component: nn.Module, name: str, blocks: Sequence[str], mesh: DeviceMesh | None) -> None:
    assert isinstance(component, Streamed)
    scalars = {p for p in component.parameters() if p.dim() == 0}  # they cannot be sharded
    shard = functools.partial(fully_shard, mesh=mesh, reshard_after_forward=True, ignored_params=scalars)
    for path in sorted(blocks, key=lambda path: -path.count(".")):
        shard(component.get_submodule(path[len(name) + 1 :]))
    root = shard(component)
    for entry in component.entry_points:
        register_fsdp_forward_method(component, entry)
        _around(component, entry, lambda: None, root.reshard)


def _around(component: nn.Module, entry: str, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Wraps a method of the component with calls before and after it. FSDP leaves its root gathered after a
    forward, for a backward that never runs here."""
    method: Callable[..., object] = getattr(component, entry)

    @functools.wraps(method)
    def call(*args: object, **kwargs: object) -> object:
        before()
        try:
            return method(*args, **kwargs)
        finally:
            after()

    setattr(component, entry, call)


# -- host memory -----------------------------------------------------------------------------------


class _Unit:
    """Offloaded parameters that are moved together. Off the device, they are views of a single number: they
    keep their shape, dtype and device, which show others where to compute."""

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        pins = device.type != "cpu"
        self._kept = [(p, p.data.pin_memory() if pins else p.data) for p in parameters]
        self._device = device
        self.leave()

    def come(self, *_: object) -> None:
        for parameter, kept in self._kept:
            parameter.data = kept.to(self._device, non_blocking=True)

    def leave(self, *_: object) -> None:
        # Frozen weights do not change, so nothing is copied back.
        for parameter, kept in self._kept:
            parameter.data = torch.empty((), dtype=kept.dtype, device=self._device).expand(kept.shape)


def _offload(component: nn.Module, name: str, blocks: Sequence[str], device: torch.device) -> None:
    assert isinstance(component, Streamed)
    for path, parameters in _units(component, name, blocks).items():
        unit = _Unit(parameters, device)
        if path == name:
            for entry in component.entry_points:
                _around(component, entry, unit.come, unit.leave)
        else:
            block = component.get_submodule(path[len(name) + 1 :])
            block.register_forward_pre_hook(unit.come)
            block.register_forward_hook(unit.leave, always_call=True)


def _units(component: nn.Module, name: str, blocks: Sequence[str]) -> Mapping[str, list[nn.Parameter]]:
    """Path -> its parameters, starting with those outside the blocks, which include parameters that blocks
    share with other modules."""
    units: dict[str, dict[int, nn.Parameter]] = {name: {}, **{path: {} for path in blocks}}
    for path, parameter in component.named_parameters(prefix=name, remove_duplicate=False):
        unit = next((block for block in blocks if path.startswith(f"{block}.")), name)
        units[unit][id(parameter)] = parameter
    rest = units[name]
    return {
        path: [p for key, p in own.items() if path == name or key not in rest] for path, own in units.items()
    }
