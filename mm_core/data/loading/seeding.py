"""Seeding of the process's own generators for the constructors of datasets.

By default torch's DataLoader seeds them from the worker's number: every rank would draw the same numbers
whatever run.seed is, and a resumed run would draw from the start again.
"""

from __future__ import annotations

from typing import Literal

from mm_core.contracts import Dataset, Randomness, seeded
from mm_core.data.loading.plain import AnyDataset, build_plain
from mm_core.plugin.registry import Registry
from mm_core.schema.fields import ComponentConfig


def build_split(
    registry: Registry,
    section: ComponentConfig,
    seed: int,
    mode: Literal["sampler", "variable", "base"],
    split: str,
) -> AnyDataset:
    """Builds the dataset of the section `split` of `data`, as the loader's mode reads it."""
    if mode == "base":
        return build_plain(registry, section, seed, f"data.{split}")
    return build_dataset(registry, section, seed)


def build_dataset(registry: Registry, section: ComponentConfig, seed: int) -> Dataset:
    """Builds the dataset of a config section; random draws of its constructor depend on `seed` alone.

    All ranks, every resume, and the training, validation and test datasets draw the same numbers: if their
    constructors shuffle the same files and take different parts, these parts have no file in common.

    Args:
        registry: the run's registry.
        section: `data.train`, `data.validation` or `data.test`.
        seed: the run's.
    """
    with seeded(Randomness(seed).at("dataset")):
        dataset: Dataset = registry.build("dataset", section)
    return dataset
