"""What the checks do with tensors: fill those of a new module, and compare results."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mm_core.contracts import Randomness
from mm_core.errors import ContractError, MMError, some
from mm_core.modules.initialise import initialise
from mm_core.modules.tying import tie, tied_names


def fill(module: nn.Module, name: str, place: str, seed: int = 0, times: int = 1) -> None:
    """Gives a module on meta memory on the CPU, and initialises it as the engine does.

    Memory is filled with NaN first, so that values that are not initialised show.

    Args:
        module: the module.
        name: its path in the task.
        place: names it in errors.
        seed: of the initial weights.
        times: how often it is initialised.
    """
    tied = tied_names(module)
    module.to_empty(device="cpu")
    tie(module, tied)
    try:
        for _ in range(times):
            initialise(module, name, Randomness(seed))
    except MMError as fault:  # without the place of the class
        where = place if fault.where == name else fault.where
        raise ContractError(fault.what, where=where, accepted=fault.accepted, hint=fault.hint) from fault


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and all buffers of a module, by name."""
    return dict([*module.named_parameters(), *module.named_buffers()])


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest value."""
    if found.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    largest = wanted.double().abs().max().clamp(min=1e-12)
    return float((found.double() - wanted.double()).abs().max() / largest)


def tolerance(tensor: Tensor) -> float:
    """How far results of a dtype may differ that are computed in other batches."""
    return 1e-4 if tensor.dtype in (torch.float32, torch.float64) else 5e-2


def expect_close(
    probe: Any, found: Tensor, wanted: Tensor, what: str, hint: str | None = None, most: float | None = None
) -> None:
    """Expects two results that are computed otherwise to differ by rounding alone.

    Args:
        probe: the component's.
        found: one result.
        wanted: the other.
        what: what is wrong if they differ, for the ContractError.
        hint: what to do next.
        most: the largest relative difference; None: that of the dtype.
    """
    error, most = distance(found, wanted), tolerance(wanted) if most is None else most
    probe.expect(error <= most, f"{what} by {error:.1e}", accepted=f"at most {most:g}", hint=hint)


def expect_gradients(probe: Any, trained: Mapping[str, nn.Parameter], of: str) -> None:
    """Expects a finite gradient of each trained parameter.

    Args:
        probe: the component's.
        trained: the parameters, by name.
        of: what was differentiated, for the ContractError.
    """
    lost = [name for name, parameter in trained.items() if parameter.grad is None]
    probe.expect(
        trained and not lost,
        f"the {of} does not depend on {names(lost)}" if trained else "no parameter is trained",
        accepted="a gradient for each parameter with requires_grad",
        hint=f"compute the {of} from the parameters by differentiable functions (no `.data`, `.detach()`,"
        " `.item()`), and freeze what it does not need: `module.requires_grad_(False)`",
    )
    bad = [name for name, p in trained.items() if p.grad is not None and not p.grad.isfinite().all()]
    hint = "mind square roots and norms of zero, and divisions"
    probe.expect(not bad, f"gradients are not finite: {names(bad)}", hint=hint)


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that are not equal bit for bit, or that only one of the two has."""
    return [
        name
        for name in dict.fromkeys([*one, *other])
        if name not in one or name not in other or bits_differ(one[name], other[name])
    ]


def bits_differ(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ in any bit, or in their dtype."""
    return one.dtype != other.dtype or not torch.equal(one, other)


def names(found: Collection[str]) -> str:
    """Some names, for a message."""
    return some(sorted(found), 4)
