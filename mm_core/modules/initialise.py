"""Random initialisation that does not depend on the number of ranks.

torch's in-place random functions draw into the *local* shard of a DTensor on CPU: every rank gets the same
numbers, and a different world size gives different ones. Under `seeded_init` the full tensor is drawn by a
generator seeded with (seed, parameter name), and each rank keeps its shard.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary
from torch.utils._pytree import tree_leaves

from mm_core.contracts import PredictorModule, Randomness, reset_parameters, seeded
from mm_core.errors import ContractError, plural
from mm_core.modules.adapter_layers import base_name, init_adapters, without_adapters
from mm_core.modules.shards import local
from mm_core.modules.torch_calls import Args, Function, Kwargs
from mm_core.runtime.ranks import on_any_rank

_RANDOM_METHODS = "normal_ uniform_ exponential_ cauchy_ log_normal_ geometric_ bernoulli_ random_"
_DRAWING = {getattr(Tensor, name) for name in _RANDOM_METHODS.split()} | {
    function
    for name, function in inspect.getmembers(nn.init, inspect.isfunction)
    if name.endswith("_") and not name.startswith("_")
}

# Functions of nn.init that a torch mode cannot replace, and that draw into their own tensors.
_OWN_DRAWING = ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "eye_", "dirac_")
_FILLING = frozenset({Tensor.copy_, Tensor.fill_, Tensor.zero_, nn.init.constant_})
"""Calls that overwrite all of a tensor, unless their arguments were computed from it."""
_LOOKING = frozenset({Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point}) | {
    getattr(Tensor, name).__get__ for name in ("shape", "device", "dtype", "ndim", "requires_grad")
}
"""Calls that do not depend on a tensor's values."""
_MIXED = "mixed torch.Tensor and DTensor"
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MARK = 0x5EEDA110C8ED0B57
# Two marks that differ in every bit.
_MARKS: dict[torch.dtype, tuple[int, int]] = {torch.bool: (1, 0)} | {
    kind: (mark, ~mark)
    for size, kind in _SIGNED.items()
    for mark in [int.from_bytes((_MARK % 256**size).to_bytes(size, "big"), "big", signed=True)]
}


def fill_whole(target: Tensor, make: Callable[[], Tensor | None]) -> None:
    """Fills a module's parameter in `init_weights` from the full tensor; each rank keeps its shard.

    Args:
        target: the parameter, or a buffer.
        make: computes the full tensor, or returns None to leave the target unset. It is not called for
            tensors that are filled later, from files.
    """
    if has_torch_function_unary(target):
        handle_torch_function(fill_whole, (target,), target, make)
    elif (full := make()) is not None:
        keep_local_part(target, full)


class _SeededInit(TorchFunctionMode):
    def __init__(self, names: Mapping[int, str], rng: Randomness, spared: Collection[str]) -> None:
        super().__init__()
        self.names = names
        self.rng = rng
        self.spared = spared
        self.calls: dict[str, int] = {}
        self.filled: set[str] = set()
        self.read = False  # unset integers were read, so copied values may depend on them

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        name = self.names.get(id(target)) if isinstance(target, Tensor) else None
        if func is fill_whole:
            if name not in self.spared and (full := args[1]()) is not None:
                keep_local_part(args[0], full)
                self.filled |= {name} if name is not None else set()
            return None
        self.note(
            func, name, tree_leaves((args[1:], kwargs)) if func in _FILLING else tree_leaves((args, kwargs))
        )
        if func not in _DRAWING:
            return self.call(func, name, args, kwargs)
        rest = {key: value for key, value in kwargs.items() if key != "tensor"}
        return self.draw(func, target, args[1:], rest)

    def call(self, func: Function, name: str | None, args: Args, kwargs: Kwargs) -> object:
        """Calls a function that draws nothing; a full tensor copied into a sharded parameter is sharded."""
        if func is Tensor.copy_ and name is not None and isinstance(args[0], DTensor):
            source = args[1] if len(args) > 1 else kwargs.get("src", kwargs.get("other"))
            if isinstance(source, Tensor) and not isinstance(source, DTensor):
                if name not in self.spared:
                    keep_local_part(args[0], source.expand(args[0].shape))
                return args[0]
        try:
            return func(*args, **kwargs)
        except RuntimeError as fault:
            if _MIXED not in str(fault):
                raise
            shards = [a for a in tree_leaves((args, kwargs)) if isinstance(a, DTensor)]
            named = [self.names[id(a)] for a in shards if id(a) in self.names]
            raise ContractError(
                f"init_weights calls {func.__name__} with a plain tensor and"
                f" {', '.join(named) or 'a parameter'}, which is sharded over the ranks",
                accepted="methods of the parameter with numbers, and copy_ of a full plain tensor into it",
                hint="compute the full tensor first, then self.weight.copy_(full)",
            ) from fault

    def note(self, func: Function, name: str | None, given: Iterable[object]) -> None:
        """Records a target as completely filled if this call, which reads `given`, surely fills it."""
        if func in _DRAWING:
            self.filled |= {name} if name is not None else set()
        elif func not in _LOOKING:
            unset = [a for a in given if isinstance(a, Tensor) and not _is_float(a)]
            self.read = self.read or any(self.names.get(id(a), "") not in {"", *self.filled} for a in unset)
            if name is not None and func in _FILLING and not self.read:
                self.filled.add(name)

    def draw(self, func: Function, target: Any, args: Args, kwargs: Kwargs) -> object:
        """Calls a random function for the full tensor, seeded with (seed, name); keeps this rank's shard."""
        name = self.names.get(id(target))
        if name is None:
            if isinstance(target, DTensor):
                raise ContractError(
                    f"init_weights calls {func.__name__.strip('_')}_ on a view of a parameter, or on a tensor"
                    " computed from it",
                    accepted="nn.init functions and methods on the complete parameter",
                    hint="draw the complete parameter first, then overwrite a part of it; call functions such"
                    " as nn.init.orthogonal_ through nn.init, not by a name imported from it",
                )
            return func(target, *args, **kwargs)
        if name in self.spared:
            return target
        self.calls[name] = self.calls.get(name, 0) + 1
        full = torch.empty(target.shape, dtype=torch.float32)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(self.rng.seed32(name, self.calls[name]))
            func(full, *args, **kwargs)
            keep_local_part(target, full)
        return target


def keep_local_part(target: Tensor, full: Tensor) -> None:
    """Copies this rank's shard of a full tensor into a module's tensor (all of it into a plain tensor)."""
    if isinstance(target, DTensor):
        part = distribute_tensor(
            full.to(target.device), target.device_mesh, target.placements, src_data_rank=None
        )
        target.to_local().copy_(part.to_local())
    else:
        target.copy_(full)


@contextmanager
def seeded_init(
    module: nn.Module, prefix: str, rng: Randomness, spared: Collection[str] = ()
) -> Iterator[_SeededInit]:
    """A context in which random initialisation of a module's parameters is seeded with (seed, name).

    For names in `spared`, random initialisation does nothing.
    """
    # An adapted layer draws as it would without its adapter.
    names = {id(tensor): base_name(name) for name, tensor in _tensors(module, prefix, ())}
    mode = _SeededInit(names, rng.at("init"), {base_name(name) for name in spared})
    thread = threading.get_ident()

    def whole(func: Function) -> Function:
        @functools.wraps(func)
        def draw(tensor: Tensor, *args: object, **kwargs: object) -> object:
            foreign = threading.get_ident() != thread  # builds a model of its own meanwhile
            if foreign or (id(tensor) not in names and not isinstance(tensor, DTensor)):
                return func(tensor, *args, **kwargs)
            mode.filled.add(names.get(id(tensor), ""))
            return mode.draw(func, tensor, args, kwargs)

        return draw

    replaced: Kwargs = {name: whole(getattr(nn.init, name)) for name in _OWN_DRAWING}
    with patch.multiple(nn.init, **replaced), mode:
        yield mode


def init_weights_of(module: nn.Module) -> Callable[[], None]:
    """A module's `init_weights`; for a module without one, the `reset_parameters` of its layers."""
    own: Callable[[], None] = getattr(module, "init_weights", partial(reset_parameters, module))
    return own


def initialise(module: nn.Module, prefix: str, rng: Randomness, spared: Collection[str] = ()) -> None:
    """Initialises a module (see `init_weights_of`), and checks that this leaves no tensor unset.

    Before that, memory is filled with marks: NaN for floats, which no weight may be. Any integer may be a
    valid value, so if some integers are not surely filled, everything is repeated with different marks:
    values that differ then were not written, or were computed from unset memory.

    Args:
        module: the module, on its device.
        prefix: its path in the task.
        rng: the run's randomness.
        spared: names that are filled later from files: nothing is drawn for them.

    Raises:
        ContractError: lists all unset tensors.
    """
    filled = _over_marks(module, prefix, rng, spared, 0)
    found = dict(_tensors(module, prefix, spared))
    unset = {
        name for name, tensor in found.items() if _is_float(tensor) and bool(_bits(tensor).isnan().any())
    }
    integers = [n for n, tensor in found.items() if not _is_float(tensor) and base_name(n) not in filled]
    once = {name: _bits(found[name]).clone() for name in integers}
    # Ranks have different rows of a sharded tensor. All repeat, or none: authors may gather.
    sharded = any(isinstance(tensor, DTensor) and not _is_float(tensor) for tensor in found.values())
    if on_any_rank(bool(once)) if sharded else once:
        _over_marks(module, prefix, rng, spared, 1)
        found = dict(_tensors(module, prefix, spared))
        unset |= {name for name, bits in once.items() if not torch.equal(bits, _bits(found[name]))}
    if unset:
        raise _unset(module, prefix, [name for name in found if name in unset])


def _over_marks(
    module: nn.Module, prefix: str, rng: Randomness, spared: Collection[str], mark: int
) -> set[str]:
    """Initialises over marks; returns the names that were surely filled.

    Random numbers outside parameters (for a computed table) come from newly seeded generators: the same on
    all ranks, and each time.
    """
    with torch.no_grad(), seeded(rng.at("init", "unnamed", prefix)):
        for _, tensor in _tensors(module, prefix, spared):
            bits = _bits(tensor)
            bits.fill_(float("nan") if _is_float(tensor) else _MARKS[bits.dtype][mark])
        with seeded_init(module, prefix, rng, spared) as mode:
            with without_adapters(module):
                init_weights_of(module)()
            init_adapters(module)
    return mode.filled


def _tensors(module: nn.Module, prefix: str, spared: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    named = [*module.named_parameters(prefix=prefix), *module.named_buffers(prefix=prefix)]
    yield from ((name, tensor) for name, tensor in named if name not in spared)


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _bits(tensor: Tensor) -> Tensor:
    """This rank's shard; integers as signed ones."""
    share = local(tensor)
    if _is_float(share) or share.dtype == torch.bool:
        return share
    return share.view(_SIGNED[share.element_size()])


def _unset(module: nn.Module, prefix: str, names: Sequence[str]) -> ContractError:
    listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    kind = type(module).__name__
    if isinstance(module, FSDPModule):
        kind = kind.removeprefix("FSDP")
    default = getattr(type(module), "init_weights", None) in (None, PredictorModule.init_weights)
    by_layers = default and "init_weights" not in vars(module)
    method = "reset_parameters of the layers" if by_layers else "init_weights"
    place = f"an init_weights of {kind}" if by_layers else "init_weights"
    return ContractError(
        f"{method} of {kind} left {plural(len(names), 'tensor')} unset: {listed}",
        where=prefix,
        accepted="every parameter and buffer filled in place, non-persistent tables included",
        hint=f"fill them completely in {place}: self.position_ids.copy_(torch.arange(n)); values computed"
        " in a constructor are lost on the meta device",
    )
