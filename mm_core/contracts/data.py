"""Protocols of datasets and video readers, and the optional capabilities of datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from mm_core.contracts.batch import Batch
from mm_core.contracts.randomness import Randomness

Ending = Literal["done", "stopped", "failed"]
"""How a run's process ends: the run is done, it was saved and stopped on request, or an error ended it."""


@dataclass(frozen=True)
class VideoInfo:
    """The properties of a video file, from its header."""

    width: int  # pixels, after rotation
    height: int  # pixels, after rotation
    fps: float  # average frames per second
    num_frames: int  # as declared or counted
    duration: float  # seconds


class VideoReader(Protocol):
    """A video reader, which decodes selected frames of a video file."""

    def probe(self, path: Path) -> VideoInfo:
        """Reads only the header of a video file.

        Raises:
            DataError: the file is not a readable video.
        """

    def read(self, path: Path, seconds: Sequence[float]) -> Tensor:
        """Decodes the frames of a video shown at the given times into uint8 [F,Y,X,3], red, green and blue.

        Args:
            path: the video.
            seconds: F times from the beginning of the video, in any order; a time may occur twice, and then
                its frame does too.

        Raises:
            DataError: the file is damaged, or shows no frame at one of the times.
        """


@runtime_checkable
class SupportsStream(Protocol):
    """Capability of a video reader that opens a file once, and gives its frames one by one."""

    def stream(
        self, path: Path, choose: Callable[[VideoInfo], Sequence[float]]
    ) -> Iterator[tuple[int, Tensor]]:
        """What `read` returns at the times that `choose` names for what `probe` returns: each frame, uint8
        [Y,X,3], with its place among the times.

        Raises:
            DataError: as `probe` and `read`.
        """


class Transform(Protocol):
    """A transform of decoded frames into the pixels of a sample, called in data workers."""

    def pixels(self, frames: Tensor, height: int, width: int, rng: Randomness | None) -> Tensor:
        """The pixels of a sample, uint8 [3,F,height,width], the same way for all its frames.

        Args:
            frames: uint8 [F,Y,X,3] of any size, red, green and blue.
            height: of the result; another one in each bucket.
            width: of the result.
            rng: of the sample, for random choices; None: without them (validation).

        Raises:
            DataError: the frames cannot be used; the sample is skipped, counted and listed.
        """


@runtime_checkable
class SupportsFrameByFrame(Protocol):
    """Capability of a transform that needs not all frames of a clip at once."""

    def frame_by_frame(
        self, source: tuple[int, int], height: int, width: int, rng: Randomness | None
    ) -> Callable[[Tensor], Tensor]:
        """What `pixels` does, as a function of one frame, uint8 [Y,X,3], that returns uint8 [3,height,width].

        Args:
            source: height and width of the frames.
            height: of the result.
            width: of the result.
            rng: as in `pixels`.
        """


@runtime_checkable
class SupportsLevels(Protocol):
    """Capability of a transform whose pixels do not stand for -1 (black) to 1 (white)."""

    @property
    def levels(self) -> Tensor | None:
        """What each level of red, green and blue stands for on the device, float32 [3,256]; None: -1 to 1."""


class Dataset(Protocol):
    """A map-style dataset of plain dicts. A dataset with random samples is a SupportsSampleAt too.

    A sample depends on its index alone (and on the given randomness), not on what was read before: data
    workers and resumed runs read in other orders.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Reads one sample of the dataset.

        A sample of several parts (conversations that share a row) keeps its readable parts, and has a
        PartsError for the others under `missing`. The loader removes `missing` before `collate`; each
        unreadable part is listed, and counts as its share of the sample.

        Raises:
            DataError: the sample cannot be read; it is then skipped, counted and listed.
            PartsError: no part of the sample can be read.
        """

    def collate(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """Builds a batch from samples, to which the loader has added `key` (SampleKey) and `weight`."""


@runtime_checkable
class SupportsSampleAt(Protocol):
    """Capability of a dataset with random samples (random start frame, crop, flip)."""

    def sample_at(self, index: int, rng: Randomness) -> dict[str, Any]:
        """Reads one sample of the dataset, with all randomness from `rng` (seed, "data", epoch, index).

        Args:
            index: of the sample.
            rng: other random numbers in each epoch, and the same ones when the sample is read again.
        """


@runtime_checkable
class SupportsLengths(Protocol):
    """Capability of a dataset that knows the lengths of its samples, to batch samples of similar length."""

    def lengths(self) -> Tensor:
        """The lengths [N] int64 of the dataset's samples on the CPU, in any unit (bytes, tokens, frames)."""


@runtime_checkable
class SupportsWork(Protocol):
    """Capability of a dataset whose samples hold more work than their lengths show, such as images."""

    def work_at(self, index: int, rng: Randomness) -> int:
        """This work of a sample, in any unit (tokens of images), to share it evenly among ranks.

        All ranks make the first call together.

        Args:
            index: of the sample.
            rng: as of `SupportsSampleAt.sample_at`.
        """


@runtime_checkable
class SupportsCheckMicroBatch(Protocol):
    """Capability of a dataset class whose options limit the number of samples per batch.

    The plan calls the class before any file is opened.
    """

    @classmethod
    def check_micro_batch(cls, size: int, options: Mapping[str, Any]) -> None:
        """Checks the number of samples per micro-batch against the dataset's options.

        Args:
            size: samples per micro-batch.
            options: the options from the config, with defaults filled in.

        Raises:
            ContractError: no batch can have this many samples.
        """


@runtime_checkable
class SupportsBatchSpecs(Protocol):
    """Capability of a dataset class whose batches have several sizes."""

    @classmethod
    def batch_specs(cls, options: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """What `Task.check` is called with for each size of the dataset's batches, by a name for messages.

        Args:
            options: the options from the config, with defaults filled in.
        """


@runtime_checkable
class SupportsRowSizes(Protocol):
    """Capability of a dataset that reads its rows in any size, for the loader's mode `variable`.

    A row is an image or clip; the samples of an epoch may use rows several times, or leave some out.
    """

    def row_sizes(self) -> Tensor:
        """Frames, height and width of each row, int64 [R,3], before anything is decoded; 0: unknown.

        All ranks call it together.
        """

    def epoch_rows(self, epoch: int) -> Tensor:
        """The number of the row of each sample in an epoch, int64 [N]."""

    def sample_of(self, row: int, size: tuple[int, int, int], rng: Randomness | None) -> dict[str, Any]:
        """Reads a row as a sample of a size.

        Args:
            row: number of the row.
            size: frames, height and width of the sample.
            rng: as in `SupportsSampleAt`; None: without random choices.

        Raises:
            DataError: the row cannot be read, or is shorter.
        """


@dataclass(frozen=True)
class Source:
    """What decides a sample, known without decoding anything: the feature cache's keys are made of it.

    Attributes:
        id: name of the sample for reports.
        caption: its text; None if it has none.
        made: everything in the config of the dataset that changes what is read of a file: frames, size, rate,
            transform, reader. Rows that are read alike may share one mapping.
        path: the file; None for samples that are drawn, which `made` and `drawn` describe completely.
        span: first byte and number of bytes of a member of an archive; None: all of the file.
        drawn: what was drawn at random for this sample, such as the start of a clip.
        fields: the further fields of the sample by name: files, several pictures, and numbers as they are.
    """

    id: str
    caption: str | None
    made: Mapping[str, Any]
    path: Path | None = None
    span: tuple[int, int] | None = None
    drawn: tuple[float | int | str, ...] = ()
    fields: Mapping[str, Path | float | tuple[Path, ...]] = field(default_factory=dict)


@runtime_checkable
class SupportsSources(Protocol):
    """Capability of a dataset whose samples can be cached: it describes them without decoding anything."""

    def num_sources(self) -> int:
        """Number of rows that `source_of` describes: for most datasets their samples."""

    def source_of(self, row: int, size: tuple[int, int, int] | None, rng: Randomness | None) -> Source:
        """What decides the sample of a row.

        Args:
            row: number of the row, as in `SupportsRowSizes`; the sample's index for other datasets.
            size: frames, height and width, for datasets that read a row in any size; None: the dataset's own.
            rng: as the one with which the sample is read.

        Raises:
            DataError: the sample cannot be read, as far as this is known.
        """


@runtime_checkable
class SupportsRendered(Protocol):
    """Capability of a dataset of texts: it shows what the model reads and learns, for `mm data inspect`."""

    def rendered(self, index: int) -> Sequence[tuple[str, bool]]:
        """The text of a sample in pieces, each with whether it is learnt.

        Raises:
            DataError: the sample cannot be read.
        """


@runtime_checkable
class SupportsPictures(Protocol):
    """Capability of a dataset of texts about pictures: `mm data inspect --page` shows them, and some of each
    kind."""

    def contents(self, index: int) -> Sequence[tuple[str, str]]:
        """Source and kind, such as `image` or `.png`, of what a sample has, before any file is opened."""

    def pictures(self, index: int) -> Sequence[tuple[str, Tensor]]:
        """Name and frames, uint8 [F,Y,X,3], of each image and video of a sample, as the model is shown it.

        Raises:
            DataError: the sample cannot be read.
        """


@runtime_checkable
class SupportsEvaluated(Protocol):
    """Capability of a dataset class with options that are only for training."""

    @classmethod
    def evaluated(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The dataset's options, as in a config, for evaluating other rows one by one."""


@runtime_checkable
class SupportsClassNames(Protocol):
    """Capability of a dataset or task with class names, on which a run's datasets and task must agree."""

    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, in the order of their numbers; () if classes have only numbers."""
