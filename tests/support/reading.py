"""Reads a dataset as the ranks of a run do, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mm_core.contracts import Batch, DataRanks, Randomness
from mm_core.data.loading.loader import MicroBatchLoader
from mm_core.data.loading.sampler import Order
from mm_core.data.loading.seeding import build_split
from mm_core.plugin.registry import get_registry
from mm_core.schema.checking import check_component


def reader(
    dataset: Any, order: Order, steps: range, rank: int = 0, ranks: int = 1, workers: int = 0, seed: int = 0
) -> MicroBatchLoader:
    """The loader of one rank over some steps."""
    return MicroBatchLoader(
        dataset,
        order,
        batch_transform=None,
        rng=Randomness(seed),
        share=DataRanks(rank, ranks),
        steps=steps,
        workers=workers,
        prefetch=2,
        pin_memory=False,
        device_type="cpu",
    )


def read_steps(
    dataset: Any, order: Order, steps: range, ranks: int = 1, workers: int = 0, seed: int = 0
) -> Iterator[list[Batch]]:
    """The micro-batches of all ranks in each step, in the order of the global batch: number m of it is the
    (m // ranks)-th of rank m % ranks."""
    own = [reader(dataset, order, steps, rank, ranks, workers, seed) for rank in range(ranks)]
    loaders = [iter(each) for each in own]
    for _ in steps:
        yield [next(each) for _ in range(own[0].per_step) for each in loaders]


def plain_data(plugin: Path, name: str, **options: object) -> Any:
    """A dataset of a one-file plugin as the loader's mode `base` builds it."""
    registry = get_registry((str(plugin),))
    section = check_component("dataset", {"type": f"local/{name}", **options}, registry, "d")
    return build_split(registry, section, 1, "base", "train")
