"""States of small checkpoints, to save, to load into, and to compare."""

from __future__ import annotations

import pytest
import torch

from support.checkpoints import make_state


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
