"""Bytes of the model states of a run for each ZeRO stage, from numbers of elements alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LAYOUTS = (
    ("stage 0", 0, False, False),
    ("stage 1", 1, False, False),
    ("stage 2", 2, False, False),
    ("stage 2, optimizer on the host", 2, True, False),
    ("stage 3", 3, False, False),
    ("stage 3, optimizer on the host", 3, True, False),
    ("stage 3, all on the host", 3, True, True),
)
"""Name, ZeRO stage, and whether the optimizer and the parameters are in host memory."""


@dataclass(frozen=True)
class StageBytes:
    """Bytes of a rank's parameters, gradients and optimizer state in one ZeRO stage, between steps."""

    layout: str
    fp32_device: int
    fp32_host: int
    bf16_device: int  # with fp32 master weights and gradients
    bf16_host: int


def model_states(trained: int, frozen: int, states: float, world: int) -> tuple[StageBytes, ...]:
    """The bytes of the model states of a run, per rank, for each of `LAYOUTS`.

    In bf16 the gradients are accumulated in fp32. A host that keeps the optimizer keeps the gradients too.

    Args:
        trained: number of elements that the optimizer changes.
        frozen: number of other elements in the trained modules, which are parameters only.
        states: the optimizer's fp32 tensors per trained parameter, without a master copy.
        world: number of ranks that share the states.
    """

    def of(stage: int, optimizer: bool, parameters: bool, width: int, master: int) -> tuple[int, int]:
        def piece(size: float, from_stage: int) -> int:
            return math.ceil(size / (world if stage >= from_stage else 1))

        weights = piece(width * (trained + frozen), 3)
        rest = piece(4 * trained, 2) + piece((master + 4 * states) * trained, 1)
        host = weights * parameters + rest * optimizer
        return weights + rest - host, host

    return tuple(
        StageBytes(name, *of(stage, optimizer, parameters, 4, 0), *of(stage, optimizer, parameters, 2, 4))
        for name, stage, optimizer, parameters in LAYOUTS
    )


def table(rows: Sequence[StageBytes]) -> list[str]:
    """The model states of a run as text, in GiB, one line a ZeRO stage."""
    width = max(len(row.layout) for row in rows)
    sizes = [(r.layout, r.fp32_device, r.fp32_host, r.bf16_device, r.bf16_host) for r in rows]
    return [
        "model states per rank by ZeRO stage, in GiB",
        f"  {'':<{width}}  {'fp32':>10} {'on host':>10} {'bf16':>10} {'on host':>10}",
        *(f"  {name:<{width}}  " + " ".join(f"{n / 2**30:>10.4f}" for n in n_s) for name, *n_s in sizes),
    ]
