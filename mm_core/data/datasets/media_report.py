"""What a dataset contains, and which of its samples cannot be decoded: for `mm data`."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from mm_core.contracts import Dataset, VideoInfo
from mm_core.data.datasets.media_text import MediaTextDataset
from mm_core.data.datasets.video_text import VideoTextDataset
from mm_core.data.loading.buckets import Bucket
from mm_core.data.rows.captions import clean_caption
from mm_core.data.rows.media_rows import CAPTIONS, MediaRow
from mm_core.errors import ContractError, DataError, PartsError, plural

_RATES = 0.01  # rates that differ by less are rounded, such as 24 and 23.976
_READING, _AT_ONCE = 16, 1000  # threads that look for empty captions, and files that one of them takes
_SHORT = 64  # bytes of a file that may be white space
_PROBED = 16  # files of a source whose headers are read for its sizes


class Found(NamedTuple):
    """What a source of a dataset contains.

    Attributes:
        source: as in the config.
        images: number of its rows that are images.
        clips: number of its rows that are clips.
        samples: how many samples an epoch takes from it.
        sizes: number of probed files of each size, the most frequent one first: headers of at most 16 files.
        left_out: number of rows left out for each reason.
        empty_captions: number of captions without a text.
        filled: number of rows that have the caption of their source.
    """

    source: str
    images: int
    clips: int
    samples: int
    sizes: Mapping[str, int]
    left_out: Mapping[str, int]
    empty_captions: int
    filled: int

    def probed(self, most: int | None = None) -> str:
        """Its sizes with their numbers of files, and how many files were probed; at most `most` sizes."""
        if not self.sizes:
            return "unknown: no file was probed"
        named = [f"{size} ({count:,})" for size, count in self.sizes.items()]
        more = f" + {len(named) - most} more" if most is not None and len(named) > most else ""
        rows = plural(self.images + self.clips, "file")
        return f"{'; '.join(named[:most])}{more}; {sum(self.sizes.values())} of {rows} probed"

    def remarks(self) -> list[str]:
        """What is left out, and the empty captions, a line for each."""
        return _remarked(self.left_out, self.empty_captions, self.filled)


class Bucketed(NamedTuple):
    """What a dataset has in buckets.

    Attributes:
        buckets: those in use, the largest first, with their samples in an epoch.
        unfit: which rows are in none and why, in words.
        pictures: how many clips are in buckets of one frame, in words; empty: none.
        of_row: the place of each row's bucket in `buckets`, int64 [R]; -1: none.
    """

    buckets: Sequence[tuple[Bucket, int]]
    unfit: Sequence[str]
    pictures: str
    of_row: Tensor

    def remarks(self) -> list[str]:
        """What the table does not show, a sentence each."""
        return [*self.unfit, *filter(None, [self.pictures])]

    def table(self) -> list[tuple[str, ...]]:
        """Cells of a row for each bucket, under `BUCKET_COLUMNS`."""
        return [
            (*map(str, bucket.size), str(bucket.micro_batch_size), f"{samples:,}")
            for bucket, samples in self.buckets
        ]


BUCKET_COLUMNS = ("frames", "height", "width", "per micro-batch", "samples per epoch")


class Checked(NamedTuple):
    """A sample that was read, or a part of one that cannot be read.

    Attributes:
        name: of the sample.
        fault: None for a good one.
        differs: how the sizes that its row declares differ from those of its file; empty if they do not.
        done: number of samples that have been read.
        of: number of samples.
        captions: of the sample, if it could be read.
    """

    name: str
    fault: DataError | None
    differs: str
    done: int
    of: int
    captions: Sequence[str] = ()


def inspect(dataset: Dataset, bucketed: Bucketed | None = None) -> list[Found]:
    """What each source of a dataset contains, from its rows and some headers.

    Args:
        dataset: the samples.
        bucketed: what it has in buckets: rows in none are in no epoch.

    Raises:
        ContractError: the dataset is not `media_text`.
    """
    dataset = inspected(dataset)
    rows = dataset.mixture.rows()
    rows = rows if bucketed is None else rows[bucketed.of_row[rows] >= 0]
    taken = dataset.rows.facts["source"][rows.numpy()]
    return [
        Found(
            source.name,
            source.kept.get("image", 0),
            source.kept.get("clip", 0),
            int((taken == number).sum()),
            _sizes(dataset, number),
            source.dropped,
            *_captions(dataset, number),
        )
        for number, source in enumerate(dataset.sources)
    ]


def remarks(dataset: object) -> list[str]:
    """What of the sources of a dataset is not used and why, and empty captions; a line for each."""
    found: list[str] = []
    if isinstance(dataset, MediaTextDataset):
        for number, source in enumerate(dataset.sources):
            lines = _remarked(source.dropped, *_captions(dataset, number))
            found += [f"{source.name}: {each}" for each in lines]
    return found


def _remarked(left_out: Mapping[str, int], empty: int, filled: int) -> list[str]:
    """What is left out of a source, and its captions that are empty or not their own, in words."""
    lines = [f"{plural(count, 'row')} left out: {reason}" for reason, count in left_out.items()]
    lines += [f"{plural(filled, 'row')} without a caption: the source's is used"] if filled else []
    return [*lines, *([f"{plural(empty, 'empty caption')}, used as any other"] if empty else [])]


def _captions(dataset: MediaTextDataset, number: int) -> tuple[int, int]:
    """The captions of a source that are empty, and those that are the source's own."""
    empty, filled = _empty_captions(dataset, number), dataset.sources[number].filled
    return (0, filled + empty) if (dataset.wanted.sources[number].caption or "").strip() else (empty, filled)


def _empty_captions(dataset: MediaTextDataset, number: int) -> int:
    """The captions of a source that are empty; a source with a prefix has none."""
    wanted, source = dataset.wanted.sources[number], dataset.sources[number]
    if wanted.caption_prefix.strip() and wanted.caption is None:
        return 0
    places = dataset.rows.of_source(number)
    found = dataset.rows.blank_captions(places)
    if source.archives or not Path(wanted.annotations).is_dir():
        return found

    def blank(places: range) -> int:
        return sum(_is_blank(source.folder, row) for row in map(dataset.rows.__getitem__, places))

    with ThreadPoolExecutor(_READING) as pool:
        parts = (places[first : first + _AT_ONCE] for first in range(0, len(places), _AT_ONCE))
        return found + sum(pool.map(blank, parts))


def _is_blank(folder: Path, row: MediaRow) -> bool:
    """Whether the caption beside a file is empty; one that cannot be read is not."""
    if row.captions:
        return False
    path = f"{folder}/{row.path[: row.path.rfind('.')]}{CAPTIONS}"
    with suppress(OSError, ValueError):
        found = os.stat(path)  # noqa: PTH116  # of a million files
        if stat.S_ISREG(found.st_mode) and found.st_size <= _SHORT:
            return not found.st_size or not clean_caption(Path(path).read_text(encoding="utf-8-sig"))
    return False


def inspected(dataset: Dataset) -> MediaTextDataset:
    """The dataset; ContractError if it has no sources."""
    if isinstance(dataset, MediaTextDataset):
        return dataset
    raise ContractError(
        f"{type(dataset).__name__} has no sources to inspect",
        accepted="the dataset media_text",
        hint="mm data check reads the samples of any dataset",
    )


def spread(places: Sequence[int], count: int) -> list[int]:
    """At most `count` of some places, at even distances."""
    count = min(count, len(places))
    return [places[number * len(places) // count] for number in range(count)]


def _sizes(dataset: MediaTextDataset, source: int) -> dict[str, int]:
    found: Counter[str] = Counter()
    for place in spread(dataset.rows.of_source(source), _PROBED):
        with suppress(DataError):
            found[dataset.size_of(place)] += 1
    return dict(found.most_common())


def check(dataset: Dataset, threads: int) -> Iterator[Checked]:
    """Decodes every sample of a dataset once: of `media_text` every row, and clips to their last frame.

    A sample with parts, such as a packed row, is yielded once for each part that cannot be read.

    Args:
        dataset: any map-style dataset.
        threads: number of threads that decode.
    """
    rows = len(dataset.rows) if isinstance(dataset, MediaTextDataset) else len(dataset)
    read: Callable[[int], list[_Read]] = partial(_read, dataset)
    with ThreadPoolExecutor(threads) as pool:
        numbers = iter(range(rows))
        waiting = [pool.submit(read, number) for number in islice(numbers, 4 * threads)]
        for done in range(1, rows + 1):
            found = waiting.pop(0).result()
            waiting += [pool.submit(read, number) for number in islice(numbers, 1)]
            for name, fault, differs, captions in found:
                yield Checked(name, fault, differs, done, rows, captions)


_Read = tuple[str, DataError | None, str, Sequence[str]]


def _read(dataset: Dataset, number: int) -> list[_Read]:
    name, differs = f"sample {number}", ""
    captions: Sequence[str] = ()
    try:
        if isinstance(dataset, MediaTextDataset):
            row = dataset.rows[number]
            name = dataset.name_of(row)
            differs = _differences(row, dataset.decode(number))
            captions = dataset.captions(row)
        else:
            sample = dataset[number]
            if (missing := sample.get("missing")) is not None:
                raise missing
            captions = [text] if isinstance(text := sample.get("caption"), str) else []
            if isinstance(dataset, VideoTextDataset):
                captions = dataset.captions(number)
    except PartsError as parts:
        return [(fault.where or name, fault, "", ()) for fault in parts.faults.values()]
    except DataError as fault:
        return [(name if isinstance(dataset, MediaTextDataset) else fault.where or name, fault, "", ())]
    return [(name, None, differs, captions)]


def _differences(row: MediaRow, info: VideoInfo) -> str:
    """The sizes that a row declares and its file does not have, in words."""
    pairs = {name: (getattr(row, name), getattr(info, name)) for name in ("num_frames", "height", "width")}
    found = [
        f"{name} {declared}, not {has}"
        for name, (declared, has) in pairs.items()
        if declared not in (None, has)
    ]
    if row.medium == "clip" and row.fps is not None and abs(row.fps / info.fps - 1) > _RATES:
        found.append(f"fps {row.fps:g}, not {info.fps:g}")
    return "; ".join(found)
