"""The process's global random generators (random, NumPy, torch on CPU), which users' code draws from.

Unless they are seeded, they depend on earlier draws of the process and differ between ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from mm_core.contracts.randomness import Randomness


def seed_generators(rng: Randomness) -> None:
    """Seeds the process's global random generators from `rng`.

    Each has its own seed: with equal seeds, NumPy and torch would draw the same bits.
    """
    random.seed(rng.seed32("random"))
    np.random.seed(rng.seed32("numpy"))
    # torch.manual_seed takes 100 times as long, and also seeds the generators of accelerators.
    torch.default_generator.manual_seed(rng.seed32("torch"))


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restores the process's global random generators after the block, whatever it draws or seeds."""
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])


@contextmanager
def seeded(rng: Randomness) -> Iterator[None]:
    """Within the block, the process's global random generators are seeded from `rng`, then restored."""
    with generators_kept():
        seed_generators(rng)
        yield
