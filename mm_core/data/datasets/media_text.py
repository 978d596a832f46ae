"""The dataset `media_text`: captioned images and clips from tables, folders and archives."""

from __future__ import annotations

import hashlib
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from mm_core.builtin.configs.data import MediaSource, MediaTextConfig
from mm_core.contracts import Randomness, Source, Transform, VideoInfo, VideoReader, VideoTextBatch
from mm_core.data.datasets import Sample
from mm_core.data.datasets.further_fields import FurtherFields
from mm_core.data.datasets.media_sizes import IMAGE_FPS, mixed_media, named_size, of_image, sizes_of
from mm_core.data.datasets.video_text import Size, collate_clips, made_of
from mm_core.data.media.frames import clip_times, read_all
from mm_core.data.media.image_headers import NoImageError, holds_clip, image_size
from mm_core.data.media.limits import decoding
from mm_core.data.media.readers import PyAVReader
from mm_core.data.media.transforms import draws_of, levels_of, read_pixels, transform_of, transformed
from mm_core.data.rows.annotations import inside
from mm_core.data.rows.captions import clean_caption
from mm_core.data.rows.mapped_rows import MappedRows, read_once
from mm_core.data.rows.media_rows import CAPTIONS, MediaRow
from mm_core.data.rows.mixture import Mixture, drawn_tags
from mm_core.data.rows.paths import refusal
from mm_core.data.rows.sources import OpenedSource, SourceReader, media_of
from mm_core.errors import ContractError, DataError, MMError, PartsError, RunWarning, plural
from mm_core.files import open_plain, read_plain

_COMPARED = 10_000  # caption files that a resume reads to compare a folder
_THREADS = 16


class MediaTextDataset:
    """The dataset `media_text`: images and clips of several sources, each with a caption.

    A sample is as in `video_text`: {"pixels": uint8 [3,F,Y,X], "caption", "id", "fps"}. An image
    is a clip of one frame. An epoch uses the rows of each source by its weight (`Mixture`). Sizes in a row
    are never trusted: the file decides.

    Args:
        sources: tables, folders and archives.
        num_frames: frames of a clip.
        height: in pixels, after resizing and cropping; None: every sample is read in its bucket's size.
        width: as height.
        reader: decodes the clips; None: a `PyAVReader`.
        transform: makes pixels of decoded frames; None: a `ResizeCrop` with `interpolation`.
        others: further fields of `MediaTextConfig`.

    Raises:
        DataError: in the constructor if a source cannot be used; for a sample if its file or caption is
            missing, damaged, outside its folder, too large, or shorter than a clip.
    """

    remarked = True  # `remarks` has what its constructor warns of

    def __init__(
        self,
        sources: Sequence[MediaSource],
        num_frames: int = MediaTextConfig.num_frames,
        height: int | None = None,
        width: int | None = None,
        *,
        reader: VideoReader | None = None,
        transform: Transform | None = None,
        **others: Any,
    ) -> None:
        self.wanted = MediaTextConfig(tuple(sources), num_frames, height, width, **others)
        self.reader = PyAVReader() if reader is None else reader
        self.transform = transform_of(transform, self.wanted.interpolation)
        folder, opened = read_once(partial(_write_rows, self.wanted.sources))
        self.further = FurtherFields(self.wanted, self.reader, self.transform, opened)
        self.rows = MappedRows(folder, tuple(len(each.columns.fields) for each in self.wanted.sources))
        self.sources: Sequence[OpenedSource] = opened
        self._made: dict[tuple[str, Size], Mapping[str, Any]] = {}  # shared by the rows that are read alike
        for source in self.sources:
            if source.uncaptioned:
                reasons = ", ".join(f"{reason} ({count:,})" for reason, count in source.dropped.items())
                what = f"{plural(source.uncaptioned, 'row')} left out: {reasons}"
                warnings.warn(f"{source.name}: {what}", RunWarning, stacklevel=2)
        self._clips = sum(source.kept.get("clip", 0) for source in self.sources)
        counts = [sum(source.kept.values()) for source in self.sources]
        self.mixture = Mixture(counts, [source.weight for source in self.wanted.sources])
        if not len(self.mixture):
            raise DataError(
                "no image or clip remains: the weights of all sources are too small",
                where="sources",
                hint="raise `weight` of a source: 1 uses each row once per epoch",
            )

    def __len__(self) -> int:
        return len(self.mixture)

    def __getitem__(self, index: int) -> Sample:
        """The sample without random choices: a clip's first frames, the first caption, its tags in order."""
        return self._sample(self.rows[int(self.mixture.rows()[index])], self._size, None)

    def sample_at(self, index: int, rng: Randomness) -> Sample:
        """The sample with its start, caption and tags drawn from `rng`."""
        epoch = int(rng.path[-2])  # rng is at ("data", epoch, index)
        return self._sample(self.rows[int(self.mixture.rows(epoch)[index])], self._size, rng)

    def row_sizes(self) -> Tensor:
        """Frames at the dataset's rate, height and width of each row: as declared, or by its header."""
        return sizes_of(self.rows, self.wanted.fps, self.header)

    def epoch_rows(self, epoch: int) -> Tensor:
        """The number of the row of each sample in an epoch, int64 [N]."""
        return self.mixture.rows(epoch)

    def sample_of(self, row: int, size: Size, rng: Randomness | None) -> Sample:
        """Reads a row as a sample of (frames, height, width); an image has one frame in every size."""
        return self._sample(self.rows[row], size, rng)

    def num_sources(self) -> int:
        """Number of rows, for the feature cache."""
        return len(self.rows)

    def source_of(self, row: int, size: Size | None, rng: Randomness | None) -> Source:
        """What decides the sample of a row, for the feature cache.

        Raises:
            DataError: its path or its caption cannot be used.
        """
        size, own = size or self._size, self.rows[row]
        place = self.sources[own.source]
        path = inside(place.folder, own.path) if own.archive is None else place.archives[own.archive]
        span = None if own.archive is None else (own.start, own.size)
        medium = "clip" if own.medium == "image" and holds_clip(path, span or (0, -1)) else own.medium
        if medium == "image":
            size = (1, *size[1:])
        made = self._made.get((medium, size))
        if made is None:
            reader = self.reader if medium == "clip" else None
            made = made_of(size, self.wanted.fps, self.transform, reader)
            if reader is None:
                made["max_pixels"] = self.wanted.max_pixels
            self._made[medium, size] = made
        start = (self._start(rng),) if medium == "clip" else ()
        drawn = (*start, *draws_of(self.transform, rng))
        name, caption = self.name_of(own), self.caption(own, rng)
        return Source(name, caption, made, path, span, drawn, self.further.of(own))

    @property
    def _size(self) -> Size:
        wanted = self.wanted
        if wanted.height is None or wanted.width is None:
            raise ContractError(
                "the size of the samples is not set",
                where="data",
                accepted="height and width of the dataset, or data.loader.mode: variable",
            )
        return wanted.num_frames, wanted.height, wanted.width

    def collate(self, samples: Sequence[Sample]) -> VideoTextBatch:
        """Collates images or clips into a batch; the loader has added `key` and `weight` to each sample."""
        if len({sample["pixels"].shape for sample in samples}) > 1:
            named = ", ".join(sample["id"] for sample in samples[:4])
            raise mixed_media(len(samples), "a micro-batch", named)
        return collate_clips(samples, levels_of(self.transform))

    @classmethod
    def check_micro_batch(cls, size: int, options: Mapping[str, Any]) -> None:
        """Checks that images and clips do not have to share a micro-batch, by the first rows of each source.

        Raises:
            ContractError: they would.
        """
        if size == 1 or options["num_frames"] == 1:
            return
        found = media_of(options["sources"])
        if len(set().union(*found)) > 1:
            listed = zip(options["sources"], found, strict=True)
            shown = (
                f"{source.annotations} ({' and '.join(f'{each}s' for each in sorted(media))})"
                for source, media in listed
                if media
            )
            raise mixed_media(size, ", ".join(shown), "train.micro_batch_size")

    @classmethod
    def batch_specs(cls, options: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """The sizes of clips, and of images where the sources have any."""
        found = set().union(*media_of(options["sources"]))
        specs: dict[str, Mapping[str, Any]] = {}
        fields = {each.name: each.pictures for each in options["sources"][0].columns.fields}
        given = {**options, "fields": fields}
        if "clip" in found or not found:
            specs["clips"] = given
        if "image" in found:
            specs["images, clips of one frame"] = {**given, "num_frames": 1}
        return specs

    def digests(self) -> dict[str, str]:
        """The sha256 of what each folder has, by the key of its source; images and clips are not read.

        They cover names and captions; of more than 10,000 caption files, 10,000 are read, evenly spaced.
        """
        found = {}
        for number, (source, wanted) in enumerate(zip(self.sources, self.wanted.sources, strict=True)):
            if Path(wanted.annotations).is_dir():
                places = self.rows.of_source(number)
                own = hashlib.sha256(self.rows.digest(places))
                names = (each.relative_to(source.folder).as_posix() for each in source.archives)
                own.update("\0".join(names).encode(errors="surrogateescape"))
                if not source.archives:
                    chosen = places[:: -(-len(places) // _COMPARED) or 1]
                    with ThreadPoolExecutor(_THREADS) as pool:
                        for text in pool.map(self._bytes_beside, chosen):
                            own.update(hashlib.sha256(text).digest())
                found[f"sources.{number}.annotations"] = own.hexdigest()
        return found

    def _bytes_beside(self, row: int) -> bytes:
        own = self.rows[row]
        with suppress(OSError):
            return read_plain((self.sources[own.source].folder / own.path).with_suffix(CAPTIONS))
        return b""

    # -- samples --------------------------------------------------------------------------------

    def name_of(self, row: MediaRow) -> str:
        """The name of a row for reports: its path, or its archive and member."""
        source = self.sources[row.source]
        return str((source.folder if row.archive is None else source.archives[row.archive]) / row.path)

    def size_of(self, number: int) -> str:
        """The size of a row's file by its header: `480 x 832, 49 frames`.

        Raises:
            DataError: the file cannot be read.
        """
        row = self.rows[number]
        info = self.header(row)
        still = row.medium == "image" and info.num_frames == 1
        return named_size(info.num_frames, info.height, info.width, still)

    def header(self, row: MediaRow) -> VideoInfo:
        """The properties of a row's file by its header; of an image upright, as one frame.

        Raises:
            DataError: the file cannot be read.
        """
        with self.opened(row) as path:
            if row.medium == "image":
                try:
                    return of_image(*image_size(path, self.wanted.max_pixels))
                except NoImageError:
                    if not holds_clip(path):
                        raise
            return self.reader.probe(path)

    def decode(self, number: int) -> VideoInfo:
        """Decodes everything of a row that training may read, and returns the properties of its file.

        Raises:
            PartsError: files of its further fields could not be read.
            DataError: a sample of this row could not be read.
        """
        row, last = self.rows[number], None
        self.caption(row, None)
        with self.opened(row) as path:
            frames = self.photo(row, path)
            if frames is not None:
                info = of_image(*frames.shape[1:3])
            else:
                info = self.reader.probe(path)
                least = 1 if self.wanted.height is None else self.wanted.num_frames
                start = 1 - 1e-9 if self.wanted.random_start else 0.0
                last = clip_times(info, path, least, self.wanted.fps, start)[-1]
                frames = read_all(self.reader, path, info)
            self.further.try_transform(frames, self.name_of(row))
        if faults := dict(enumerate(self.further.faults(row, last))):
            raise PartsError(faults, len(faults))
        return info

    def _sample(self, row: MediaRow, size: Size, rng: Randomness | None) -> Sample:
        wanted, (num_frames, height, width) = self.wanted, size
        name, caption, fps = self.name_of(row), self.caption(row, rng), IMAGE_FPS
        start = self._start(rng)
        with self.opened(row) as path, decoding(name):
            photo = self.photo(row, path)
            shown: list[float] = []
            if photo is not None:
                pixels = transformed(self.transform, photo, (height, width), rng, name)
            else:

                def times(info: VideoInfo) -> list[float]:
                    shown[:] = clip_times(info, path, num_frames, wanted.fps, start)
                    return shown

                pixels, info = read_pixels(self.reader, self.transform, path, times, (height, width), rng)
                fps = info.fps
        return {
            "pixels": pixels,
            "caption": caption,
            "id": name,
            "fps": fps if wanted.fps is None else wanted.fps,
            **self.further.read(row, shown, (height, width), rng),
        }

    def photo(self, row: MediaRow, path: Path) -> Tensor | None:
        """uint8 [1,Y,X,3] of an image; None for a clip, also under the suffix of an image."""
        if row.medium == "image":
            try:
                return self.further.photo(path)
            except NoImageError:
                if not holds_clip(path):
                    raise
            fixed = self.wanted.height and self.wanted.num_frames > 1
            if fixed and not self._clips:
                what = "the file is a clip, which cannot share a micro-batch with images"
                raise DataError(what, where=str(path), hint="set `num_frames: 1`, or remove it from the data")
        return None

    def _start(self, rng: Randomness | None) -> float:
        return rng.uniform("start") if rng is not None and self.wanted.random_start else 0.0

    @contextmanager
    def opened(self, row: MediaRow) -> Iterator[Path]:
        """A context with the path of a row's file; a member of an archive is copied to a temporary one.

        Raises:
            DataError: the path leaves its folder; errors in the block about a copy name the member.
        """
        if row.archive is None:
            yield inside(self.sources[row.source].folder, row.path)
            return
        with tempfile.NamedTemporaryFile(suffix=Path(row.path).suffix) as copy:
            archive = self.sources[row.source].archives[row.archive]
            try:
                with open_plain(archive) as file:
                    file.seek(row.start)
                    copy.write(file.read(row.size))
                    copy.flush()
            except OSError as error:
                raise DataError(f"the archive cannot be read: {refusal(error)}", where=str(archive)) from None
            try:
                yield Path(copy.name)
            except MMError as error:
                error.where = self.name_of(row)
                raise

    def caption(self, row: MediaRow, rng: Randomness | None) -> str:
        """The caption of a row with its prefix: one of several and its tags are drawn from `rng`, if any."""
        source = self.wanted.sources[row.source]
        if not row.captions:
            text = self._text_beside(row)
        else:
            drawn = 0.0 if rng is None else rng.uniform("caption")
            text = row.captions[int(drawn * len(row.captions))]
        if source.tags is not None and rng is not None:
            text = drawn_tags(text, source.tags, rng)
        return clean_caption(source.caption_prefix + text)

    def captions(self, row: MediaRow) -> list[str]:
        """All captions of a row, of tags all of them."""
        prefix = self.wanted.sources[row.source].caption_prefix
        return [clean_caption(prefix + text) for text in row.captions or (self._text_beside(row),)]

    def _text_beside(self, row: MediaRow) -> str:
        text = self._text_of_file(row)
        return text if text.strip() else self.wanted.sources[row.source].caption or text

    def _text_of_file(self, row: MediaRow) -> str:
        path = inside(self.sources[row.source].folder, str(Path(row.path).with_suffix(CAPTIONS)))
        try:
            return read_plain(path).decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = refusal(error) if isinstance(error, OSError) else "it is not UTF-8 text"
            raise DataError(f"the caption cannot be read: {reason}", where=str(path)) from None


def _write_rows(sources: Sequence[MediaSource], folder: Path) -> list[OpenedSource]:
    """Writes the rows of all sources for `MappedRows`."""
    readers = [SourceReader(number, source) for number, source in enumerate(sources)]
    MappedRows.write((rows for each in readers for rows in each.blocks()), folder)
    return [each.opened() for each in readers]
