"""Datasets and DataLoaders of torch as their authors wrote them: the loader's mode `base`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from mm_core.contracts import Dataset, DatasetBase, Randomness, seeded
from mm_core.errors import ContractError
from mm_core.plugin.building import call_target
from mm_core.plugin.checks.contract import object_faults
from mm_core.plugin.checks.places import place_of_object
from mm_core.plugin.registry import Registry
from mm_core.schema.fields import ComponentConfig

_SIZES = ("world", "world_size")
"""Names of a constructor's parameter for the number of shares of the data."""


class PlainSamples(DatasetBase):
    """A map-style dataset of torch, with samples that are plain dicts.

    Args:
        dataset: the author's: `__len__` and `__getitem__`.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The author's sample as it is; the loader checks that it is a dict."""
        sample: dict[str, Any] = self.dataset[index]
        return sample

    def _fault(self, what: str, *, accepted: str, hint: str | None = None) -> ContractError:
        return ContractError(what, where=place_of_object(self.dataset), accepted=accepted, hint=hint)


@dataclass(frozen=True)
class PlainBatches:
    """An IterableDataset or DataLoader of torch. What it yields, and how ranks share it, is its author's.

    Attributes:
        make: called with this rank's share and the number of shares.
        where: its key in the config.
    """

    make: Callable[[int, int], object]
    where: str

    def open(self, share: int, shares: int) -> DataLoader[Any] | IterableDataset[Any]:
        """The loader or dataset for one share of the data.

        Raises:
            ContractError: the target returns anything else.
        """
        found = self.make(share, shares)
        if isinstance(found, DataLoader | IterableDataset):
            return found
        raise ContractError(
            f"{type(found).__name__} takes its share of the data by `rank`, which only an IterableDataset or"
            " a DataLoader needs",
            where=self.where,
            hint="remove `rank` from its constructor: the samples of a Dataset are divided among the ranks",
        )


AnyDataset = Dataset | PlainBatches
"""What `data.train`, `data.validation` and `data.test` name."""


def rows_of(dataset: AnyDataset) -> int | None:
    """Number of samples of a dataset; None where only reading them would show it."""
    return None if isinstance(dataset, PlainBatches) else len(dataset)


def promise_of(dataset: AnyDataset) -> list[str]:
    """What a resume can do with training data that are read as they are, in a sentence; [] for others."""
    if isinstance(dataset, PlainBatches):
        return [
            "data.train is an IterableDataset or DataLoader, read as it is: a resumed run reads its epoch"
            " again and drops the batches before the checkpoint, so it continues exactly if the same batches"
            " come again"
        ]
    if isinstance(dataset, PlainSamples):
        return [
            "data.train is a Dataset, read as it is, in an order of (seed, epoch): a resumed run continues"
            " exactly if a sample depends on its index and the seeded global generators alone"
        ]
    return []


def build_plain(registry: Registry, section: ComponentConfig, seed: int, where: str) -> AnyDataset:
    """Builds the Dataset, IterableDataset or DataLoader of a config section, for the loader's mode `base`.

    Args:
        registry: the run's registry.
        section: the dataset.
        seed: the run's.
        where: the section's key.

    Raises:
        ContractError: it is none of these.
    """
    target = registry.resolve("dataset", section.type).load_target()
    names = set(inspect.signature(target).parameters)
    size = [name for name in _SIZES if name in names]
    divided = "rank" in names and bool(size)

    def make(share: int, shares: int) -> object:
        more = {"rank": share, **dict.fromkeys(size, shares)} if divided else {}
        with seeded(Randomness(seed).at("dataset")):
            return call_target(section, registry, (), more)

    if divided:
        return PlainBatches(make, where)
    found: Any = make(0, 1)
    if isinstance(found, DataLoader | IterableDataset):
        return PlainBatches(lambda share, shares: found, where)
    if not object_faults("dataset", found):
        dataset: Dataset = found
        return dataset
    if all(callable(getattr(type(found), name, None)) for name in ("__len__", "__getitem__")):
        return PlainSamples(found)
    raise ContractError(
        f"{section.type} is a {type(found).__name__}, which torch cannot read",
        where=f"{where}, {place_of_object(found)}",
        accepted="a Dataset with __len__ and __getitem__, an IterableDataset or a DataLoader of torch",
        hint="what only has __iter__ derives from torch.utils.data.IterableDataset",
    )
