"""What a run reads: videos, and datasets with what some of them offer beside their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from mm_core.contracts.batch import Batch
from mm_core.contracts.randomness import Randomness

Ending = Literal["done", "stopped", "failed"]
"""How a run's process ends: with the run, saved and stopped before that on request, or by an error."""


@dataclass(frozen=True)
class VideoInfo:
    """What a container's header says. width, height in pixels after rotation; fps in 1/s (average);
    num_frames as declared or counted; duration in seconds."""

    width: int
    height: int
    fps: float
    num_frames: int
    duration: float


class VideoReader(Protocol):
    """Decodes chosen frames of a video file."""

    def probe(self, path: Path) -> VideoInfo:
        """Reads the header only. DataError for what is no readable video."""

    def read(self, path: Path, seconds: Sequence[float]) -> Tensor:
        """Frames shown at the given times -> uint8 [F,Y,X,3]. DataError for damaged files."""


class Dataset(Protocol):
    """Map-style samples: plain dicts. One that draws at random also is a SupportsSampleAt."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample. DataError when it cannot be read: it is then skipped, counted and listed.

        One that is made of several parts (conversations that share a row) has a PartsError of those that
        cannot be read under `missing`, and holds the others; where none is left, it raises that error. The
        loader takes `missing` off before `collate`; each part is listed, and counts as its share of the
        sample."""

    def collate(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """Samples -> batch. The loader has added `key` (SampleKey) and `weight` to each sample."""


@runtime_checkable
class SupportsSampleAt(Protocol):
    """A dataset whose samples depend on chance (random start frame, crop, flip)."""

    def sample_at(self, index: int, rng: Randomness) -> dict[str, Any]:
        """Like `__getitem__`, with all chance taken from `rng` (seed, "data", epoch, index)."""


@runtime_checkable
class SupportsLengths(Protocol):
    """A dataset that knows how long its samples are, so that batches of like ones can be made of them."""

    def lengths(self) -> Tensor:
        """[N] int64 on CPU, by any measure that grows with the cost of a sample: bytes, tokens, frames."""


@runtime_checkable
class SupportsCheckMicroBatch(Protocol):
    """A dataset class whose options limit how many samples a batch may hold. The plan asks the class itself,
    before anything is opened or measured."""

    @classmethod
    def check_micro_batch(cls, size: int, options: Mapping[str, Any]) -> None:
        """ContractError where `size` samples make no batch. options: the config's, defaults filled."""


@runtime_checkable
class SupportsEvaluated(Protocol):
    """A dataset class with options that suit training alone."""

    @classmethod
    def evaluated(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The options, written as in a config, that read other rows to evaluate them one by one."""


@runtime_checkable
class SupportsClassNames(Protocol):
    """A dataset or a task that has names for classes. Those of a run's datasets must be its task's."""

    def class_names(self) -> tuple[str, ...]:
        """In the order of their numbers; () where classes have numbers alone."""
