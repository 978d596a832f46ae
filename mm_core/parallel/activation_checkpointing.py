"""Recomputation of activations (activation checkpointing) and their offloading, applied from outside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mm_core.builtin.configs.engines import FSDP2Config
from mm_core.device import ATTENTION_OPERATORS
from mm_core.errors import PlanError
from mm_core.modules.forwards import around_forward

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]

_GROUPS: dict[str, tuple[str, ...]] = {
    "attention": ATTENTION_OPERATORS,
    "matmul": ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm"),
}
"""Names of `engine.recompute` -> operators of `torch.ops`; of those not every torch or library has each."""


def kept_by(config: FSDP2Config) -> tuple[str, ...]:
    """The operators of torch.ops, such as `aten.mm`, whose outputs `engine.recompute` keeps; none for `full`.

    Raises:
        PlanError: there is no such operator, or the older autograd path is wanted, which keeps nothing.
    """
    if config.use_reentrant and config.context_parallel.size > 1:
        raise PlanError(
            "the older autograd path recomputes without a forward's part of the tokens",
            where="engine.use_reentrant",
            accepted="false with context_parallel",
        )
    if config.recompute == "full":
        return ()
    if config.use_reentrant:
        raise PlanError(
            "the older autograd path recomputes everything",
            where="engine.recompute",
            accepted="full with use_reentrant: true",
            hint="remove use_reentrant",
        )
    names = tuple(_GROUPS) if config.recompute == "selective" else config.recompute
    for name in names:
        if name not in _GROUPS and _operator(name) is None:
            raise PlanError(
                f"torch has no operator {name!r}",
                where="engine.recompute",
                accepted=f"full, selective, or a list of {', '.join(_GROUPS)} and operators of torch.ops",
                hint="for example [attention, aten.convolution]",
            )
    return tuple(operator for name in names for operator in _GROUPS.get(name, (name,)))


def selective(kept: Sequence[str], around: Callable[[], Contexts] | None = None) -> Callable[[], Contexts]:
    """Contexts for `recompute` that keep the outputs of operators (`kept_by`), within others."""
    # A partial of torch's own function: dynamo recognises no other.
    # Now, not in the plan: libraries register theirs as late as with the kernel of attention.
    policy = functools.partial(
        _policy, {operator for name in kept if (operator := _operator(name)) is not None}
    )
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return contexts if around is None else _together(around, contexts)


def _operator(name: str) -> object | None:
    namespace, _, operator = name.partition(".")
    try:
        return getattr(getattr(torch.ops, namespace), operator, None)
    except RuntimeError:  # not a name at all
        return None


def _policy(kept: set[object], _: object, operator: Any, *__: object, **___: object) -> CheckpointPolicy:
    wanted = getattr(operator, "overloadpacket", operator) in kept
    return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE


def _together(first: Callable[[], Contexts], second: Callable[[], Contexts]) -> Callable[[], Contexts]:
    def contexts() -> Contexts:
        (forward, again), (inner_forward, inner_again) = first(), second()
        return _nested(forward, inner_forward), _nested(again, inner_again)

    return contexts


@contextmanager
def _nested(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield


def recompute(module: nn.Module, use_reentrant: bool, contexts: Callable[[], Contexts] | None = None) -> None:
    """Makes a module keep only its inputs, and recompute its forward (activations) in the backward.

    Hooks (also those of fully_shard) are not run again.

    Args:
        module: changes in place.
        use_reentrant: the older autograd path.
        contexts: called at each forward, for the contexts of it and of its recomputation; the older path
            has none.
    """
    more: Any = {} if contexts is None else {"context_fn": contexts}

    def recomputed(forward: Callable[..., object], *args: Any, **kwargs: Any) -> object:
        return checkpoint(forward, *args, use_reentrant=False, **more, **kwargs)

    def reentrant(forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        names, values = tuple(kwargs), tuple(kwargs.values())

        def run(_: torch.Tensor, *flat: object) -> object:
            # Keywords are passed as positions: the reentrant form tracks gradients of positions only.
            split = len(flat) - len(names)
            return forward(*flat[:split], **dict(zip(names, flat[split:], strict=True)))

        # Without an input that requires a gradient, the reentrant form would drop the parameters'.
        anchor = torch.empty(0, requires_grad=torch.is_grad_enabled())
        return checkpoint(run, anchor, *args, *values, use_reentrant=True)

    around_forward(module, reentrant if use_reentrant else recomputed)


def offload_activations(module: nn.Module, pin_memory: bool) -> None:
    """Makes a module keep in host memory what its forward saves for the backward. Call it after `recompute`.

    Parameters stay: they are gathered again for the backward.

    Args:
        module: changes in place.
        pin_memory: use page-locked host memory where the device is not a CPU.
    """

    def offloading(forward: Callable[..., object], *args: Any, **kwargs: Any) -> object:
        state = (*module.parameters(), *module.buffers())
        known = {tensor.untyped_storage()._cdata for tensor in state}

        def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
            if tensor.untyped_storage()._cdata in known:
                return tensor.device, tensor
            pins = pin_memory and tensor.device.type != "cpu"
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pins)
            return tensor.device, host.copy_(tensor, non_blocking=pins)

        def unpack(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
            return packed[1].to(packed[0], non_blocking=True)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    around_forward(module, offloading)
