"""Random initialisation that does not depend on the number of ranks.

torch's in-place random functions draw into the *local* shard of a DTensor on CPU: every rank gets the same
numbers, and a different world size gives different ones. Under `seeded_init` the full tensor is drawn by a
generator seeded with (seed, parameter name), and each rank keeps its shard. What is drawn into a part of a
parameter, or into a tensor of the author's, comes from one stream of the seed, the same on all ranks.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary
from torch.utils._pytree import tree_leaves

from mm_core.contracts import PredictorModule, Randomness, reset_parameters, seeded
from mm_core.errors import ContractError, MMError, plural
from mm_core.modules.adapter_layers import base_name, init_adapters, without_adapters
from mm_core.modules.full_tensors import FullTensors, keep_local_part, storage_of
from mm_core.modules.shards import local
from mm_core.modules.torch_calls import Args, Function, Kwargs
from mm_core.plugin.checks.places import place_of_object
from mm_core.runtime.launch.rank_process import out_of_memory
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
_LOOKING_METHODS = (
    "size dim ndimension numel nelement stride is_floating_point is_complex element_size requires_grad_"
    " __len__ __hash__"
)
_LOOKED_AT = "shape device dtype ndim layout is_meta is_leaf grad requires_grad"
_LOOKING = frozenset(getattr(Tensor, name) for name in _LOOKING_METHODS.split()) | {
    getattr(Tensor, name).__get__ for name in _LOOKED_AT.split()
}
"""Calls that do not depend on a tensor's values."""
_BY_ELEMENT = _FILLING | {
    getattr(Tensor, f"{name}_") for name in ("mul", "add", "sub", "div", "neg", "clamp")
}
"""Calls that a shard answers as the full tensor does, if all other arguments are numbers."""
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
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
        self.full_tensors = FullTensors(names, spared)
        self.shards: dict[int, str] = {}

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        name = self.names.get(id(target)) if isinstance(target, Tensor) else None
        if func is fill_whole:
            if name not in self.spared and (full := args[1]()) is not None:
                self.full_tensors.keep(args[0], full)
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
        """Calls a function that uses no random numbers, with full tensors in place of sharded parameters.

        Calls that a shard can answer alone gather nothing.
        """
        target, *others = tree_leaves((args, kwargs)) or [None]
        if name is not None and isinstance(target, DTensor) and not self.full_tensors.is_open(target):
            given = [other for other in others if isinstance(other, Tensor)]
            if func in _LOOKING or (func in _BY_ELEMENT and not given):
                return func(*args, **kwargs)
            if func in {Tensor.copy_, _SET_DATA} and given and not isinstance(given[0], DTensor):
                if name not in self.spared:
                    keep_local_part(target, given[0].expand(target.shape))
                return target
        if func in _LOOKING:
            return func(*args, **kwargs)
        if func == _SET_DATA and isinstance(target, DTensor):
            func = Tensor.copy_
        return self.full_tensors.call(func, args, kwargs)

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
            shard = self.shards.get(storage_of(target) or 0)
            if isinstance(target, DTensor) or shard is not None:
                on = "a DTensor of its own" if shard is None else f"a shard of {shard}"
                raise ContractError(
                    f"init_weights calls {func.__name__} on {on}: each rank would draw the same numbers",
                    where=_line(_author(traceback.extract_stack())),
                    accepted="parameters and buffers of the module, their views, and plain tensors",
                    hint=f"pass the parameter itself: {func.__name__}(self.weight), not its local shard",
                )
            return self.full_tensors.call(func, (target, *args), kwargs)
        if name in self.spared:
            return target
        self.calls[name] = self.calls.get(name, 0) + 1
        generators = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
        device = generators[0].device if generators else "cpu"
        full = torch.empty(target.shape, dtype=_drawn_dtype(target.dtype), device=device)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(self.rng.seed32(name, self.calls[name]))
            func(full, *args, **kwargs)
            self.full_tensors.keep(target, full)
        return target


def _drawn_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to draw in: float32 for what has fewer bits, so that rounding is the only difference."""
    return dtype if dtype in {torch.float64, torch.complex64, torch.complex128} else torch.float32


def _author(frames: traceback.StackSummary) -> traceback.FrameSummary | None:
    """The innermost call outside torch and mm_core: that of the model's author."""
    ours = tuple(str(Path(module.__file__ or "").parent) for module in (torch, sys.modules["mm_core"]))
    return next((frame for frame in reversed(frames) if not frame.filename.startswith(ours)), None)


def _line(frame: traceback.FrameSummary | None) -> str | None:
    return f"{frame.filename}, line {frame.lineno}" if frame is not None else None


@contextmanager
def _named_line(module: nn.Module) -> Iterator[None]:
    """A context in which torch's refusal of a call becomes an error with the author's line."""
    try:
        yield
    except (ValueError, TypeError, IndexError, RuntimeError) as fault:
        frames = traceback.extract_tb(fault.__traceback__)
        author = _author(frames)
        if author is None or author is frames[-1] or isinstance(fault, MMError) or out_of_memory(fault):
            raise
        raise ContractError(
            f"init_weights of {_kind(module)} fails in torch, at {author.line}: {fault}",
            where=_line(author),
            hint="check shape and dtype in that line: the tensor has its full, unsharded shape there",
        ) from fault


@contextmanager
def seeded_init(
    module: nn.Module, prefix: str, rng: Randomness, spared: Collection[str] = ()
) -> Iterator[_SeededInit]:
    """A context in which random initialisation of a module's parameters is seeded with (seed, name).

    Args:
        module: the module; its parameters may be DTensors.
        prefix: its path in the task.
        rng: the run's randomness.
        spared: names in the task for which random initialisation does nothing.
    """
    # An adapted layer draws as it would without its adapter.
    names = {id(tensor): base_name(name) for name, tensor in _tensors(module, prefix, ())}
    mode = _SeededInit(names, rng.at("init"), {base_name(name) for name in spared})
    shards = {
        storage_of(t.to_local()): name for name, t in _tensors(module, prefix, ()) if isinstance(t, DTensor)
    }
    mode.shards = {storage: name for storage, name in shards.items() if storage is not None}
    thread = threading.get_ident()

    def whole(func: Function) -> Function:
        @functools.wraps(func)
        def draw(tensor: Tensor, *args: object, **kwargs: object) -> object:
            foreign = threading.get_ident() != thread  # builds a model of its own meanwhile
            known = id(tensor) in names or isinstance(tensor, DTensor) or storage_of(tensor) in mode.shards
            if foreign or not known:
                return func(tensor, *args, **kwargs)
            mode.filled.add(names.get(id(tensor), ""))
            return mode.draw(func, tensor, args, kwargs)

        return draw

    replaced: Kwargs = {name: whole(getattr(nn.init, name)) for name in _OWN_DRAWING}
    with patch.multiple(nn.init, **replaced), mode:
        yield mode
    mode.full_tensors.close()


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
        ContractError: lists all unset tensors, or those that were replaced by others.
    """
    given = dict(module.named_parameters(prefix=prefix))
    filled = _over_marks(module, prefix, rng, spared, 0)
    now = dict(module.named_parameters(prefix=prefix))
    if replaced := [name for name, parameter in given.items() if now.get(name) is not parameter]:
        raise _replaced(module, prefix, replaced)
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
            with without_adapters(module), _named_line(module):
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


def _kind(module: nn.Module) -> str:
    kind = type(module).__name__
    return kind.removeprefix("FSDP") if isinstance(module, FSDPModule) else kind


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _replaced(module: nn.Module, prefix: str, names: Sequence[str]) -> ContractError:
    return ContractError(
        f"init_weights of {_kind(module)} replaced {plural(len(names), 'parameter')} by other objects:"
        f" {_listed(names)}",
        where=prefix,
        accepted="the parameters of the constructor, filled in place: they are sharded already",
        hint="write self.weight.copy_(values) in place of self.weight = nn.Parameter(values), and tie weights"
        " in the constructor",
    )


def _unset(module: nn.Module, prefix: str, names: Sequence[str]) -> ContractError:
    default = getattr(type(module), "init_weights", None) in (None, PredictorModule.init_weights)
    by_layers = default and "init_weights" not in vars(module)
    method = "reset_parameters of the layers" if by_layers else "init_weights"
    place = f"an init_weights of {_kind(module)}" if by_layers else "init_weights"
    first = names[0].removeprefix(f"{prefix}.")
    return ContractError(
        f"{method} of {_kind(module)} left {plural(len(names), 'tensor')} unset: {_listed(names)}",
        where=f"{prefix}, {place_of_object(module)}",
        accepted="every parameter and buffer filled in place, non-persistent tables included",
        hint=f"fill them completely in {place}: self.{first}.copy_(values); values computed in a constructor"
        " are lost on the meta device",
    )
