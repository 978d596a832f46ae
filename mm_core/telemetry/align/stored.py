"""Tensors that `mm align record --modules` has stored, compared element by element."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from mm_core.weights.stored import load_tensors

_RAW = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def elements(one: Path, other: Path) -> str:
    """A sentence about two stored tensors: cosine, largest relative difference, and steps between numbers.

    Args:
        one: file of the first record.
        other: of the second, with a tensor of the same shape.
    """
    a, b = (cast(Tensor, load_tensors(path)) for path in (one, other))
    a, b = (torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in (a, b))
    x, y = a.double().reshape(-1), b.double().reshape(-1)
    apart = (x - y).abs()
    at = int(apart.argmax())
    cosine = float(torch.nn.functional.cosine_similarity(x, y, 0))
    relative = float((apart / torch.maximum(x.abs(), y.abs()).clamp(min=1e-30)).max())
    text = f"elements: 1 - cosine {1 - cosine:.2g}, largest relative difference {relative:.2g}"
    if a.dtype == b.dtype and a.is_floating_point() and a.element_size() in _RAW:
        text += f", largest distance {int((_rank(a) - _rank(b)).abs().max()):,} ULP"
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), a.shape))
    return f"{text}; the largest at {list(place)}: {float(x[at]):.7g} and {float(y[at]):.7g}"


def _rank(tensor: Tensor) -> Tensor:
    """The position of each number among all numbers of its dtype, int64 [n]."""
    raw = tensor.reshape(-1).view(_RAW[tensor.element_size()])
    flipped = torch.iinfo(raw.dtype).min - raw.long()
    return torch.where(raw < 0, flipped, raw.long())
