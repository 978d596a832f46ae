"""Initial weights of a Transformers model, those of the library's own constructor, built once on rank 0."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from mm_core.contracts import empty_parameters, generators_kept
from mm_core.errors import ContractError, MMError, plural
from mm_core.modules.initialise import fill_whole
from mm_core.modules.torch_calls import Args, Function, Kwargs
from mm_core.runtime.ranks import Ranks, tensor_from_first

_Found = dict[str, Tensor]

_AHEAD = 32
"""A parameter's memory is allocated at most this many parameters before it is registered."""


def initialiser(model: nn.Module, make: Callable[[], nn.Module]) -> Callable[[], None]:
    """The `init_weights` of a task's Transformers model, which fills it as its authors do.

    Rank 0 builds the model again, in host memory and with the seed of the caller, and sends tensor after
    tensor to all ranks, each of which keeps its shards.

    Args:
        model: the model, with parameters on the meta device.
        make: builds the model again; not called where files or a checkpoint contain all weights.
    """
    tables = {name: buffer.clone() for name, buffer in model.named_buffers()}
    kind = type(model).__name__  # sharding gives the model another class

    def init_weights() -> None:
        targets: dict[str, Tensor] = dict(model.named_parameters())
        # Buffers on the meta device are made of parameters.
        targets |= {name: model.get_buffer(name) for name, table in tables.items() if table.is_meta}
        wanted: dict[str, Tensor] = {}
        for name, target in targets.items():
            fill_whole(target, functools.partial(wanted.__setitem__, name, target))

        @functools.cache
        def begun() -> _Found:
            return _on_first(make, wanted, len(wanted) < len(targets), kind)

        def sent(name: str) -> Tensor:
            return tensor_from_first(begun().pop(name, None), wanted[name])

        for name, target in wanted.items():
            fill_whole(target, functools.partial(sent, name))
        for name, table in tables.items():
            if not table.is_meta:
                model.get_buffer(name).copy_(table)

    return init_weights


def _on_first(make: Callable[[], nn.Module], wanted: _Found, part: bool, kind: str) -> _Found:
    """The wanted tensors of a new model on rank 0, {} on other ranks; their random generators do not change.

    Args:
        make: builds the model.
        wanted: what is to be filled, by name.
        part: whether the model has other parameters too.
        kind: the model's class, for messages.

    Raises:
        ContractError: on all ranks: nothing fills a tensor in the model's constructor.
    """
    ranks = Ranks.current()

    def build() -> tuple[_Found, list[str]]:
        with generators_kept():
            found = (_part_of(make, wanted) if part else None) or _whole(make)
        found = {name: found[name] for name in wanted if name in found}
        with _unset_marked():
            fits = {n for n, t in found.items() if t.shape == wanted[n].shape and not _is_unset(t)}
        return found, [name for name in wanted if name not in fits]

    work = build if ranks.rank == 0 else lambda: ({}, [])
    found, unset = ranks.agree(f"building {kind} with random weights", work)
    if unset := ranks.from_first(unset):
        raise ContractError(
            f"{kind} does not initialise {plural(len(unset), 'parameter')}: {', '.join(unset[:8])}",
            accepted="parameters that the constructor or _init_weights of the model fills",
            hint="use files that contain them (task.weights: files), or fill them in _init_weights",
        )
    return found


def _whole(make: Callable[[], nn.Module]) -> _Found:
    with torch.device("cpu"), _unset_marked():
        return _tensors(make())


def _part_of(make: Callable[[], nn.Module], wanted: Collection[str]) -> _Found | None:
    """A new model's tensors, with memory for the wanted ones alone; None if these depend on others."""
    # An error: the constructor computes a wanted tensor from a parameter that has no memory.
    with suppress(RuntimeError, MMError), _unset_marked():
        with _memory_for(frozenset()) as registered:
            names = {id(tensor) for name, tensor in _tensors(make()).items() if name in wanted}
        numbers = frozenset(n for n, parameter in enumerate(registered) if id(parameter) in names)
        with _memory_for(numbers), _Apart():
            found = _tensors(make())
        return None if any(found[name].is_meta for name in wanted if name in found) else found
    return None


class _Apart(TorchFunctionMode):
    """Raises an error where a tensor is changed by one on the meta device, which torch may skip silently."""

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        meta = [leaf.is_meta for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.__name__.endswith("_") and any(meta) and not meta[0]:
            raise RuntimeError(f"{func.__name__} with a tensor that has no memory")
        return func(*args, **(kwargs or {}))


@contextmanager
def _memory_for(numbers: frozenset[int]) -> Iterator[list[nn.Parameter | None]]:
    """Within the block, new parameters have no memory, but for those registered as these numbers; the list
    gets all parameters in the order of their registration, which is the same each time."""
    plain = nn.Module.register_parameter
    registered: list[nn.Parameter | None] = []
    with empty_parameters():
        empty = nn.Module.register_parameter

        def mark_next() -> None:  # not all memory, which would take a second per GiB of the model
            soon = range(len(registered), len(registered) + _AHEAD)
            torch.set_deterministic_debug_mode("default" if numbers.isdisjoint(soon) else "warn")

        def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            (plain if len(registered) in numbers else empty)(module, name, param)
            if param is not None:
                registered.append(module._parameters[name])
            mark_next()

        mark_next()
        with patch.object(nn.Module, "register_parameter", register):
            yield registered


@contextmanager
def _unset_marked() -> Iterator[None]:
    """Within the block, torch fills new memory: with NaN, integers with their largest value."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _is_unset(tensor: Tensor) -> bool:
    """Whether some of a tensor, or all of one of integers, is what `_unset_marked` fills memory with."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        return bool(tensor.isnan().any())
    return tensor.numel() > 0 and torch.equal(tensor, torch.empty_like(tensor))


def _tensors(model: nn.Module) -> _Found:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return dict(named)
