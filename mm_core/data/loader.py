"""Micro-batches in the plan's order, read ahead by worker processes."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.sharedctypes import RawValue
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from mm_core.contracts import Batch, Dataset, FailureRecord, RandomisedDataset, Randomness
from mm_core.data.sampler import BatchPlan, SlotSpec
from mm_core.data.skipped import UnreadableError
from mm_core.errors import DataError, MMError

T = TypeVar("T")

ATTEMPTS = 8
"""Samples tried in place of an unreadable one before the run is stopped."""


_IGNORED = (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # what asks a run to save, beside SIGTERM
_SIGNALS = {*_IGNORED, signal.SIGTERM}


class WorkerTraceback(Exception):
    """Where in a worker an error arose: the cause of the DataError that names the sample."""


class CodeError(DataError):
    """A dataset, collate or batch transform that raised what is no DataError: never skipped."""


@dataclass(frozen=True)
class _Fault:
    """An error on its way from a worker: returned, because torch rewrites exceptions that are raised."""

    error: MMError
    trace: str


class MicroBatchLoader:
    """Iterates over the micro-batches of one data-parallel rank, steps [start_step, end_step).

    Each step yields its micro-batches one after another, `per_step` of them. The content depends
    on (dataset, plan, rng, rank, data_parallel, step) alone: not on workers, prefetch or the step
    that the loader started at, so a resumed run needs no state.

    A sample that raises DataError is replaced by another one, drawn from (seed, epoch, index,
    attempt), under the key and weight of the first; the batch lists it in `failures`.

    Args:
        dataset: map-style; one that satisfies RandomisedDataset gets rng.at("data", epoch, index).
        plan: which samples, in which order.
        batch_transform: applied to each collated batch in the worker (`Task.batch_transform()`).
        rng: the run's root.
        rank, data_parallel: this rank's place among those that see different samples.
        start_step, end_step: steps already taken, steps in all.
        workers: processes; 0 reads in this one.
        prefetch: micro-batches each worker keeps ready.
        pin_memory: page-locked batches, where `device_type` is not "cpu".

    Raises (while iterating):
        UnreadableError: when a sample and all its replacements are unreadable.
        CodeError: when the dataset, its collate or the transform raises anything else.
        DataError: when a worker dies.
    """

    def __init__(
        self,
        dataset: Dataset,
        plan: BatchPlan,
        *,
        batch_transform: Callable[[Batch], Batch] | None,
        rng: Randomness,
        rank: int,
        data_parallel: int,
        start_step: int,
        end_step: int,
        workers: int,
        prefetch: int,
        pin_memory: bool,
        device_type: str,
    ) -> None:
        self.per_step = len(plan.micro_batches(0, rank, data_parallel))
        self._length = max(0, end_step - start_step) * self.per_step
        self._loader: DataLoader[Any] = DataLoader(
            _Reading(dataset, batch_transform, rng),
            batch_size=None,
            sampler=_Slots(plan, rank, data_parallel, range(start_step, end_step)),
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            collate_fn=_unchanged,
            pin_memory=pin_memory and device_type != "cpu",
            worker_init_fn=_StartWorker(_leaving()),
            generator=torch.Generator().manual_seed(0),  # torch's own draw must not move the global one
        )

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        """Starts the workers, then yields. Closing the iterator (or losing it) ends them."""
        # Workers inherit the mask and lift it when they are ready, so no signal finds them unprepared.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            with _deaths_explained():
                return self._drain(iter(self._loader))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    def _drain(self, items: Iterator[Any]) -> Iterator[Batch]:
        try:
            with _deaths_explained():
                for item in items:
                    if isinstance(item, _Fault):
                        raise item.error from WorkerTraceback(item.trace)
                    yield item
        finally:
            del items  # a traceback may keep this frame; the workers end with the last reference


def worker_death(error: RuntimeError) -> DataError | None:
    """The sentence for torch's report of a dead worker; None for any other error.

    torch's SIGCHLD handler can raise its report anywhere in the training process, between two
    batches too, so the place that prints a run's errors should ask this function as well.
    """
    text = str(error)
    if "DataLoader worker" not in text:
        return None
    killed = "killed by signal" in f"{text} {error.__cause__}"
    return DataError(
        "a data worker was killed" if killed else "a data worker ended unexpectedly",
        where=text.splitlines()[0].strip(),
        hint="the machine may be out of memory or of shared memory (/dev/shm): lower data.loader.workers "
        "or data.loader.prefetch; data.loader.workers=0 reads in the training process",
    )


@contextmanager
def _deaths_explained() -> Iterator[None]:
    """Turns what torch and the operating system say of a lost worker into a DataError."""
    try:
        yield
    except RuntimeError as error:
        death = worker_death(error)
        if death is None:
            raise
        raise death from error
    except (OSError, EOFError) as error:
        # Batches pass as file descriptors that the worker hands over: one that died in between breaks
        # the connection first, and torch's report follows from its signal handler.
        report = _awaited_report()
        if report is None:
            raise DataError(
                f"a batch could not be taken from its data worker: {type(error).__name__}: {error}",
                hint="raise the limit of open files (ulimit -n), or lower data.loader.workers",
            ) from error
        raise report from error


def _awaited_report(seconds: float = 2.0) -> DataError | None:
    """The death of a worker that torch's handler reports in this thread within `seconds`, if any."""
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            time.sleep(0.01)
    except RuntimeError as error:
        return worker_death(error)
    return None


class _Slots:
    """The sampler that torch's DataLoader draws from: one list of rows a micro-batch."""

    def __init__(self, plan: BatchPlan, rank: int, data_parallel: int, steps: range) -> None:
        self.plan, self.rank, self.data_parallel, self.steps = plan, rank, data_parallel, steps

    def __iter__(self) -> Iterator[list[SlotSpec]]:
        for step in self.steps:
            yield from self.plan.micro_batches(step, self.rank, self.data_parallel)


class _Reading(TorchDataset[Any]):
    """What runs in a worker: rows -> samples -> batch -> transformed batch."""

    def __init__(self, dataset: Dataset, transform: Callable[[Batch], Batch] | None, rng: Randomness) -> None:
        self.dataset, self.transform, self.rng = dataset, transform, rng
        self.size = len(dataset)

    def __getitem__(self, slots: list[SlotSpec]) -> Batch | _Fault:
        failures: list[FailureRecord] = []
        try:
            samples = [self._sample(slot, failures) for slot in slots]
            batch = self._guard(lambda: self.dataset.collate(samples), "the dataset's collate")
            if self.transform is not None:
                transform = self.transform
                collated = batch
                batch = self._guard(lambda: transform(collated), "the task's batch transform")
            batch.failures = failures
            return batch
        except MMError as error:
            cause = error.__cause__ or error
            return _Fault(error, "\n" + "".join(traceback.format_exception(cause)))

    def _sample(self, slot: SlotSpec, failures: list[FailureRecord]) -> dict[str, Any]:
        """The slot's sample or, where it is unreadable, the first readable replacement."""
        tried: list[FailureRecord] = []
        for index in self._candidates(slot):
            try:
                sample = self._read(index, slot.key.epoch)
            except CodeError:
                raise
            except DataError as error:
                tried.append(FailureRecord(error.where or f"sample {index}", index, error.what))
                continue
            failures.extend(failure for failure in tried if failure not in failures)
            return {**sample, "key": slot.key, "weight": slot.weight}
        shown = "; ".join(f"{failure.id}: {failure.reason}" for failure in tried[:3])
        raise UnreadableError(
            f"sample {slot.key.index} and {len(tried) - 1} others in its place could not be read: {shown}",
            failures + tried,
            where="data.train",
            hint="check the annotation file and its folder; skipped.jsonl in the run's folder lists them",
        )

    def _candidates(self, slot: SlotSpec) -> Iterator[int]:
        """The slot's own sample, then up to ATTEMPTS others, a function of the slot alone."""
        tried = {slot.key.index}
        yield slot.key.index
        for attempt in range(1, min(ATTEMPTS, self.size - 1) + 1):
            index = self.rng.seed32("replacement", *slot.key, attempt) % self.size
            while index in tried:
                index = (index + 1) % self.size
            tried.add(index)
            yield index

    def _read(self, index: int, epoch: int) -> dict[str, Any]:
        dataset = self.dataset
        if isinstance(dataset, RandomisedDataset):
            rng = self.rng.at("data", epoch, index)
            return self._guard(lambda: dataset.sample_at(index, rng), f"sample {index}")
        return self._guard(lambda: dataset[index], f"sample {index}")

    def _guard(self, call: Callable[[], T], who: str) -> T:
        """A fault of the dataset's code is no unreadable sample: it stops the run, and says where it is."""
        try:
            return call()
        except MMError:
            raise
        except Exception as error:
            raise CodeError(
                f"{who} raised {type(error).__name__}: {error}",
                where=type(self.dataset).__qualname__,
                hint="this is a fault in code, not in the data; MM_DEBUG=1 shows the worker's traceback",
            ) from error


def _unchanged(item: Any) -> Any:
    return item


class _StartWorker:
    """Runs first in every worker: one thread, and no end by a signal to the process group, which
    must not take the readers away before the run has saved. `leaving` says that the training
    process is at its exit: then multiprocessing ends its children by SIGTERM and waits for them."""

    def __init__(self, leaving: Any) -> None:
        self.leaving = leaving

    def __call__(self, worker: int) -> None:
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._terminated)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        torch.set_num_threads(1)

    def _terminated(self, number: int, frame: Any) -> None:
        if self.leaving.value:
            os._exit(0)


@cache
def _leaving() -> Any:
    """A flag in shared memory that is raised when this process exits."""
    flag = RawValue(ctypes.c_bool, False)
    atexit.register(setattr, flag, "value", True)  # registered after multiprocessing's, so run before it
    return flag
