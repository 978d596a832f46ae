"""Where the weights of frozen components lie: on every rank, cut into shards, or in host memory.

Shards are PyTorch's `fully_shard` (FSDP2) without gradients. Offloaded weights wait in host memory and are
on the device for the length of a call, block by block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from mm_core.contracts import FrozenPlan, InitialWeights, Streamed, TaskModule
from mm_core.errors import ContractError, PlanError, did_you_mean
from mm_core.modules.patterns import match
from mm_core.modules.tying import state_of, tie, tied_names
from mm_core.parallel.layout import like_blocks


def blocks_of(component: nn.Module, name: str) -> tuple[str, ...]:
    """Paths of the modules, below `name` in the task, that are gathered or moved one at a time; () where
    some of them share weights, and so take turns for nothing."""
    assert isinstance(component, Streamed)
    if component.block_patterns == "auto":
        found = like_blocks(component, name)
    else:
        paths = [path for path, _ in component.named_modules() if path]
        found = [
            f"{name}.{path}" for path in match(component.block_patterns, paths, f"block_patterns of {name}")
        ]
    # A pattern may name lists within lists.
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
    """Where the weights of the task's frozen components will lie; those that are not built are left out.

    Args:
        placements: `engine.frozen`. ignored: paths that the engine leaves alone. shards: ranks a shard group;
            over one, nothing is cut.

    Raises:
        PlanError: a name that is no frozen component's, or one that cannot be placed so.
    """
    names = task.frozen
    for name, placement in placements.items():
        where = f"engine.frozen.{name}"
        if name not in names:
            raise PlanError(
                f"the task has no frozen component {name!r}",
                where="engine.frozen",
                accepted=", ".join(names),
                hint=did_you_mean(name, names),
            )
        if placement != "replicated" and not isinstance(getattr(task, name), Streamed):
            raise PlanError(
                f"{name!r} reads its weights itself, the same on every rank",
                where=where,
                accepted="replicated; or another component, whose weights the core reads",
            )
        if placement == "sharded" and (inside := [p for p in ignored if f"{p}.".startswith(f"{name}.")]):
            raise PlanError(
                f"{inside[0]!r} is to be sharded and to be left alone",
                where=where,
                hint="take it out of engine.ignored_modules",
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
    """Bytes that a rank keeps of a component, the largest share; shared tensors count once."""
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
    """Gives an empty component its memory and fills it.

    Args:
        component: a `Streamed` one, built.
        plan: where it will lie.
        device: that computes.
        weights: where the tensors come from, by path in the task.
        mesh: the ranks that share a sharded one; all of them call this.

    Raises:
        ContractError: a table that no file holds has no values.
    """
    name, offloaded = plan.name, plan.placement == "offloaded"
    assert isinstance(component, Streamed)
    component.requires_grad_(False)
    tied = tied_names(component)
    stored = component.state_dict()
    empty = {key for key, tensor in stored.items() if tensor.is_meta}
    if tables := [key for key, buffer in component.named_buffers() if buffer.is_meta and key not in stored]:
        raise ContractError(
            f"build_empty of {type(component).__name__} leaves {len(tables)} tables without values: "
            + ", ".join(tables[:8]),
            where=name,
            accepted="buffers that no file holds, computed",
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
        state[path].zero_()  # no result depends on it, but memory as it comes is no number
    found.fill(state)
    if offloaded:
        _offload(component, name, plan.blocks, device)
    component.eval()


def _materialise(component: nn.Module, home: torch.device, device: torch.device) -> None:
    """Memory for what has none, at `home`; buffers, which are computed with, go to the device."""

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
    scalars = {p for p in component.parameters() if p.dim() == 0}  # they cannot be cut, and stay whole
    shard = functools.partial(fully_shard, mesh=mesh, reshard_after_forward=True, ignored_params=scalars)
    for path in sorted(blocks, key=lambda path: -path.count(".")):
        shard(component.get_submodule(path[len(name) + 1 :]))
    root = shard(component)
    for entry in component.entry_points:
        register_fsdp_forward_method(component, entry)
        _around(component, entry, lambda: None, root.reshard)


def _around(component: nn.Module, entry: str, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Makes a method of the component do more. FSDP leaves its root gathered after a forward, for a backward
    that never comes here."""
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
    """Parameters that are moved together. Away, they are views of a single number: they keep their shape,
    dtype and device, by which others find out where to compute."""

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        pins = device.type != "cpu"
        self._kept = [(p, p.data.pin_memory() if pins else p.data) for p in parameters]
        self._device = device
        self.leave()

    def come(self, *_: object) -> None:
        """Onto the device."""
        for parameter, kept in self._kept:
            parameter.data = kept.to(self._device, non_blocking=True)

    def leave(self, *_: object) -> None:
        """Off the device; nothing is copied back, since nothing changes."""
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
    """Path -> its parameters, the component's rest first. What is used outside of the blocks too is of the
    rest."""
    units: dict[str, dict[int, nn.Parameter]] = {name: {}, **{path: {} for path in blocks}}
    for path, parameter in component.named_parameters(prefix=name, remove_duplicate=False):
        unit = next((block for block in blocks if path.startswith(f"{block}.")), name)
        units[unit][id(parameter)] = parameter
    rest = units[name]
    return {
        path: [p for key, p in own.items() if path == name or key not in rest] for path, own in units.items()
    }
