"""A dataset whose samples are read from the feature cache, and the batches that it makes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mm_core.contracts import Batch, FeatureBatch, Features, Randomness
from mm_core.data.cache.rows import CacheRows, PartKey, Size, keys_of_texts
from mm_core.data.cache.shards import Keys
from mm_core.data.cache.store import Store
from mm_core.errors import CacheError, ContractError, DataError

FAULT = "fault"
"""The feature of a sample that cannot be read: the reason, UTF-8."""


@dataclass
class PartlyCached(FeatureBatch):
    """A micro-batch of which some features are not cached yet; it is completed on the device.

    Attributes:
        rows: the features of each sample that are cached, by part.
        captions: of each sample.
        keys_of: [B,P], the keys of all its features; zeros for what is not to be added to the cache.
        media: the samples whose media are not cached, as the dataset collates them; None: all are.
        places: their numbers in this batch.
    """

    rows: list[dict[str, Features]]
    captions: list[str]
    keys_of: Keys
    media: Batch | None
    places: list[int]


@dataclass
class CachedSamples:
    """The samples of a dataset from the cache. Satisfies `Dataset` and `SupportsSampleAt`.

    In buckets, `BucketedSamples` reads rows of it.

    Args:
        rows: of the dataset.
        parts: of the features.
        folder: of the cache.
        table: file of the keys [R,V,P]; zeros where nothing is to be cached.
        fills: parts that are encoded in training where they are not cached; of others that is an error.
    """

    rows: CacheRows
    parts: Sequence[PartKey]
    folder: Path
    table: Path
    fills: Collection[str] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def dataset(self) -> Any:
        """The dataset without the cache."""
        return self.rows.dataset

    @cached_property
    def store(self) -> Store:
        """The cache, opened once in each process."""
        return Store(self.folder)

    @cached_property
    def keys(self) -> Keys:
        """The keys [R,V,P], mapped into memory."""
        keys: Keys = np.load(self.table, mmap_mode="r")
        return keys

    @cached_property
    def _fixed(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for part, text in ((each, text) for each in self.parts for text in each.texts):
            (features,) = self.store.get(keys_of_texts(part, [text]))
            if features is None and part.name not in self.fills:
                raise self._gone(repr(text), part.name)
            found[text] = {} if features is None else stacked([{part.name: features}])
        return found

    def _gone(self, what: str, part: str) -> CacheError:
        return CacheError(
            f"the {part} of {what} are no longer in the cache",
            where=str(self.folder),
            hint="`mm cache prune` removes what the configs that it is given do not need: name this run's"
            " config too; run `mm cache build` again",
        )

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.sample_of(int(self.rows.rows_of(0)[index]), None, None)

    def sample_at(self, index: int, rng: Randomness) -> dict[str, Any]:
        """The features of a sample; `rng` is at ("data", epoch, index)."""
        return self.sample_of(int(self.rows.rows_of(int(rng.path[-2]))[index]), None, rng)

    def row_sizes(self) -> Tensor:
        """As those of the dataset."""
        found: Tensor = self.dataset.row_sizes()
        return found

    def epoch_rows(self, epoch: int) -> Tensor:
        """The number of the row of each sample in an epoch."""
        found: Tensor = self.dataset.epoch_rows(epoch)
        return found

    def sample_of(self, row: int, size: Size | None, rng: Randomness | None) -> dict[str, Any]:
        """The features of a row: of the variant that the epoch has its turn of.

        Raises:
            DataError: the row cannot be read.
            CacheError: its features are not cached, and it may not be read.
        """
        variant = int(rng.path[-2]) % self.rows.variants if rng is not None else 0
        keys = np.asarray(self.keys[row, variant])
        if not keys["high"].all():
            self.rows.read(row, variant)  # raises its DataError
            raise DataError("it could not be read when the run started", where=f"row {row}")
        source, found = self.rows.source(row, variant), self.store.get(keys)
        named = zip(self.parts, found, strict=True)
        features = {part.name: entry for part, entry in named if entry is not None}
        for entry in features.values():
            if FAULT in entry:
                raise DataError(bytes(entry[FAULT].tolist()).decode(), where=source.id)
        lacking = [part for part in self.parts if part.name not in features]
        for part in lacking:
            if part.name not in self.fills:
                raise self._gone(source.id, part.name)
        sample = {"id": source.id, "features": features, "caption": source.caption or "", "keys": keys}
        if not all(part.of_text for part in lacking):
            sample["raw"] = self.rows.read(row, variant)
        if lacking:  # what has changed since the start is encoded for this batch alone
            now = self.rows.keys_of([source], self.parts, self.store.hashes)[0]
            sample["keys"] = np.where(now == keys, keys, np.zeros_like(keys))
        return sample

    def collate(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """A `FeatureBatch`; a `PartlyCached` batch if a feature of a sample is not cached."""
        facts = (
            [sample["key"] for sample in samples],
            torch.tensor([sample["weight"] for sample in samples], dtype=torch.float32),
            [sample["id"] for sample in samples],
        )
        if all(len(sample["features"]) == len(self.parts) for sample in samples):
            return FeatureBatch(*facts, stacked([sample["features"] for sample in samples]), self._fixed)
        raw = [place for place, sample in enumerate(samples) if "raw" in sample]
        given = [{**samples[n]["raw"], "key": facts[0][n], "weight": samples[n]["weight"]} for n in raw]
        return PartlyCached(
            *facts,
            {},
            self._fixed,
            rows=[sample["features"] for sample in samples],
            captions=[sample["caption"] for sample in samples],
            keys_of=np.stack([sample["keys"] for sample in samples]),
            media=self.dataset.collate(given) if given else None,
            places=raw,
        )


def stacked(rows: Sequence[Mapping[str, Features]]) -> dict[str, Any]:
    """`part.name` -> the features of all rows, padded at the end with zeros; int64 features as lists."""
    columns = {
        f"{part}.{name}": [row[part][name] for row in rows]
        for part, features in rows[0].items()
        for name in features
    }
    return {name: _column(name, column) for name, column in columns.items()}


def tensor_of(values: Tensor | Sequence[Any]) -> Tensor:
    """A feature of all rows from `stacked` as a tensor; lists are padded like tensors."""
    if isinstance(values, Tensor):
        return values
    return _padded([torch.tensor(each, dtype=torch.int64) for each in values])


def _column(name: str, column: Sequence[Tensor]) -> Any:
    """Texts are padded; clips of several sizes would train on the zeros beside them."""
    if column[0].dtype is torch.int64:
        return [each.tolist() for each in column]
    shapes = {tuple(each.shape) for each in column}
    if len(shapes) > 1 and len({len(shape) for shape in shapes}) == 1 and column[0].dim() > 2:
        shown = " and ".join(str([*each]) for each in sorted(shapes))
        raise ContractError(
            f"a micro-batch would join {name} of the sizes {shown}",
            where="data",
            accepted="samples of one size in a micro-batch",
            hint="data.loader.mode: variable reads each size in micro-batches of its own",
        )
    return _padded(column)


def _padded(column: Sequence[Tensor]) -> Tensor:
    sizes = [max(sizes) for sizes in zip(*(each.shape for each in column), strict=True)]
    if all([*each.shape] == sizes for each in column):
        return torch.stack([*column])
    found = column[0].new_zeros(len(column), *sizes)
    for row, each in zip(found, column, strict=True):
        row[tuple(slice(size) for size in each.shape)] = each
    return found


def on_host(features: Features) -> Features:
    """Features in host memory."""
    return {name: tensor.detach().cpu() for name, tensor in features.items()}
