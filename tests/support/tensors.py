"""Gathers sharded tensors, reads tensors from files, and compares them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from mm_core.contracts import Shard


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the unsharded tensor. A collective if there are several shards."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def all_whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: whole(tensor) for name, tensor in tensors.items()}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    """Asserts that names, dtypes and all bits are equal."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files."""
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    """Asserts that two results differ only by rounding."""
    assert (one - other).abs().max() < 1e-5 * max(1.0, float(other.abs().max()))


def shards_of(parameters: Mapping[str, nn.Parameter]) -> Callable[[], Iterator[Shard]]:
    """`Engine.shards` of plain parameters, of which each rank has all."""
    return lambda: (Shard(n, p.detach(), tuple(p.shape)) for n, p in parameters.items() if p.requires_grad)
