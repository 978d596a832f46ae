"""What a run needs of its feature cache: the keys, which are there, and why others are not."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mm_core.config.sections import CacheSection
from mm_core.data.cache.keys import digest_of
from mm_core.data.cache.rows import PartKey
from mm_core.data.cache.samples import CachedSamples
from mm_core.data.cache.shards import DAMAGED, FAULTY, NOT_FINITE, Keys, writing
from mm_core.data.cache.store import Store
from mm_core.errors import DataError
from mm_core.files import read_plain, replace_text

_SHOWN = 5
"""How many samples of each reason are named."""

NEW = "not encoded yet, or its content has changed"
VARIANT = "other random starts or crops of it are there, not this one"
MADE = "its frames, size or transform have changed"


class PartStatus(NamedTuple):
    """Numbers of the features of one part of a split."""

    split: str
    part: str
    present: int
    stale: int  # there of the same content, but made or encoded in another way
    missing: int
    unreadable: int  # samples


@dataclass
class RunCache:
    """The feature cache as a run sees it.

    Attributes:
        store: the entries.
        parts: of the task.
        splits: by split.
        texts: keys of the texts that are needed beside captions: the empty one, prompts.
        section: of the config.
    """

    store: Store
    parts: Sequence[PartKey]
    splits: dict[str, CachedSamples]
    texts: dict[str, Keys]
    section: CacheSection

    def tables(self) -> Iterator[tuple[str, PartKey, Keys]]:
        """Split, part and its keys [R,V]; those of the texts beside captions last, as split `texts`."""
        for name, split in self.splits.items():
            for number, part in enumerate(self.parts):
                yield name, part, split.keys[:, :, number]
        for part in self.parts:
            if part.of_text and self.texts:
                yield "texts", part, np.stack([*self.texts.values()])

    def without_keys(self, split: str, keys: Keys) -> int:
        """How many samples of a split have no key, since their file or caption cannot be read.

        Args:
            split: its name.
            keys: of a part of its samples, [R,V].
        """
        return int((keys["high"] == 0)[self.splits[split].rows.used()].sum())

    def name(self, split: str, row: int, variant: int) -> str:
        """The name of a sample, for reports."""
        if split == "texts":
            return repr([*self.texts][row])
        try:
            named = f"data.{split}: {self.splits[split].rows.source(row, variant).id}"
        except DataError:
            named = f"data.{split}: row {row}"
        return named + f" (variant {variant})" * (variant > 0)

    def reasons(self, part: PartKey, keys: Keys) -> list[str]:
        """Why keys [N] have no entry: what is there of the same content, but made or encoded differently."""
        known = self.store.keys
        found = np.full(len(keys), NEW, dtype=object)
        if not part.of_text:
            found[_alike(keys, known, "encoder")] = MADE
        if (same := _alike(keys, known, "made")).any():
            first = keys[same][0]
            other = known[(known["content"] == first["content"]) & (known["made"] == first["made"])][-1]
            found[same] = self._encoder_change(part, int(other["encoder"]))
        found[_alike(keys, known, "made", "encoder")] = VARIANT
        return [str(each) for each in found]

    def _encoder_change(self, part: PartKey, before: int) -> str:
        """What is different in the components of a part from those that an entry was encoded by."""
        _, old = self._recorded(before)
        changes = [*_changes(old, json.loads(json.dumps(part.facts)))] if old else []
        shown = f" ({'; '.join(changes[:3])})" if changes else ""
        return f"the {' and '.join(part.components)} has changed{shown}"

    def survey(self, faults: Mapping[int, str]) -> tuple[list[PartStatus], list[str]]:
        """What is there of each part of each split; and of what is not, a line for each part and reason with
        the number, and the first samples by name.

        Args:
            faults: of entries that are not there since they cannot be used, from `Store.faults`.
        """
        rows: list[PartStatus] = []
        counts: Counter[tuple[str, str]] = Counter()
        named: dict[tuple[str, str], list[str]] = defaultdict(list)
        for split, part, keys in self.tables():
            places, wanted = self.store.find(keys), keys["high"] != 0
            usable = (places >= 0) & ~np.isin(places, [*faults])
            there = self.store.keys[places[wanted & usable]]
            bad = unreadable = int((there["encoder"] == FAULTY).sum())
            if not part.of_text:
                unreadable += self.without_keys(split, keys)
            lacking = np.nonzero(wanted & ~usable)
            whys = zip(places[lacking].tolist(), self.reasons(part, keys[lacking]), strict=True)
            reasons = [faults.get(place, why) for place, why in whys]
            new = sum(reason in (NEW, VARIANT, DAMAGED, NOT_FINITE) for reason in reasons)
            rows.append(PartStatus(split, part.name, len(there) - bad, len(reasons) - new, new, unreadable))
            for row, variant, reason in zip(*(n.tolist() for n in lacking), reasons, strict=True):
                counts[part.name, reason] += 1
                if counts[part.name, reason] <= _SHOWN:
                    named[part.name, reason].append(self.name(split, row, variant))
        return rows, [
            f"{part}: {count:,} not cached: {reason}: {'; '.join(named[part, reason])}"
            + "; ..." * (count > _SHOWN)
            for (part, reason), count in counts.items()
        ]

    def needed(self, store: Store) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which entries of a store this run needs; it may have been opened at another time than the run's."""
        found = np.zeros(len(store), bool)
        for _, _, keys in self.tables():
            places = store.find(keys)
            found[places[places >= 0]] = True
        return found

    def record_facts(self) -> None:
        """Writes what the digests are made of, so that later changes can be named."""
        for part in self.parts:
            path, known = self._recorded(int.from_bytes(part.digest[:8], "little"))
            if known is None:
                with writing(path.parent):
                    replace_text(path, json.dumps(part.facts, indent=1, sort_keys=True))

    def _recorded(self, number: int) -> tuple[Path, dict[str, Any] | None]:
        """The file of what a digest that begins with this number is made of, and that; None unless whole."""
        path = self.store.folder / "facts" / f"{number:016x}.json"
        with suppress(OSError, ValueError, RecursionError):
            found: dict[str, Any] = json.loads(read_plain(path))
            if int.from_bytes(digest_of(found)[:8], "little") == number:
                return path, found
        return path, None


def _alike(keys: Keys, known: Keys, *fields: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which keys [N] share content and other fields with a known one."""

    def mixed(each: Keys) -> np.ndarray[Any, Any]:
        factor = np.uint64(0x9E3779B97F4A7C15)
        return reduce(lambda found, field: (found ^ each[field]) * factor, fields, each["content"])

    return np.isin(mixed(keys), mixed(known))


def _changes(old: object, new: object, key: str = "") -> Iterator[str]:
    """The differences of two plain values: `autoencoder.options.dtype: bf16 -> fp32`."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from _changes(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif key.endswith(".files") and isinstance(old, list) and isinstance(new, list):
        for name, *_ in [file for file in [*old, *new] if (file in old) != (file in new)][:1]:
            yield f"{key.removesuffix('.files').removeprefix('components.')}: {name} has other bytes"
    elif old != new:
        yield f"{key.removeprefix('components.').replace('.options.', '.')}: {old} -> {new}"
