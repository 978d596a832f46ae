"""Micro-batches in the order of a run's samples, read ahead by worker processes."""

from __future__ import annotations

import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from mm_core.contracts import (
    Batch,
    DataRanks,
    Dataset,
    FailureRecord,
    FeatureBatch,
    Randomness,
    SupportsSampleAt,
    VideoTextBatch,
    generators_kept,
    seed_generators,
)
from mm_core.data.loading.bucketed import BucketedSamples, BucketOrder
from mm_core.data.loading.plain import PlainSamples
from mm_core.data.loading.sampler import Order, Slots, SlotSpec
from mm_core.data.loading.skipped import UnreadableError, records_of
from mm_core.data.loading.workers import StartWorker, read_by_workers, read_on, start_server
from mm_core.data.media.limits import DecodeLimit
from mm_core.errors import DataError, MMError, PartsError, RunWarning
from mm_core.plugin.authors import author_line
from mm_core.plugin.checks.places import place_of
from mm_core.plugin.local import LocalFile, import_again, imported_files

T = TypeVar("T")

Transform = Callable[[Batch], Batch]
"""A task's batch transform."""

_FIRST = 2  # clips whose range is looked at: one alone may be bright
_MOST = 1.001  # the largest value of a pixel, with what rounding adds


class WorkerTraceback(Exception):
    """The traceback of an error in a data worker: the cause of the DataError that names the sample."""


class CodeError(DataError):
    """An error in the code of a dataset, collate or batch transform (not a DataError): never skipped."""


@dataclass(frozen=True)
class Fault:
    """An error sent from a worker as a value, because torch rewrites raised exceptions."""

    error: MMError
    trace: str

    @classmethod
    def of(cls, error: MMError) -> Fault:
        """An error with the traceback of its cause."""
        cause = error.__cause__ or error
        return cls(error, "\n" + "".join(traceback.format_exception(cause)))


def faults_raised(items: Iterator[T | Fault], seen: Callable[[T], None] = lambda _: None) -> Iterator[T]:
    """What workers send; an error that they send is raised.

    Args:
        items: what they send.
        seen: is given each item.
    """
    try:
        for item in items:
            if isinstance(item, Fault):
                raise item.error from WorkerTraceback(item.trace)
            seen(item)
            yield item
    finally:
        del items  # a traceback may keep this frame alive, and with it the workers


class PixelRange:
    """Warns if the first clips of a dataset are from 0 to 1, as if scaled by `/ 255`: training would go on.

    It reads the host's copy of the first batches, and nothing of later ones.

    Args:
        code: names the dataset.
    """

    def __init__(self, code: AuthorCode) -> None:
        self.code, self.left = code, _FIRST

    def __call__(self, batch: object) -> None:
        if self.left <= 0 or not isinstance(batch, VideoTextBatch) or batch.pixels is None:
            return
        if not batch.pixels.is_floating_point() or not batch.pixels.numel():
            self.left = 0
            return
        least, most = map(float, batch.pixels.aminmax())
        # A clip of one colour shows no range.
        self.left = 0 if least < 0 else self.left - len(batch.pixels) * (most > least)
        if self.left <= 0 <= least:
            warnings.warn(
                f"{self.code.place}: the pixels of its first clips are from 0 to 1: -1 is black and 1 is "
                "white, so black would be mid-grey; if they were divided by 255, add `* 2 - 1`, "
                "or return uint8",
                RunWarning,
                stacklevel=2,
            )


class MicroBatchLoader:
    """Iterates over the micro-batches of one data-parallel rank in some steps.

    Each step yields `per_step` micro-batches. Their content depends only on (dataset, order, rng, rank,
    data_parallel, step), not on workers, prefetch or the first step, so a resumed run needs no state.

    A sample that raises DataError is replaced by the first readable one of the order's `replacements`, with
    the key and weight of the first. The batch lists it in `failures`; of a sample that raised a PartsError,
    or that was read without some of its parts, it lists each unreadable part.

    The process's own generators (random, NumPy, torch on CPU) are seeded before each sample is read, from
    (seed, epoch, index), and before each batch is collated and transformed, from the keys of its rows.

    Args:
        dataset: map-style; if it satisfies SupportsSampleAt, it gets rng.at("data", epoch, index).
        order: which samples each step reads, and which replace an unreadable one.
        batch_transform: applied to each collated batch in the worker (`Task.batch_transform()`).
        rng: the root of the run's randomness.
        share: which share of the data this rank reads.
        steps: the steps to read, from 0.
        workers: number of worker processes; 0 reads in this process.
        prefetch: micro-batches each worker keeps ready.
        pin_memory: whether to use page-locked memory, unless `device_type` is "cpu".
        device_type: type of the device that batches are copied to.
        decode_seconds: how long a worker may decode one file: longer ones are unreadable. None: no limit.

    Raises (while iterating):
        UnreadableError: a sample and all its replacements are unreadable.
        CodeError: the dataset, its collate or the transform raises anything else.
        DataError: a worker dies.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: Order,
        *,
        batch_transform: Transform | None,
        rng: Randomness,
        share: DataRanks,
        steps: range,
        workers: int,
        prefetch: int,
        pin_memory: bool,
        device_type: str,
        decode_seconds: float | None = None,
    ) -> None:
        self.per_step = len(order.micro_batches(0, share.rank, share.count))
        self._length = len(steps) * self.per_step
        self._sent = (dataset, order, batch_transform, rng)
        # The server starts first: it may move the folder in which workers register.
        needed = [__name__, *(type(one).__module__ for one in (dataset, order, batch_transform))]
        context = start_server(needed) if workers else None
        limit = None if decode_seconds is None else DecodeLimit(decode_seconds)
        self._slots = Slots(order, share, steps, self.per_step)
        self._loader: DataLoader[Batch | Fault] = DataLoader(
            _Reading(*self._sent),
            batch_size=None,
            sampler=self._slots,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            pin_memory=pin_memory and device_type != "cpu",
            worker_init_fn=StartWorker(limit) if workers else None,
            multiprocessing_context=context,
            generator=torch.Generator().manual_seed(0),  # torch's draw must not advance the global generator
        )

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        """Starts the data workers, then yields micro-batches. The workers end with the iterator."""
        code = AuthorCode(self._sent[0], None, self._sent[-1])
        return faults_raised(read_on(self._started(0), self._started), PixelRange(code))

    def _started(self, first: int) -> Iterator[Batch | Fault]:
        self._slots.first = first
        return read_by_workers(self._loader, self._sent)


class AuthorCode:
    """The code of a dataset and a task as a data worker calls it: what it returns is checked, its errors are
    named, and it is pickled with its one-file plugins.

    Args:
        dataset: the author's.
        transform: the task's batch transform.
        rng: the root of the run's randomness.
    """

    def __init__(self, dataset: object, transform: Transform | None, rng: Randomness) -> None:
        holds = isinstance(dataset, PlainSamples | BucketedSamples | DataLoader)
        self.author: Any = dataset.dataset if holds else dataset  # type: ignore[attr-defined]
        self.transform, self.rng = transform, rng

    def __getstate__(self) -> tuple[bytes, dict[str, LocalFile]]:
        """State for a worker: the pickled object, and the one-file plugins to import before unpickling."""
        try:
            return bytes(ForkingPickler.dumps(self.__dict__)), imported_files()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise DataError(
                f"the dataset, its order or the batch transform cannot be sent to a data worker: {error}",
                where=type(self.author).__qualname__,
                accepted="objects that pickle: classes and functions of modules; files opened on first use",
                hint="make it picklable, or set data.loader.workers=0 to read in the training process",
            ) from error

    def __setstate__(self, state: tuple[bytes, dict[str, LocalFile]]) -> None:
        pickled, files = state
        import_again(files)
        self.__dict__.update(pickle.loads(pickled))

    def finished(self, batch: Any, rows: Sequence[int], who: str) -> Batch:
        """The batch that `who` returned, after the task's transform, which is seeded by the rows' numbers."""
        ready: Batch = self.checked(batch, Batch, who, "a Batch")
        if self.transform is not None and not isinstance(ready, FeatureBatch):
            seed_generators(self.rng.at("transform", *rows))
            with self.guarded("the task's batch transform"):
                ready = self.checked(self.transform(ready), Batch, "what batch_transform returns", "a Batch")
        self._check_pixels(batch if isinstance(batch, VideoTextBatch) else ready)
        return ready

    def checked(self, found: T, wanted: type, who: str, accepted: str) -> T:
        """What the code of a dataset or task returned. CodeError if it is of another type."""
        if isinstance(found, wanted):
            return found
        named = wanted is Mapping and isinstance(found, (tuple, list))
        hint = "name the values: return {name: value, ...}" if named else "fix this code"
        raise CodeError(f"{who} is a {type(found).__name__}", where=self.place, accepted=accepted, hint=hint)

    def _check_pixels(self, batch: Batch) -> None:
        """CodeError if pixels of clips and further fields are neither uint8 nor floats in [-1, 1]: they would
        train without any sign."""
        for name, rows in batch.pixel_fields() if isinstance(batch, VideoTextBatch) else ():
            for sample, own in zip(batch.ids, rows, strict=False):
                for pixels in own:
                    if pixels.dtype == torch.uint8 or not pixels.numel():
                        continue
                    least, most = map(float, pixels.aminmax())
                    if not (pixels.is_floating_point() and least >= -_MOST and most <= _MOST):  # NaN too
                        raise self._out_of_range(sample, name, pixels, least, most)

    def _out_of_range(self, sample: str, name: str, pixels: Tensor, least: float, most: float) -> CodeError:
        of = "" if pixels.is_floating_point() else f" of {pixels.dtype}"
        overshoots = not of and max(-least, most) < 2
        scale = "scale them in the dataset, such as by `pixels / 127.5 - 1` from 0 to 255"
        return CodeError(
            f"the {name} of sample {sample} are from {least:.4g} to {most:.4g}{of}",
            where=self.place,
            accepted="floats from -1 (black) to 1 (white), or uint8",
            hint="a bicubic resize overshoots: end it with `.clamp(-1, 1)`" if overshoots else scale,
        )

    @property
    def place(self) -> str:
        """The dataset's class, with its file and line."""
        return f"{type(self.author).__qualname__}, {place_of(type(self.author), type(self.author))}"

    def _line_of(self, error: Exception) -> str:
        """The innermost line of a plugin, or in the files of the dataset and the transform."""
        if line := author_line(error):
            return line
        names = [getattr(one, "__module__", "") for one in (self.author, self.transform)]
        own = {getattr(sys.modules.get(name), "__file__", None) for name in names}
        lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in own]
        return f"{lines[-1].filename}, line {lines[-1].lineno}" if lines else self.place

    @contextmanager
    def guarded(self, who: str) -> Iterator[None]:
        """Turns an error in foreign code into a CodeError, which stops the run: nothing is skipped for it."""
        try:
            yield
        except MMError:
            raise
        except Exception as error:
            raise CodeError(
                f"{who} raised {type(error).__name__}: {error}",
                where=self._line_of(error),
                hint="fix this code; set MM_DEBUG=1 to see the worker's traceback",
            ) from error


class _Reading(AuthorCode, TorchDataset[Batch | Fault]):
    """The work of a data worker: rows -> samples -> batch -> transformed batch."""

    def __init__(self, dataset: Dataset, order: Order, transform: Transform | None, rng: Randomness) -> None:
        super().__init__(dataset, transform, rng)
        self.dataset, self.order = dataset, order

    def __getitem__(self, slots: list[SlotSpec]) -> Batch | Fault:
        # In a worker nothing else uses the generators; in the training process their state must be kept.
        with nullcontext() if get_worker_info() else generators_kept():
            try:
                return self._batch(slots)
            except MMError as error:
                return Fault.of(error)

    def _batch(self, slots: list[SlotSpec]) -> Batch:
        failures: list[FailureRecord] = []
        samples = self._samples(slots, failures)
        rows = [number for slot in slots for number in slot.key]
        seed_generators(self.rng.at("collate", *rows))
        with self.guarded("the dataset's collate"):
            collated = self.dataset.collate(samples)
        batch = self.finished(collated, rows, "what collate returns")
        batch.failures = failures
        return batch

    def _samples(self, slots: list[SlotSpec], failures: list[FailureRecord]) -> list[dict[str, object]]:
        if isinstance(self.order, BucketOrder):
            return self._in_bucket(self.order, slots, failures)
        return [self._sample(slot, failures, self.order.replacements(slot.key)) for slot in slots]

    def _in_bucket(
        self, order: BucketOrder, slots: list[SlotSpec], failures: list[FailureRecord]
    ) -> list[dict[str, object]]:
        """Leaves out the samples that nothing of their bucket can replace; if it is all of them, one of
        another bucket takes their place, so that every step counts."""
        samples: list[dict[str, object]] = []
        for slot in slots:
            try:
                samples.append(self._sample(slot, failures, order.replacements(slot.key)))
            except UnreadableError as error:
                failures[:] = dict.fromkeys([*failures, *error.failures])
        return samples or [self._sample(slots[0], failures, order.elsewhere(slots[0].key))]

    def _sample(
        self, slot: SlotSpec, failures: list[FailureRecord], replacements: Iterator[int]
    ) -> dict[str, object]:
        """The slot's sample, or the first readable replacement if it is unreadable."""
        tried: list[FailureRecord] = []
        for index in chain([slot.key.index], replacements):
            try:
                sample = self._read(index, slot.key.epoch)
            except CodeError:
                raise
            except DataError as error:
                tried += records_of(error, index, replaced=True)
                continue
            missing = sample.get("missing")
            if isinstance(missing, PartsError):
                tried += records_of(missing, index, replaced=False)
                sample = {name: value for name, value in sample.items() if name != "missing"}
            failures.extend(failure for failure in tried if failure not in failures)
            return {**sample, "key": slot.key, "weight": slot.weight}
        shown = "; ".join(f"{failure.id}: {failure.reason}" for failure in tried[:3])
        raise UnreadableError(
            f"sample {slot.key.index} and {len({f.index for f in tried}) - 1} others tried in its place "
            f"could not be read: {shown}",
            failures + tried,
            where="data.train",
            hint="check the file that lists the samples and the paths in it; skipped.jsonl in the run's"
            " folder lists the samples that failed",
        )

    def _read(self, index: int, epoch: int) -> dict[str, object]:
        seed_generators(self.rng.at("draws", epoch, index))
        with self.guarded(f"sample {index}"):
            if isinstance(self.dataset, SupportsSampleAt):
                sample = self.dataset.sample_at(index, self.rng.at("data", epoch, index))
            else:
                sample = self.dataset[index]
            return self.checked(sample, Mapping, f"sample {index}", "a plain dict")
