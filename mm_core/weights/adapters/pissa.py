"""PiSSA: a LoRA that starts as the principal part of its weight (https://arxiv.org/abs/2404.02948).

PEFT subtracts that part from the weight. Here the weight stays as it is in its files, and a second, frozen
adapter subtracts it: the start. A file of the adapter has both, as one of twice the rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from mm_core.contracts import Randomness, seeded
from mm_core.device.kind import current_device
from mm_core.modules.adapter_layers import adapter_of, part_name
from mm_core.modules.shards import gathered
from mm_core.weights.adapters.files import AdapterScale
from mm_core.weights.formats.key_map import Copy, Shape
from mm_core.weights.streaming import shard_of

_START = "~start"  # no user's name has this
_ROUNDS = {"pissa": None, "pissa_niter_16": 16}


def starts_as_part(init: str) -> bool:
    """Whether an initialisation of an adapter is PiSSA, exact or approximate."""
    return init in _ROUNDS


def start_of(adapter: str) -> str:
    """The name of the frozen adapter with the start of a PiSSA."""
    return f"{adapter}{_START}"


def joined(scales: Mapping[str, Mapping[str, AdapterScale]]) -> dict[str, dict[str, AdapterScale]]:
    """Ranks and scales by adapter and module, each PiSSA and its start as one adapter of twice the rank."""
    return {
        adapter: {name: _twice(scale) for name, scale in held.items()}
        if start_of(adapter) in scales
        else dict(held)
        for adapter, held in scales.items()
        if not adapter.endswith(_START)
    }


def _twice(scale: AdapterScale) -> AdapterScale:
    """Twice the rank, with the same factor."""
    return replace(scale, rank=2 * scale.rank, alpha=scale.alpha * (2**0.5 if scale.rslora else 2))


def principal(weight: Tensor, rank: int, factor: float, init: str) -> tuple[Tensor, Tensor]:
    """lora_A [rank, in] and lora_B [out, rank] of the largest singular values of a weight, as PEFT has them.

    Args:
        weight: [out, in].
        rank: how many singular values.
        factor: the number that multiplies the product of the two.
        init: `pissa`, or `pissa_niter_16` for the approximation by 16 iterations.
    """
    if (rounds := _ROUNDS[init]) is None:
        left, sizes, right = torch.linalg.svd(weight.float(), full_matrices=False)
    else:
        left, sizes, columns = torch.svd_lowrank(weight.float(), rank, niter=rounds)
        right = columns.T
    root = (sizes[:rank] / factor).sqrt()
    return root[:, None] * right[:rank], left[:, :rank] * root


def side_by_side(own: str, start: str, stored: str, shape: Shape) -> dict[str, tuple[Copy, ...]]:
    """The copies of a matrix of a PiSSA and of that of its start, both of `shape`, into one stored matrix."""
    place = adapter_of(own)
    rows = place is not None and place[1] == "lora_A"
    zeros, offset = (0, 0), (shape[0], 0) if rows else (0, shape[1])
    both = (shape[0] + offset[0], shape[1] + offset[1])
    return {
        name: (Copy(name, zeros, shape, stored, both, at),) for name, at in ((own, zeros), (start, offset))
    }


def starts_in(state: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """(module, adapter) of each PiSSA whose start is among a task's tensors."""
    for name in state:
        place = adapter_of(name)
        if place is not None and place[1] == "lora_A" and place[2].endswith(_START):
            yield place[0], place[2].removesuffix(_START)


def fill_start(
    state: Mapping[str, Tensor], module: str, adapter: str, scale: AdapterScale, init: str
) -> None:
    """Fills a PiSSA and its start from the weight below it. A collective if it is sharded.

    Args:
        state: tensors by path in the task, with the weight.
        module: path of the adapted module.
        adapter: its name.
        scale: its rank and scale.
        init: see `principal`.
    """
    weight = gathered(state[f"{module}.base_layer.weight"]).to(current_device())
    with seeded(Randomness(0).at("pissa", module)):
        pair = principal(weight, scale.rank, scale.factor, init)
    for part, values in zip(("lora_A", "lora_B"), pair, strict=True):
        for name, sign in ((adapter, 1), (start_of(adapter), 1 if part == "lora_A" else -1)):
            share, box = shard_of(state[part_name(module, part, name)])
            share.copy_(values[box] * sign)
