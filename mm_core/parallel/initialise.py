"""Initial weights that do not depend on how many ranks hold them.

torch's in-place random functions draw into the *local* shard of a DTensor on CPU: every rank gets
the same numbers, and other numbers at another world size. Under `seeded_init` the full tensor is
drawn by a generator of (seed, parameter name), and each rank keeps its part.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode

from mm_core.contracts import Randomness
from mm_core.errors import ContractError
from mm_core.parallel.adapters import base_name, init_adapters, without_adapters

_RANDOM_METHODS = frozenset(
    getattr(Tensor, name)
    for name in (
        [
            "normal_",
            "uniform_",
            "exponential_",
            "cauchy_",
            "log_normal_",
            "geometric_",
            "bernoulli_",
            "random_",
        ]
    )
)
_DRAWING = _RANDOM_METHODS | frozenset(
    function
    for name, function in inspect.getmembers(nn.init, inspect.isfunction)
    if name.endswith("_") and not name.startswith("_")
)


class _SeededInit(TorchFunctionMode):
    def __init__(self, names: Mapping[int, str], rng: Randomness, spared: Collection[str]) -> None:
        super().__init__()
        self.names = names
        self.rng = rng
        self.spared = spared
        self.calls: dict[str, int] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        name = self.names.get(id(target)) if isinstance(target, Tensor) else None
        if func not in _DRAWING:
            return func(*args, **kwargs)
        if name is None:
            if isinstance(target, DTensor):
                raise ContractError(
                    f"init_weights draws into a view of a parameter by {func.__name__}",
                    accepted="whole parameters: nn.init functions and methods on the parameter itself",
                    hint="draw the whole parameter first, then overwrite a part of it",
                )
            return func(*args, **kwargs)
        assert isinstance(target, Tensor)
        if name in self.spared:
            return target
        self.calls[name] = self.calls.get(name, 0) + 1
        full = torch.empty(target.shape, dtype=torch.float32)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(self.rng.seed32(name, self.calls[name]))
            func(full, *args[1:], **{key: value for key, value in kwargs.items() if key != "tensor"})
            keep_local_part(target, full)
        return target


def keep_local_part(target: Tensor, full: Tensor) -> None:
    """Copies this rank's part of `full` into `target` (all of it into a plain tensor)."""
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
) -> Iterator[None]:
    """Within it, random initialisation of the parameters of `module` draws by (seed, name); that of the
    names in `spared` does nothing."""
    named = [*module.named_parameters(prefix=prefix), *module.named_buffers(prefix=prefix)]
    # An adapted layer draws as it would without its adapter.
    names = {id(tensor): base_name(name) for name, tensor in named}
    with _SeededInit(names, rng.at("init"), {base_name(name) for name in spared}):
        yield


def initialise(module: nn.Module, prefix: str, rng: Randomness, spared: Collection[str] = ()) -> None:
    """Calls the module's `init_weights`. What it leaves unset is found by a poison value. Nothing is drawn
    for the names in `spared`, which are filled by other means."""
    tensors = [*module.named_parameters(prefix=prefix), *module.named_buffers(prefix=prefix)]
    with torch.no_grad():
        for name, tensor in tensors:
            if name in spared:
                continue
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.is_floating_point() or local.is_complex():
                local.fill_(float("nan"))
    with seeded_init(module, prefix, rng, spared), torch.no_grad():
        with without_adapters(module):
            module.init_weights()  # type: ignore[operator]
        init_adapters(module)
    named = [*module.named_parameters(prefix=prefix), *module.named_buffers(prefix=prefix)]
    unset = []
    for name, tensor in named:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if name in spared:
            continue
        if (local.is_floating_point() or local.is_complex()) and bool(local.detach().isnan().any()):
            unset.append(name)
    if unset:
        raise ContractError(
            f"init_weights of {type(module).__name__} left {len(unset)} tensors unset: "
            + ", ".join(unset[:8]),
            where=prefix,
            accepted="every parameter and buffer filled in place, non-persistent tables included",
        )
