"""The kinds of adapters, by the tensors of a module: LoRA, LoKr and LoHa.

LoKr: the Kronecker product of two matrices; LoHa: the elementwise product of two products of low rank
(Yeh et al. 2023, https://arxiv.org/abs/2309.14859). Each matrix of a LoKr is whole, or itself of low rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import isqrt

import torch
from torch import Tensor

from mm_core.errors import ContractError
from mm_core.weights.formats.key_map import Shape

_LENGTHS = {"lora_magnitude_vector", "dora_scale"}  # of a DoRA's rows: PEFT's, ComfyUI's
_SECOND = {"lokr": ("lokr_w1", "lokr_w2"), "loha": ("hada_w1", "hada_w2")}
PEFT_TYPES = {"lora": "LORA", "lokr": "LOKR", "loha": "LOHA"}
"""Kind -> its name in PEFT's settings."""

Blocks = tuple[int, int, int, int]
"""The sizes of a LoKr's two matrices: rows and columns of the first, then of the second."""


def by_module(
    keys: Mapping[tuple[str, str], str], shapes: Mapping[str, Shape]
) -> dict[str, dict[str, Shape]]:
    """Module -> its parts and their shapes.

    Args:
        keys: (module, part) -> stored name.
        shapes: stored name -> shape.
    """
    found: dict[str, dict[str, Shape]] = {}
    for (module, part), name in keys.items():
        found.setdefault(module, {})[part] = shapes[name]
    return found


def kind_of(parts: Collection[str]) -> str | None:
    """The kind of an adapter that has exactly what it needs among `parts`; None for none."""
    held = set(parts)
    if held - _LENGTHS == {"lora_A", "lora_B"} and not held >= _LENGTHS:
        return "lora"
    if held == {p for name in _SECOND["lokr"] for p in _whole_or_two(name, held)}:
        return "lokr"
    return "loha" if held == {f"{name}_{end}" for name in _SECOND["loha"] for end in "ab"} else None


def _whole_or_two(name: str, held: Collection[str]) -> tuple[str, ...]:
    return (name,) if name in held else (f"{name}_a", f"{name}_b")


def is_whole(parts: Collection[str]) -> bool:
    """Whether a LoKr has two whole matrices: it has no rank, and other programs scale it by 1."""
    return {"lokr_w1", "lokr_w2"} <= set(parts)


def split(size: int, factor: int | None, ordered: bool = True) -> tuple[int, int]:
    """A size as the product of two, by the rule of LyCORIS and PEFT.

    Args:
        size: rows or columns of a weight.
        factor: one of the two if it divides `size`; else the first is at most as large. None: the two are
            as near as possible.
        ordered: the smaller comes first, as in LyCORIS; False: `factor` comes first, as in PEFT.
    """
    if factor is not None and size % factor == 0:
        pair = (factor, size // factor)
        return (min(pair), max(pair)) if ordered else pair
    most = min(isqrt(size), factor or size)
    first = next(number for number in range(most, 0, -1) if size % number == 0)
    return first, size // first


def blocks_of(rows: int, columns: int, factor: int | None, ordered: bool = True) -> Blocks:
    """The sizes of the two matrices of a weight's LoKr; see `split`."""
    (a, c), (b, d) = split(rows, factor, ordered), split(columns, factor, ordered)
    return a, b, c, d


def blocks_in(shapes: Mapping[str, Sequence[int]]) -> Blocks:
    """The sizes of a LoKr's two matrices, by the shapes of its parts."""
    (a, b), (c, d) = (
        shapes[name] if name in shapes else (shapes[f"{name}_a"][0], shapes[f"{name}_b"][1])
        for name in _SECOND["lokr"]
    )
    return a, b, c, d


def weight_of(shapes: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    """The shape of the weight that a module's adapter changes, by the shapes of its parts."""
    if "lora_A" in shapes:
        return shapes["lora_B"][0], shapes["lora_A"][1]
    if "hada_w1_a" in shapes:
        return shapes["hada_w1_a"][0], shapes["hada_w1_b"][1]
    a, b, c, d = blocks_in(shapes)
    return a * c, b * d


def factor_of(blocks: Iterable[Blocks], ordered: bool = True) -> int | None:
    """The factor that splits all weights so; None for the nearest pairs.

    Raises:
        ValueError: no single factor does.
    """
    given = set(blocks)
    for factor in (None, *sorted({size for a, b, _, _ in given for size in (a, b)})):
        if all((a, b, c, d) == blocks_of(a * c, b * d, factor, ordered) for a, b, c, d in given):
            return factor
    raise ValueError("no factor")


def rank_of(shapes: Mapping[str, Sequence[int]]) -> int:
    """The rank of a module's adapter, by its parts' shapes; PEFT keeps a whole second matrix of a LoKr whole
    with this one."""
    if "lokr_w2" in shapes:
        return max(shapes["lokr_w2"])
    return next(
        shape[0]
        for part, shape in shapes.items()
        if part == "lora_A" or (part.endswith("_b") and part != "lokr_w1_b")
    )


def peft_factor(blocks: Iterable[Blocks]) -> int:
    """The factor of an adapter's LoKrs in PEFT's config, which has one for all modules."""
    try:
        return factor_of(blocks, ordered=False) or -1
    except ValueError:
        raise ContractError(
            "this LoKr splits its weights in a way that PEFT does not have: one decompose_factor for all",
            accepted="lora/comfyui, lora/kohya",
            hint="export in one of these, or merged weights (--merge-lora)",
        ) from None


def change_of(parts: Mapping[str, Tensor]) -> Tensor:
    """The change [out, in] of a weight by an adapter's tensors, in float32, before it is scaled."""
    held = {part: tensor.float() for part, tensor in parts.items()}
    if "lora_A" in held:
        return held["lora_B"] @ held["lora_A"]
    kind = "loha" if "hada_w1_a" in held else "lokr"
    one, two = (
        held[name] if name in held else held[f"{name}_a"] @ held[f"{name}_b"] for name in _SECOND[kind]
    )
    return torch.kron(one, two) if kind == "lokr" else one * two
