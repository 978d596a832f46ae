"""The kinds of adapters, by the tensors of a module: LoRA, LoKr and LoHa.

LoKr: the Kronecker product of two matrices; LoHa: the elementwise product of two products of low rank
(Yeh et al. 2023, https://arxiv.org/abs/2309.14859). Each matrix of a LoKr is whole, or itself of low rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

_LENGTHS = {"lora_magnitude_vector", "dora_scale"}  # of a DoRA's rows: PEFT's, ComfyUI's
_SECOND = {"lokr": ("lokr_w1", "lokr_w2"), "loha": ("hada_w1", "hada_w2")}
PEFT_TYPES = {"lora": "LORA", "lokr": "LOKR", "loha": "LOHA"}
"""Kind -> its name in PEFT's settings."""


def by_module(keys: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Module -> its parts, of pairs of both."""
    found: dict[str, list[str]] = {}
    for module, part in keys:
        found.setdefault(module, []).append(part)
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
    return "lokr_w2" in parts and "lokr_w1_b" not in parts


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
