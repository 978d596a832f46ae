"""Random numbers that depend on their purpose, never on the process that draws them or on the order."""

from __future__ import annotations

import hashlib

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
