"""Random numbers that depend on their purpose, never on the process that draws them or on the order.

The process's global generators (random, NumPy, torch on CPU), which users' code draws from, depend on earlier
draws of the process and differ between ranks unless they are seeded.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

Key = int | str


class Randomness:
    """A node in a tree of random seeds: `Randomness(1234).at("noise", epoch, index)`.

    Every generator is derived from the path of keys to its node, so that a sample has the same noise at any
    number of ranks, accumulation or number of workers, and after a resume.
    """

    def __init__(self, seed: int, path: tuple[Key, ...] = ()) -> None:
        self.seed = seed
        self.path = path

    def at(self, *keys: Key) -> Randomness:
        """The node below this node of the seed tree along `keys`."""
        return Randomness(self.seed, (*self.path, *keys))

    def seed32(self, *keys: Key) -> int:
        """The random seed of the node along `keys`: 32 bits, as CPU generators use no more."""
        text = repr((self.seed, *self.path, *keys)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")

    def generator(self, *keys: Key) -> torch.Generator:
        """A new random generator on the CPU, seeded for the node along `keys`."""
        generator = torch.Generator(device="cpu")
        generator.manual_seed(self.seed32(*keys))
        return generator

    def normal(self, shape: tuple[int, ...], *keys: Key) -> torch.Tensor:
        """Standard normal float32 noise of a shape on the CPU, drawn at the node along `keys`."""
        return torch.randn(shape, generator=self.generator(*keys))

    def uniform(self, *keys: Key) -> float:
        """A uniform random number in [0, 1), drawn at the node along `keys`."""
        return float(torch.rand((), generator=self.generator(*keys)))


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
