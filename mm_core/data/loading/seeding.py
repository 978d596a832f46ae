"""What datasets of users draw, from the process's own generators.

Left alone, torch's DataLoader seeds them by the worker's number: every rank draws the same, whatever run.seed
is, and a resumed run draws from the start again.
"""

from __future__ import annotations

from mm_core.contracts import Dataset, Randomness, seeded
from mm_core.plugin.registry import Registry
from mm_core.schema.fields import ComponentConfig


def build_dataset(registry: Registry, section: ComponentConfig, seed: int) -> Dataset:
    """The dataset that a section of the config names; what its constructor draws depends on `seed` alone.

    All ranks and every resume draw the same there, and so do the training, validation and test datasets: a
    constructor that shuffles the same files and takes a part of them takes parts that share none.

    Args:
        registry: of the run. section: `data.train`, `data.validation` or `data.test`.
        seed: the run's.
    """
    with seeded(Randomness(seed).at("dataset")):
        dataset: Dataset = registry.build("dataset", section)
    return dataset
