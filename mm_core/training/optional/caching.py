"""Filling the feature cache of a run while it trains (`data.cache.missing: encode`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from mm_core.contracts import (
    Batch,
    Callback,
    EnginePlan,
    FeatureBatch,
    Features,
    SupportsCache,
    TaskModule,
)
from mm_core.data.cache.samples import PartlyCached, on_host, stacked
from mm_core.data.cache.shards import SHARD_BYTES, Keys, finite, size_of
from mm_core.errors import CacheError, PlanError
from mm_core.plan import RunCache

_FLUSH = 64  # features that are collected before they are written


class FilledBatches(Iterator[FeatureBatch], Callback):
    """The batches of a run whose cache lacks something: it is encoded and added to the cache.

    Args:
        batches: this rank's.
        task: encodes.
        cache: of the run.
        plan: of the engine: where the encoders' weights are.
        device: where the encoders compute.
        note: receives messages for the user.

    Raises:
        PlanError: an encoder is sharded, so that ranks would have to encode together.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        task: TaskModule,
        cache: RunCache,
        plan: EnginePlan,
        device: torch.device,
        note: Callable[[str], None],
    ) -> None:
        assert isinstance(task, SupportsCache)
        for component in plan.frozen:
            if component.placement == "sharded":
                raise PlanError(
                    f"the {component.name} is sharded, so all ranks would have to encode together",
                    where="data.cache.missing",
                    accepted="error; encode with frozen components that are replicated or offloaded",
                    hint="run `mm cache build` first",
                )
        self._batches, self._task, self._cache, self._device, self._note = batches, task, cache, device, note
        self._new: dict[bytes, tuple[Keys, Features]] = {}
        self._texts: dict[str, dict[str, Any]] = {}
        self._writes, self._bytes = True, 0

    def __next__(self) -> FeatureBatch:
        batch = cast(FeatureBatch, next(self._batches))
        if isinstance(batch, PartlyCached):
            batch = self._completed(batch)
        texts = {text: row or self._fixed(text) for text, row in batch.texts.items()}
        return replace(batch, texts=texts)

    def run_ended(self, step: int, error: BaseException | None) -> None:
        """Writes what was encoded since the last shard."""
        self._flush()

    @torch.no_grad()
    def _completed(self, batch: PartlyCached) -> FeatureBatch:
        rows = [dict(row) for row in batch.rows]
        for row, keys in zip(rows, batch.keys_of, strict=True):
            if len(row) < len(keys):  # this process may have added some since
                for part, features in zip(self._cache.parts, self._cache.store.get(keys), strict=True):
                    if features is not None and part.name not in row:
                        row[part.name] = features
        media = None if batch.media is None else batch.media.to(self._device)
        for number, part in enumerate(self._cache.parts):
            lacking = [place for place, row in enumerate(rows) if part.name not in row]
            if not lacking:
                continue
            given = [batch.captions[place] for place in lacking] if part.of_text else media
            assert given is not None
            found = self._task.features(part.name, given)
            encoded = dict(zip(lacking if part.of_text else batch.places, found, strict=True))
            for place in lacking:
                rows[place][part.name] = features = on_host(encoded[place])
                self._add(batch.keys_of[place, number : number + 1], features, batch.ids[place])
        own = (batch.keys, batch.sample_weights, batch.ids)
        return FeatureBatch(*own, stacked(rows), batch.texts, failures=batch.failures)

    @torch.no_grad()
    def _fixed(self, text: str) -> dict[str, Any]:
        """The features of a text that every batch needs, encoded once."""
        if text not in self._texts:
            name = next(part.name for part in self._cache.parts if part.of_text)
            features = on_host(self._task.features(name, [text])[0])
            self._add(self._cache.texts[text], features, repr(text))
            self._texts[text] = stacked([{name: features}])
        return self._texts[text]

    def _add(self, key: Keys, features: Features, name: str) -> None:
        if not finite(features):  # trained on as without a cache: the guard decides
            self._note(f"warning: features of {name} are not finite: they are not added to the cache")
            return
        if key["high"].all():  # else the sample has changed since the run started
            self._new[key.tobytes()] = (key, features)
        self._bytes += size_of(features)
        if len(self._new) >= _FLUSH or self._bytes >= SHARD_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._new and self._writes:
            keys, entries = zip(*self._new.values(), strict=True)
            try:
                self._cache.record_facts()
                self._cache.store.add(np.concatenate(keys), entries)
                self._cache.store.refresh()
            except CacheError as error:  # training goes on: the cache only saves time
                self._writes = False
                self._note(f"warning: nothing is added to the cache any more: {error.what}")
        self._new.clear()
        self._bytes = 0
