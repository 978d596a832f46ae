"""The dataset `video_text`: captioned clips from an annotation file."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from mm_core.builtin.configs.data import VideoTextConfig
from mm_core.contracts import Ragged, Randomness, Source, Transform, VideoInfo, VideoReader, VideoTextBatch
from mm_core.data.datasets import Sample
from mm_core.data.media.frames import clip_times, too_short
from mm_core.data.media.readers import PyAVReader
from mm_core.data.media.transforms import draws_of, levels_of, read_pixels, transform_of
from mm_core.data.rows.annotations import Annotation, inside, read_annotations
from mm_core.data.rows.captions import clean_caption, half_character
from mm_core.data.rows.packed_rows import PackedRows
from mm_core.data.rows.paths import check_folder
from mm_core.errors import DataError

Size = tuple[int, int, int]
"""Frames, height and width."""

_OWN = frozenset({"pixels", "caption", "id", "fps", "key", "weight"})


class VideoTextDataset:
    """The dataset `video_text`: clips of `num_frames` frames, each with a caption.

    A sample is {"pixels": uint8 [3,F,Y,X], "caption": str, "id": path in the folder,
    "fps": frames per second}. Frames are taken at `fps`, by time, or at the video's own rate. Sizes in the
    annotation only save time: a video that declares fewer frames than a clip needs is not opened.

    Args:
        annotations: the JSON or JSONL file that lists the videos.
        num_frames: frames of a clip.
        height: in pixels, after resizing and cropping.
        width: in pixels, after resizing and cropping.
        reader: decodes the videos; None: a `PyAVReader`.
        transform: makes pixels of decoded frames; None: a `ResizeCrop` with `interpolation`.
        others: further fields of `VideoTextConfig`.

    Raises:
        DataError: in the constructor if the annotations cannot be used; for a sample if its video is missing,
            damaged, outside the folder, or shorter than a clip.
    """

    def __init__(
        self,
        annotations: str | Path,
        num_frames: int,
        height: int,
        width: int,
        *,
        reader: VideoReader | None = None,
        transform: Transform | None = None,
        **others: Any,
    ) -> None:
        self.wanted = VideoTextConfig(str(annotations), num_frames, height, width, **others)
        file, folder = Path(annotations), self.wanted.folder
        self.folder = file.parent if folder is None else Path(folder)
        self.rows: Sequence[Annotation] = PackedRows(read_annotations(file), Annotation)
        self.reader = PyAVReader() if reader is None else reader
        self.transform = transform_of(transform, self.wanted.interpolation)
        check_folder(self.folder, "the folder of the videos")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        """The sample without random choices: the video's first frames and its first caption."""
        return self._sample(index, None)

    def sample_at(self, index: int, rng: Randomness) -> Sample:
        """The sample with its start (with `random_start`), caption and crop drawn from `rng`."""
        return self._sample(index, rng)

    def _drawn(self, rng: Randomness | None) -> tuple[float, float]:
        """Uniform numbers in [0, 1) that choose the start and the caption."""
        if rng is None:
            return 0.0, 0.0
        return rng.uniform("start") if self.wanted.random_start else 0.0, rng.uniform("caption")

    def num_sources(self) -> int:
        """Number of rows, for the feature cache."""
        return len(self.rows)

    def source_of(self, row: int, size: Size | None, rng: Randomness | None) -> Source:
        """What decides the sample of a row, for the feature cache.

        Raises:
            DataError: its path or its caption cannot be used, or it is declared too short.
        """
        start, caption = self._drawn(rng)
        path = self._checked(row)
        annotation = self.rows[row]
        text = clean_caption(annotation.captions[int(caption * len(annotation.captions))])
        return Source(annotation.path, text, self._made, path, drawn=(start, *draws_of(self.transform, rng)))

    def captions(self, row: int) -> list[str]:
        """All captions of a row."""
        return [clean_caption(text) for text in self.rows[row].captions]

    @cached_property
    def _made(self) -> Mapping[str, Any]:
        wanted = self.wanted
        size = (wanted.num_frames, wanted.height, wanted.width)
        return made_of(size, wanted.fps, self.transform, self.reader)

    def collate(self, samples: Sequence[Sample]) -> VideoTextBatch:
        """Collates clips into a batch; the loader has added `key` and `weight` to each sample."""
        return collate_clips(samples, levels_of(self.transform))

    def _sample(self, index: int, rng: Randomness | None) -> Sample:
        row, wanted, path = self.rows[index], self.wanted, self._checked(index)
        start, caption = self._drawn(rng)

        def times(info: VideoInfo) -> list[float]:
            return clip_times(info, path, wanted.num_frames, wanted.fps, start)

        size = wanted.height, wanted.width
        pixels, info = read_pixels(self.reader, self.transform, path, times, size, rng)
        return {
            "pixels": pixels,
            "caption": clean_caption(row.captions[int(caption * len(row.captions))]),
            "id": row.path,
            "fps": info.fps if wanted.fps is None else wanted.fps,
        }

    def _checked(self, index: int) -> Path:
        row, wanted = self.rows[index], self.wanted
        path = inside(self.folder, row.path)
        for text in row.captions:
            if half := half_character(text):
                raise DataError(
                    f"the caption contains {half}, half of a character",
                    where=str(path),
                    hint=f"remove {half} from the caption in the annotations",
                )
        if wanted.fps is None and row.num_frames is not None and row.num_frames < wanted.num_frames:
            raise too_short(path, row.num_frames, "the annotation declares", wanted.num_frames, None)
        return path


def made_of(
    size: Size, fps: float | None, transform: Transform, reader: VideoReader | None
) -> dict[str, Any]:
    """How pixels are made of a file, as the feature cache needs it (see `Source`).

    Args:
        size: frames, height and width.
        fps: frames per second at which frames are taken; None: the file's own.
        transform: makes pixels of frames.
        reader: decodes the file; None for pictures.
    """
    return {
        "frames": size[0],
        "transform": {"height": size[1], "width": size[2], **_settings(transform)},
        "fps": fps,
        "reader": _settings(reader),
    }


def _settings(component: object) -> dict[str, Any]:
    """A built component's class and settings: its attributes, of which long or strange ones as a hash."""
    found: dict[str, Any] = {"type": f"{type(component).__module__}.{type(component).__qualname__}"}
    with suppress(PackageNotFoundError, AttributeError):
        found["version"] = version(component.package)  # type: ignore[attr-defined]
    for name, value in (getattr(component, "__dict__", None) or {}).items():
        if isinstance(value, str | int | float | None):
            found[name] = value
        elif is_dataclass(value) and not isinstance(value, type):
            found[name] = asdict(value)
        else:
            found[name] = hashlib.sha256(pickle.dumps(value)).hexdigest()
    return found


def collate_clips(samples: Sequence[Sample], levels: Tensor | None = None) -> VideoTextBatch:
    """A batch of clips with captions.

    Args:
        samples: `pixels` [3,F,Y,X], uint8 or float32 in [-1, 1], `caption`, `id` and `fps` of each clip, with
            the `key` and `weight` that the loader adds; what else they have becomes `fields` of the batch.
        levels: of the batch, for uint8 pixels.
    """
    return VideoTextBatch(
        keys=[sample["key"] for sample in samples],
        sample_weights=torch.tensor([sample["weight"] for sample in samples], dtype=torch.float32),
        ids=[sample["id"] for sample in samples],
        pixels=torch.stack([sample["pixels"] for sample in samples]),
        captions=[sample["caption"] for sample in samples],
        fps=torch.tensor([sample["fps"] for sample in samples], dtype=torch.float32),
        levels=levels,
        fields={name: _column([each[name] for each in samples]) for name in samples[0] if name not in _OWN},
    )


def _column(values: Sequence[Any]) -> Any:
    """The values of a field: pictures of their own size as they are, others stacked."""
    return Ragged.of_pictures(values) if isinstance(values[0], tuple) else default_collate([*values])
