"""Random numbers that depend on what they are for, never on who draws them or in which order."""

from __future__ import annotations

import hashlib

import torch

Key = int | str


class Randomness:
    """A node of a tree of seeds: `Randomness(1234).at("noise", epoch, index)`.

    Every generator is derived from the path of keys that leads to it, so that the same sample gets
    the same noise at any world size, accumulation, worker count, or after a resume.
    """

    def __init__(self, seed: int, path: tuple[Key, ...] = ()) -> None:
        self.seed = seed
        self.path = path

    def at(self, *keys: Key) -> Randomness:
        """The node below this one along `keys`."""
        return Randomness(self.seed, (*self.path, *keys))

    def seed32(self, *keys: Key) -> int:
        """The seed of the node along `keys`: 32 bits, which is all that CPU generators use."""
        text = repr((self.seed, *self.path, *keys)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")

    def generator(self, *keys: Key) -> torch.Generator:
        """A fresh CPU generator for the node along `keys`."""
        generator = torch.Generator(device="cpu")
        generator.manual_seed(self.seed32(*keys))
        return generator

    def normal(self, shape: tuple[int, ...], *keys: Key) -> torch.Tensor:
        """Standard normal float32 noise of `shape` on CPU, drawn at the node along `keys`."""
        return torch.randn(shape, generator=self.generator(*keys))

    def uniform(self, *keys: Key) -> float:
        """One number in [0, 1), drawn at the node along `keys`."""
        return float(torch.rand((), generator=self.generator(*keys)))
