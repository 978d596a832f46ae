"""Checkpoints small enough to read, of odd shapes: empty shards, scalars, two dtypes."""

from __future__ import annotations

import pytest
import torch


def make_state(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "model": {
            "blocks.0.weight": draw(7, 5),
            "blocks.0.bias": draw(1),
            "head": draw(4, 3, dtype=torch.bfloat16),
        },
        "optimizer": {"blocks.0.weight.exp_avg": draw(7, 5), "blocks.0.weight.step": torch.tensor(12.0)},
    }


@pytest.fixture
def state():
    return make_state()


@pytest.fixture
def empty():
    """Tensors like `state`'s, of other values."""
    return {
        part: {k: torch.full_like(v, 9.0) for k, v in named.items()} for part, named in make_state().items()
    }


@pytest.fixture
def same():
    def compare(left, right) -> None:
        assert left.keys() == right.keys()
        for part in left:
            assert left[part].keys() == right[part].keys()
            for name, tensor in left[part].items():
                assert torch.equal(tensor, right[part][name]), name

    return compare
