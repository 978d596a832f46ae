"""Names of torch that it may change without notice: no other module uses them, and each has a test here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch._C import DisableTorchFunctionSubclass
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as without_modes

__all__ = [
    "DTensorSpec",
    "DataDependentOutputException",
    "DisableTorchFunctionSubclass",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "Kernel",
    "TensorMeta",
    "TorchDispatchMode",
    "collectives_within",
    "compute_local_shape_and_global_offset",
    "divide_apart",
    "fake_store",
    "forget_layouts",
    "functorch_config",
    "in_backward",
    "is_traceable_wrapper_subclass",
    "kernel_of",
    "layouts_unseen",
    "shards_mixed",
    "unset_fake_temporarily",
    "without_modes",
]

Kernel = Literal["native", "decomposed", "fallback", "missing", "unknown"]


def kernel_of(operator: str, device: str) -> Kernel:
    """What torch runs for an operator, such as `aten::add.Tensor`, on a kind of device; see `kernel_on`."""
    key, has = torch._C._dispatch_key_for_device(device), torch._C._dispatch_has_kernel_for_dispatch_key
    if has(operator, key):
        return "native"
    if has(operator, "CompositeExplicitAutograd") or has(operator, "CompositeImplicitAutograd"):
        return "decomposed"
    return "fallback" if torch._C._dispatch_has_backend_fallback(key) else "missing"


def in_backward() -> bool:
    """Whether a backward is running in this thread, so that a forward is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def forget_layouts() -> None:
    """Drops what DTensor keeps of its operators' results: layouts on meshes."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


@contextmanager
def layouts_unseen() -> Iterator[None]:
    """A context in which modes see no tensor of the whole sizes with which DTensor computes shapes."""
    compute = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(self: ShardingPropagator, *given: Any) -> Any:
        with without_modes():
            return compute(self, *given)

    with patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen):
        yield


def shards_mixed() -> bool:
    """Whether this torch can shard modules whose frozen parameters have a dtype different from the trained.

    torch 2.7 asserts one dtype for all, and no integers; later versions check the trained ones only. Nothing
    public shows this before the first forward.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        return "requires_grad" in inspect.getsource(FSDPParamGroup._init_mp_dtypes)
    except (ImportError, AttributeError, OSError):
        return True


def divide_apart() -> None:
    """Makes fully_shard of torch 2.7 sum gradients on the CPU and divide them afterwards."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    original = _fsdp_collectives._get_gradient_divide_factors
    if original.__module__ == __name__:
        return

    def factors(scatter: Any, reduce: Any, dtype: torch.dtype, device_type: str = "") -> Any:
        return original(scatter, reduce, dtype, "mtia" if device_type == "cpu" else device_type)

    _fsdp_collectives._get_gradient_divide_factors = factors  # type: ignore[assignment]


@contextmanager
def own_shards_only() -> Iterator[None]:
    """A context for rank 0, in which fully_shard makes a view of its own shard only, not of all ranks'."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def first(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
        return [tensor.narrow(dim, 0, -(-tensor.shape[dim] // count))] * count

    with patch.object(_fsdp_param, "_chunk_with_empty", first):
        yield


@contextmanager
def collectives_within(timed: Callable[[Callable[[], Any]], Any], blocking: bool) -> Iterator[None]:
    """A context in which fully_shard lets `timed` call what waits for other ranks.

    Args:
        timed: called with a function, which it calls; returns its result.
        blocking: whether the host waits, in the call that begins a collective; else the device's queue does.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    def through(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: timed(partial(original, *args, **options))

    names = (
        ("unshard", "post_backward")
        if blocking
        else ("wait_for_unshard", "post_backward", "finalize_backward")
    )
    with ExitStack() as patches:
        for name in names:
            patches.enter_context(patch.object(FSDPParamGroup, name, through(getattr(FSDPParamGroup, name))))
        yield


def fake_store() -> Any:
    """The store of a process group of the backend `fake`, whose other ranks exist in name only."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()
