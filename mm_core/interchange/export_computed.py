"""The tensors of LoRA files that are not tensors of the checkpoint: scales, and LoRAs of joined modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mm_core.errors import ContractError
from mm_core.weights.adapters.files import AdapterScale
from mm_core.weights.adapters.stored_names import Share, module_key, path_key
from mm_core.weights.formats.format import AdapterLayout
from mm_core.weights.writing import TensorSpec

Read = Callable[[str, str], Tensor]
"""Returns a matrix of an adapter, by module and part."""


@dataclass(frozen=True)
class Computed:
    """A tensor of a file that differs from all of the checkpoint's; `name` is that in the component."""

    spec: TensorSpec
    make: Callable[[], Tensor]
    name: str = ""


def alphas(
    tensors: Sequence[TensorSpec], layout: AdapterLayout, scales: Mapping[str, AdapterScale]
) -> dict[str, Computed]:
    """The tensors `alpha` of a layout; only kohya's needs those of scale 1.

    That of a whole LoKr is what LyCORIS and musubi-tuner take for its rank, so that they scale it by 1.

    Args:
        tensors: the others of the file.
        layout: its layout.
        scales: of the modules that have an own LoRA in the file.
    """
    shapes = {spec.name: spec.shape for spec in tensors}
    found: dict[str, Computed] = {}
    for module, scale in scales.items() if layout.alphas else ():
        key = module_key(layout, module)
        alpha = scale.factor * scale.rank
        if whole := shapes.get(f"{key}.lokr_w2"):
            if scale.factor != 1:
                raise ContractError(
                    f"the LoKr of {module} has two whole matrices, which other programs scale by 1, but its"
                    f" scale is {scale.factor:g}",
                    hint="train with a lower rank, or with alpha equal to rank; or export lora/peft",
                )
            alpha = float(max(whole))
        if layout.flat or scale.factor != 1:
            found |= alpha_of(key, alpha)
    return found


def alpha_of(key: str, alpha: float) -> dict[str, Computed]:
    """The tensor `alpha` of a module with this name in a file."""
    spec = TensorSpec(f"{key}.alpha", torch.float32, ())
    return {spec.name: Computed(spec, partial(torch.tensor, alpha))}


def joined_loras(
    layout: AdapterLayout,
    scales: Mapping[str, AdapterScale],
    shares: Mapping[str, Share],
    first: Callable[[str], TensorSpec],
    read: Read,
) -> dict[str, Computed]:
    """The LoRAs of modules that hold several of a component's: first matrices below each other, and second
    ones side by side, each in its rows, with zeros in the others.

    Args:
        layout: of the file.
        scales: rank and scale of the adapted modules.
        shares: the modules that the file joins.
        first: returns a module's first matrix in the checkpoint.
        read: reads a matrix.

    Raises:
        ContractError: an adapter of another kind than a plain LoRA.
    """
    found: dict[str, Computed] = {}
    groups: dict[str, dict[str, float]] = {}
    for path, scale in scales.items():
        if path in shares:
            groups.setdefault(shares[path].stored, {})[path] = scale.factor
            if scale.kind != "lora" or scale.dora:
                raise ContractError(
                    f"the adapter of {path} is no plain LoRA, and this layout joins the module with others",
                    hint="export in another layout, or merged weights (--merge-lora)",
                )
    for stored, factors in groups.items():
        key, factor = path_key(layout, stored), next(iter(factors.values()))
        rank, path = sum(scales[path].rank for path in factors), next(iter(factors))
        kind, columns = first(path).dtype, first(path).shape[1]
        names = [f"{key}.{name}.weight" for name in layout.factors]
        sizes = (rank, columns), (shares[path].total, rank)
        makes = partial(_stacked, [*factors], read), partial(_spread, factors, shares, read)
        for name, size, make in zip(names, sizes, makes, strict=True):
            found[name] = Computed(TensorSpec(name, kind, size), make, path)
        if layout.flat or factor != 1:
            found |= alpha_of(key, factor * rank)
    return found


def _stacked(paths: Sequence[str], read: Read) -> Tensor:
    """The first matrices of modules below each other: [all ranks, in]."""
    return torch.cat([read(path, "lora_A") for path in paths])


def _spread(factors: Mapping[str, float], shares: Mapping[str, Share], read: Read) -> Tensor:
    """The second matrices of modules, each in its rows of the joined weight: [rows, all ranks].

    They are scaled by their factor over that of the first, which is the factor of the file.
    """
    columns, usual = [], next(iter(factors.values()))
    for path, factor in factors.items():
        own, rows = read(path, "lora_B") * (factor / usual), shares[path].rows
        columns.append(F.pad(own, (0, 0, rows.start, shares[path].total - rows.stop)))
    return torch.cat(columns, 1)
