"""The rows of a dataset in the feature cache: their variants, what decides them, and their keys."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mm_core.contracts import (
    Dataset,
    Randomness,
    Source,
    SupportsRowSizes,
    SupportsSampleAt,
    SupportsSources,
    seed_generators,
)
from mm_core.data.cache.hashes import FileHashes, Span, digest
from mm_core.data.cache.keys import digest_of
from mm_core.data.cache.shards import KEY, Keys
from mm_core.data.loading.bucketed import BucketedSamples
from mm_core.errors import DataError, PlanError, RunWarning, plural

Size = tuple[int, int, int]

_BLOCK = 1 << 10
_COMPARED = 1000
_REUSED = (
    "the cache draws starts, crops, captions and tags for each row, and training without it for each use of a"
    " row: with a source whose weight is not 1, the two train on other draws"
)
_REPEATED = (
    "from epoch {} on, what is drawn for a row (start, crop, caption, tags) repeats: data.cache.variants"
)
_EVERY = 10.0
"""Seconds between two messages about files that are hashed."""


class PartKey(NamedTuple):
    """A part of the features of a run.

    Attributes:
        name: as in `CachePart`.
        of_text: whether captions are encoded, not media.
        digest: of everything that the features depend on but the sample.
        fields: as in `CachePart`; so are `caption`, `components` and `texts`.
        facts: what the digest is made of, as plain values.
    """

    name: str
    of_text: bool
    digest: bytes
    fields: tuple[str, ...] = ()
    caption: bool = False
    components: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    facts: Mapping[str, Any] = {}


@dataclass
class CacheRows:
    """The rows of a dataset, and `variants` samples of each: variant v is the sample of epoch v.

    Args:
        dataset: reads a row without the cache.
        sizes: int64 [R,3], frames, height and width in which each row is read, 0 for a row that is not used;
            None: all in the dataset's own size.
        variants: at least 1.
        seed: the run's.
    """

    dataset: Any
    sizes: torch.Tensor | None
    variants: int
    seed: int

    def __len__(self) -> int:
        return int(self.dataset.num_sources())

    def rows_of(self, epoch: int) -> Sequence[int] | torch.Tensor:
        """The row of each sample of an epoch."""
        if isinstance(self.dataset, SupportsRowSizes):
            return self.dataset.epoch_rows(epoch)
        return range(len(self.dataset))

    def size_of(self, row: int) -> Size | None:
        """Frames, height and width in which a row is read; None: the dataset's own."""
        return None if self.sizes is None else tuple(self.sizes[row].tolist())

    def used(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which rows training may read: in buckets, those that fit one."""
        return np.ones(len(self), bool) if self.sizes is None else (self.sizes[:, 0] > 0).numpy()

    def source(self, row: int, variant: int, place: int | None = None) -> Source:
        """What decides a sample, drawn as that of `place`, if given, in the epoch of its variant.

        Raises:
            DataError: it is known that the sample cannot be read.
        """
        rng = self._rng(row if place is None else place, variant)
        source: Source = self.dataset.source_of(row, self.size_of(row), rng)
        return source

    def drawn_otherwise(self, repeats: bool) -> list[str]:
        """Notes about starts, crops, captions or tags that are others than what is drawn without the cache.

        Up to 1,000 samples of an epoch are compared.

        Args:
            repeats: whether there are epochs after the cached ones.
        """
        if not isinstance(self.dataset, SupportsSampleAt):
            return []
        rows, used, found = self.rows_of(0), self.used(), dict[str, None]()
        for place in range(0, len(rows), -(-len(rows) // _COMPARED) or 1):
            row = int(rows[place])
            if not used[row]:
                continue
            with suppress(DataError):
                sources = self.source(row, 0), self.source(row, 0, place), self.source(row, self.variants)
                cached, online, later = ((source.caption, source.drawn) for source in sources)
                if cached != online:
                    found[_REUSED] = None
                if repeats and cached != later:
                    found[_REPEATED.format(self.variants)] = None
        return [*found]

    def read(self, row: int, variant: int) -> dict[str, Any]:
        """Reads and decodes a sample, as training without the cache does. DataError if it cannot be read."""
        rng = self._rng(row, variant)
        seed_generators(Randomness(self.seed).at("draws", variant, row))
        sample: dict[str, Any]
        if (size := self.size_of(row)) is not None:
            sample = self.dataset.sample_of(row, size, rng)
        else:
            sample = self.dataset[row] if rng is None else self.dataset.sample_at(row, rng)
        return sample

    def _rng(self, place: int, epoch: int) -> Randomness | None:
        random = isinstance(self.dataset, SupportsSampleAt)
        return Randomness(self.seed).at("data", epoch, place) if random else None

    def fill(self, table: Keys, parts: Sequence[PartKey], hashes: FileHashes, share: tuple[int, int]) -> None:
        """Fills in a share of the keys [R,V,P] of all samples; zeros for rows that are not used or readable.

        Args:
            table: of zeros.
            parts: of the features.
            hashes: of files.
            share: number of the share, and how many there are.
        """
        used, began, shown = self.used(), time.monotonic(), time.monotonic()
        for first in range(share[0] * _BLOCK, len(self), share[1] * _BLOCK):
            rows = range(first, min(first + _BLOCK, len(self)))
            places = [(row, variant) for row in rows if used[row] for variant in range(self.variants)]
            if places:
                table[tuple(np.transpose(places))] = self.keys(places, parts, hashes)
            if time.monotonic() - shown > _EVERY:
                shown = time.monotonic()
                hashes.save()
                if share[0] == 0:
                    what = f"{rows.stop:,} of {plural(len(self), 'row')} hashed in {shown - began:.0f} s"
                    warnings.warn(f"{what}; later starts read only what has changed", RunWarning, 2)

    def keys(self, places: Sequence[tuple[int, int]], parts: Sequence[PartKey], hashes: FileHashes) -> Keys:
        """The keys [N,P] of samples (row, variant); zeros for those that cannot be read.

        Args:
            places: of the samples.
            parts: of the features.
            hashes: of files.
        """
        found = np.zeros((len(places), len(parts)), KEY)
        sources, known = [], []
        for number, (row, variant) in enumerate(places):
            with suppress(DataError):  # training reads it, and lists it with the reason
                sources.append(self.source(row, variant))
                known.append(number)
        found[known] = self.keys_of(sources, parts, hashes)
        return found

    def keys_of(self, sources: Sequence[Source], parts: Sequence[PartKey], hashes: FileHashes) -> Keys:
        """The keys [N,P] of sources; zeros for media that cannot be read."""
        spans, known = list[Span](), dict[int, bytes]()
        for each in sources:
            image = "max_pixels" in each.made  # of the dataset: what a reader decodes has the reader's
            clip = not image and each.made.get("reader") is not None
            if each.path is not None:
                spans.append(Span(each.path, *(each.span or (0, -1)), clip=clip, image=image))
            for value in each.fields.values():
                if isinstance(value, Path):
                    spans.append(Span(value, clip=clip, image=image))
                elif isinstance(value, tuple):
                    spans += [Span(path, image=True) for path in value]
        contents = iter(hashes.of(spans))
        rows: list[bytes] = []
        for source in sources:
            content = next(contents) if source.path is not None else digest(b"drawn")
            made = known.get(id(source.made)) or known.setdefault(id(source.made), digest_of(source.made))
            drawn = repr(source.drawn).encode()
            own = {name: _field_digest(value, contents) for name, value in source.fields.items()}
            for part in parts:
                further = [own.get(name) for name in part.fields]
                if part.of_text:
                    rows.append(text_key(part, source.caption or ""))
                elif content is None or None in further:  # no file: training lists it, with the reason
                    rows.append(bytes(KEY.itemsize))
                else:
                    text = (digest((source.caption or "").encode(errors="surrogatepass")),)[: part.caption]
                    key = digest(part.digest, made, content, *filter(None, further), *text, drawn)
                    shown = digest(content, drawn) if source.path is None else content
                    rows.append(b"".join((key, shown[:8], made[:8], part.digest[:8])))
        return np.frombuffer(b"".join(rows), KEY).reshape(len(sources), len(parts))


def _field_digest(value: Path | float | tuple[Path, ...], contents: Iterator[bytes | None]) -> bytes | None:
    """The digest of a field, of files by their contents; None if one cannot be read."""
    if isinstance(value, Path):
        return next(contents)
    if isinstance(value, tuple):
        found = [next(contents) for _ in value]
        return None if None in found else digest(b"several", *filter(None, found))
    return digest(repr(value).encode())


def text_key(part: PartKey, text: str) -> bytes:
    """The record of a text's key: what `KEY` has."""
    content = digest(text.encode(errors="surrogatepass"))
    return b"".join((digest(part.digest, content), content[:8], bytes(8), part.digest[:8]))


def keys_of_texts(part: PartKey, texts: Sequence[str]) -> Keys:
    """The keys [N] of texts."""
    return np.frombuffer(b"".join(text_key(part, text) for text in texts), KEY)


def rows_of_dataset(
    dataset: Dataset, options: Mapping[str, Any], variants: int, seed: int, where: str
) -> CacheRows:
    """The rows of a run's dataset, in buckets or not.

    Args:
        dataset: of a split.
        options: of the dataset: the size of one that reads its rows in any size, without buckets.
        variants: samples of each row.
        seed: the run's.
        where: the dataset's key in the config.

    Raises:
        PlanError: it does not describe its samples.
    """
    held = dataset.dataset if isinstance(dataset, BucketedSamples) else dataset
    if not isinstance(held, SupportsSources):
        raise PlanError(
            f"the samples of {type(held).__name__} cannot be cached: it describes none without reading it",
            where=where,
            accepted="datasets that are SupportsSources: video_text, media_text, shapes",
            hint="add the method `source_of` to the dataset, or remove data.cache",
        )
    if isinstance(dataset, BucketedSamples):
        of_bucket = torch.tensor([*(bucket.size for bucket in dataset.buckets), (0, 0, 0)])
        return CacheRows(held, of_bucket[dataset.of_row], variants, seed)
    own = [options.get(name) for name in ("num_frames", "height", "width")]
    if None not in own and isinstance(held, SupportsRowSizes):
        return CacheRows(held, torch.tensor([own]).expand(held.num_sources(), 3), variants, seed)
    return CacheRows(held, None, variants, seed)
