"""A dataset whose samples are read from the feature cache, and the batches that it makes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mm_core.contracts import Batch, FailureRecord, FeatureBatch, Features, Randomness, SampleKey
from mm_core.data.cache.rows import CacheRows, PartKey, Size
from mm_core.data.cache.shards import Keys
from mm_core.data.cache.store import Store
from mm_core.errors import CacheError, ContractError, DataError

FAULT = "fault"
"""The feature of a sample that cannot be read: the reason, UTF-8."""

_PATIENCE = 2.0  # seconds between two looks for entries that other processes have added


@dataclass
class PartlyCached(FeatureBatch):
    """A micro-batch of which some features are not cached yet; it is completed on the device.

    Attributes:
        rows: the features of each sample that are cached, by part.
        captions: of each sample.
        keys_of: [B,P], the keys of all its features.
        media: the samples whose media are not cached, as the dataset collates them; None: all are.
        places: their numbers in this batch.
    """

    rows: list[dict[str, Features]]
    captions: list[str | None]
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
        table: file of the keys [R,V,P].
        texts: of the texts that every batch needs, their keys.
        fills: whether a sample that is not cached is read, and encoded in training; else it is an error.
    """

    rows: CacheRows
    parts: Sequence[PartKey]
    folder: Path
    table: Path
    texts: Mapping[str, Keys]
    fills: bool = False
    _store: Store | None = field(default=None, init=False, repr=False)
    _table: Keys | None = field(default=None, init=False, repr=False)
    _fixed: dict[str, dict[str, Any]] | None = field(default=None, init=False, repr=False)
    _looked: float = field(default=0.0, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None, "_table": None, "_fixed": None}

    @property
    def dataset(self) -> Any:
        """The dataset without the cache."""
        return self.rows.dataset

    @property
    def store(self) -> Store:
        """The cache, opened once in each process."""
        if self._store is None:
            self._store = Store(self.folder)
        return self._store

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
        if self._table is None:
            self._table = np.load(self.table, mmap_mode="r")
        keys = np.asarray(self._table[row, variant])
        if not keys["high"].any():
            self.rows.read(row, variant)  # raises its DataError
            raise DataError("it could not be read when the run started", where=f"row {row}")
        source = self.rows.source(row, variant)
        places = self._find(keys)
        found: dict[str, Features] = {}
        for part, place, key in zip(self.parts, places.tolist(), keys, strict=True):
            if place >= 0:
                found[part.name] = features = self.store.read(place)
                if FAULT in features:
                    raise DataError(bytes(features[FAULT].tolist()).decode(), where=source.id)
            elif not self.fills:
                raise _gone(self.folder, source.id, part.name)
            elif not key["high"]:
                continue
        sample = {"id": source.id, "features": found, "caption": source.caption, "keys": keys}
        if any(part.name not in found and not part.of_text for part in self.parts):
            sample["raw"] = self.rows.read(row, variant)
        return sample

    def _find(self, keys: Keys) -> np.ndarray[Any, np.dtype[np.int64]]:
        places = self.store.find(keys)
        if (places < 0).any() and time.monotonic() - self._looked > _PATIENCE:
            self._looked = time.monotonic()
            if self.store.refresh():
                places = self.store.find(keys)
        return places

    def collate(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """A `FeatureBatch`; a `PartlyCached` batch if a feature of a sample is not cached."""
        facts = (
            [sample["key"] for sample in samples],
            torch.tensor([sample["weight"] for sample in samples], dtype=torch.float32),
            [sample["id"] for sample in samples],
        )
        if self._fixed is None:
            self._fixed = {text: self._fixed_text(text, keys) for text, keys in self.texts.items()}
        if all(len(sample["features"]) == len(self.parts) for sample in samples):
            return joined(*facts, [sample["features"] for sample in samples], self._fixed)
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

    def _fixed_text(self, text: str, keys: Keys) -> dict[str, Any]:
        (part,) = (part.name for part in self.parts if part.of_text)
        place = int(self.store.find(keys)[0])
        if place < 0 and self.fills:
            return {}
        if place < 0:
            raise _gone(self.folder, repr(text), part)
        return stacked([{part: self.store.read(place)}])


def _gone(folder: Path, what: str, part: str) -> CacheError:
    return CacheError(
        f"the {part} of {what} are no longer in the cache",
        where=str(folder),
        hint="was it pruned while this run was training? run `mm cache build` again",
    )


def joined(
    keys: list[SampleKey],
    weights: Tensor,
    ids: list[str],
    rows: Sequence[Mapping[str, Features]],
    texts: dict[str, dict[str, Any]],
    failures: Sequence[FailureRecord] = (),
) -> FeatureBatch:
    """A batch of samples whose features are all there."""
    return FeatureBatch(keys, weights, ids, stacked(rows), texts, failures=[*failures])


def stacked(rows: Sequence[Mapping[str, Features]]) -> dict[str, Any]:
    """`part.name` -> the features of all rows, padded at the end with zeros; int64 features as lists."""
    found: dict[str, Any] = {}
    for part, features in rows[0].items():
        for name in features:
            column = [row[part][name] for row in rows]
            whole = column[0].dtype is torch.int64
            if not whole and len({each.dim() for each in column}) == 1 and column[0].dim() > 2:
                _check_alike(f"{part}.{name}", column)
            found[f"{part}.{name}"] = [each.tolist() for each in column] if whole else _padded(column)
    return found


def _check_alike(name: str, column: Sequence[Tensor]) -> None:
    """Texts are padded; clips of several sizes would train on the zeros beside them."""
    if len(shapes := {tuple(each.shape) for each in column}) > 1:
        shown = " and ".join(str([*each]) for each in sorted(shapes))
        raise ContractError(
            f"a micro-batch would join {name} of the sizes {shown}",
            where="data",
            accepted="samples of one size in a micro-batch",
            hint="data.loader.mode: variable reads each size in micro-batches of its own",
        )


def _padded(column: Sequence[Tensor]) -> Tensor:
    if len({each.shape for each in column}) == 1:
        return torch.stack([*column])
    shape = [max(sizes) for sizes in zip(*(each.shape for each in column), strict=True)]
    found = column[0].new_zeros(len(column), *shape)
    for row, each in zip(found, column, strict=True):
        row[tuple(slice(size) for size in each.shape)] = each
    return found


def on_host(features: Features) -> Features:
    """Features in host memory."""
    return {name: tensor.detach().cpu() for name, tensor in features.items()}
