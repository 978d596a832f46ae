"""The process's own generators (random, NumPy's, torch's on CPU), which code of users draws from.

Left alone, they depend on what the process has drawn before, and differ over ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from mm_core.contracts.randomness import Randomness


def seed_generators(rng: Randomness) -> None:
    """Begins all three at the node `rng`, each at a seed of its own: equal seeds would make NumPy's and
    torch's draw the same bits."""
    random.seed(rng.seed32("random"))
    np.random.seed(rng.seed32("numpy"))
    # torch.manual_seed takes 100 times as long, and also reaches for the generators of accelerators.
    torch.default_generator.manual_seed(rng.seed32("torch"))


@contextmanager
def generators_kept() -> Iterator[None]:
    """Whatever the block draws or seeds, and however it ends, the generators then go on as before it."""
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])


@contextmanager
def seeded(rng: Randomness) -> Iterator[None]:
    """The block draws from generators that begin at the node `rng`; afterwards they go on as before it."""
    with generators_kept():
        seed_generators(rng)
        yield
