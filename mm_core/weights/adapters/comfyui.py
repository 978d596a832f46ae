"""What ComfyUI's loader has beside plain factors: additions to the model's tensors, and `dora_scale`.

As in comfy/lora.py (`load_lora`, `calculate_weight`, commit 17358c8) and comfy/weight_adapter
(base.py `weight_decompose`, commit 9c0cf36; lora.py) of https://github.com/comfyanonymous/ComfyUI.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from mm_core.errors import some
from mm_core.weights.formats.format import StoredTensors

ADDED = re.compile(r"(?P<module>.+)\.(?P<part>diff|diff_b|diff_m|w_norm|b_norm)\Z")
TARGETS = {"diff": "weight", "w_norm": "weight", "diff_b": "bias", "b_norm": "bias", "diff_m": "modulation"}
"""Additions to a module's own tensors, also in LyCORIS's names of those to norms."""
_BIAS = re.compile(r".+\.(lora_B|lora_up)(\.(?!bias\Z)[\w-]+)?\.bias\Z")
_APPLY_BIAS = ("base_model.model.", "transformer")  # names of PEFT and Diffusers, which compute with it


def leaves_out(name: str, start: str) -> bool:
    """Whether a stored tensor is the bias of a second factor, which ComfyUI does not load."""
    return not start.startswith(_APPLY_BIAS) and _BIAS.match(name) is not None


def is_pair(parts: Mapping[str, Sequence[int]]) -> bool:
    """Whether a module's parts are factors of a convolution, [rank, in, *kernel] and [out, rank, 1, ...]."""
    if parts.keys() != {"lora_A", "lora_B"} or len(parts["lora_A"]) < 3:
        return False
    first, second = parts["lora_A"], parts["lora_B"]
    return second[1] == first[0] and prod(second) == second[0] * second[1]


def replaced(keys: Iterable[tuple[str, str]], added: Iterable[str]) -> set[str]:
    """The modules with an adapter and an addition to the same weight: ComfyUI applies the addition only."""
    held = set(added)
    return {module for module, _ in keys if f"{module}.weight" in held}


def notes_on(left: Sequence[str], dropped: Iterable[str], added: Mapping[str, str]) -> tuple[str, ...]:
    """Sentences for the log on what ComfyUI applies in another way than the file's names suggest."""
    found = {
        "left out {}, which ComfyUI does not load": (left, "bias of a factor", "biases of factors"),
        "{}: only the diff is applied, as in ComfyUI": (
            sorted(dropped), "weight with an adapter and a diff", "weights with an adapter and a diff",
        ),
        "applied {}, which ComfyUI itself skips": (
            [name for name in added.values() if name.endswith(".diff_m")], "diff_m", "diff_m",
        ),
    }  # fmt: skip
    return tuple(
        f"{sentence.format(f'{len(names)} {one if len(names) == 1 else more}')}: {some(names, 3)}"
        for sentence, (names, one, more) in found.items()
        if names
    )


def product(stored: StoredTensors, keys: tuple[str, str], box: tuple[slice, ...]) -> Tensor:
    """A box of the change [out, in, *kernel] of a convolution's weight, unscaled.

    Args:
        stored: the file.
        keys: names of the first and second factor.
        box: the box in the weight.
    """
    first, second = (stored.shapes[key] for key in keys)
    down = stored.read(keys[0], tuple(slice(0, size) for size in first)).float()
    up = stored.read(keys[1], (box[0], *(slice(0, size) for size in second[1:]))).float()
    change = (up.flatten(1) @ down.flatten(1)).reshape(len(up), *first[1:])
    return change[(slice(None), *box[1:])]


def dora_scale(magnitude: Tensor, weight: Tensor, change: Tensor) -> Tensor:
    """The `dora_scale` [out, 1] with which ComfyUI computes what a DoRA computes.

    A DoRA is m (W + D) / |W + D|, by rows; ComfyUI multiplies W + D by dora_scale / (|W| + eps).

    Args:
        magnitude: m [out].
        weight: W [out, in].
        change: D [out, in], scaled.
    """
    return (magnitude / _ratio(weight, change)).float()[:, None]


def magnitude_of(scale: Tensor, weight: Tensor, change: Tensor) -> Tensor:
    """The inverse of `dora_scale`: a DoRA's magnitudes [out]."""
    return (scale[:, 0] * _ratio(weight, change)).float()


def _ratio(weight: Tensor, change: Tensor) -> Tensor:
    """|W + D| / (|W| + eps) of each row [out], in float64: its rounding comes on top of the file's."""
    whole = weight.double()
    lengths: Tensor = torch.linalg.vector_norm(whole, dim=1) + torch.finfo(torch.float32).eps
    changed: Tensor = torch.linalg.vector_norm(whole + change, dim=1)
    return changed / lengths
