"""The buckets of a run: derived from what its task takes, checked, and filled with the rows of a dataset."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mm_core.config.sections import RunConfig
from mm_core.contracts import SupportsRowSizes, TaskModule
from mm_core.data.loading.bucketed import BucketedSamples, BucketOrder, SizedDataset
from mm_core.data.loading.buckets import Bucket, Grid, derived, nearest
from mm_core.data.loading.plain import rows_of
from mm_core.errors import ContractError, DataError, PlanError, RunWarning, plural
from mm_core.plan.samples import InBuckets, Samples
from mm_core.plugin.checks.values import returned
from mm_core.schema.fields import ComponentConfig

_LARGEST_PERIOD = 256


@dataclass(frozen=True)
class BucketFact:
    """One bucket in the plan of a run."""

    num_frames: int
    height: int
    width: int
    micro_batch_size: int
    samples: int  # per epoch
    padded: int  # rows of weight 0 per epoch
    dropped: int  # samples per epoch


def mean_step(order: BucketOrder, options: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], float]]:
    """The dataset's options with the size of each bucket, and its samples in the mean step of an epoch."""
    counts = zip(order.samples.buckets, order.counts(), strict=True)
    steps = order.batches_per_epoch
    return [(_spec(options, bucket.size), sum(count[:2]) / steps) for bucket, count in counts]


def bucket_facts(order: BucketOrder) -> tuple[BucketFact, ...]:
    """The buckets of an order, with the samples of an epoch."""
    return tuple(
        BucketFact(*bucket.size, bucket.micro_batch_size, *counts)
        for bucket, counts in zip(order.samples.buckets, order.counts(), strict=True)
    )


def check_sizes_set(config: RunConfig, class_: object, options: Mapping[str, Any], split: str) -> None:
    """Checks that the size of a dataset's samples is set once: by the dataset, or by the loader's buckets.

    Args:
        config: of the run.
        class_: of the dataset.
        options: of the dataset.
        split: its key under `data`.

    Raises:
        ContractError: it is not, or the dataset reads its samples in one size.
    """
    any_size = isinstance(class_, SupportsRowSizes)
    if config.data.loader.mode == "variable":
        if not any_size:
            raise ContractError(
                f"the dataset {getattr(class_, '__name__', class_)} reads its samples in one size",
                where=f"data.{split}",
                accepted="datasets that are SupportsRowSizes, such as media_text",
                hint="set data.loader.mode: sampler",
            )
        if options.get("height") is not None:
            raise ContractError(
                "height and width would be ignored: the loader's buckets set the sizes",
                where=f"data.{split}.height",
                accepted="max_height and max_width",
                hint="rename them, or set data.loader.mode: sampler",
            )
    elif any_size and options.get("height", 0) is None:
        raise ContractError(
            "the size of the samples is not set",
            where=f"data.{split}",
            accepted="height and width, or data.loader.mode: variable with max_height and max_width",
        )


def in_buckets(config: RunConfig, task: TaskModule, datasets: Mapping[str, Any]) -> dict[str, Samples]:
    """The datasets of a run by split as it reads them: in buckets if the loader's mode is `variable`. A
    collective call."""
    if config.data.loader.mode != "variable":
        return {
            name: Samples(each, each if rows_of(each) is None else None) for name, each in datasets.items()
        }
    sections = config.data.splits
    return {
        name: InBuckets(bucketed(config, task, sections[name], each, name)) for name, each in datasets.items()
    }


def bucketed(
    config: RunConfig, task: TaskModule, section: ComponentConfig, dataset: SizedDataset, split: str
) -> BucketedSamples:
    """The samples of a dataset in the buckets of `data.loader`. All ranks call it together.

    Args:
        config: of the run.
        task: decides which sizes there are.
        section: the dataset's.
        dataset: the samples.
        split: the section's key under `data`.

    Raises:
        ContractError: the task takes no such size, or the dataset has no rows of any size.
        DataError: no sample fits a bucket.
    """
    loader = config.data.loader
    offered, rows, numbers = filled(config, task, section, dataset)
    counts = numbers[numbers >= 0].bincount(minlength=len(offered.sizes))
    known = (rows > 0).all(1)
    if not int(known.sum()):
        hint = "`mm data check` lists each with its reason"
        raise DataError("no image or clip can be read", where=f"data.{split}", hint=hint)
    if not int(counts.sum()):
        raise DataError(
            f"no image or clip of data.{split} fits a bucket: {_shown(rows[known])}",
            where="data.loader.buckets",
            accepted="; ".join(size_named(size) for size in [*offered.sizes][:3]),
            hint=f"{why_unused(rows[known], offered, loader.upscale)}; or set smaller limits or buckets",
        )
    if unread := len(rows) - int(known.sum()):
        what = f"{plural(unread, 'file')} of data.{split} cannot be read; `mm data check` lists them"
        warnings.warn(what, RunWarning, stacklevel=2)
    if len(lost := rows[known & (numbers < 0)]):
        first = size_named(lost[0].tolist())
        what = f"no bucket fits {plural(len(lost), 'row')} of data.{split}, such as {first}, so they are not"
        what += f" used: {why_unused(lost, offered, loader.upscale)}"
        warnings.warn(what, RunWarning, stacklevel=2)
    if pictures := single_pictures(rows, offered, numbers):
        warnings.warn(f"data.{split}: {pictures}", RunWarning, stacklevel=2)
    kept = counts.nonzero().flatten().tolist()
    empty = [size_named(size) for n, size in enumerate(offered.sizes) if n not in kept]
    if loader.buckets != "auto" and empty:
        what = f"no image or clip of data.{split} is nearest to the bucket {', '.join(empty)}"
        warnings.warn(what, RunWarning, stacklevel=2)
    # What cannot be read is drawn with the others, fails, and is listed with its reason.
    numbers[~known] = int(counts.argmax())
    again = torch.full((len(offered.sizes) + 1,), -1, dtype=torch.int64)  # the last one is for -1
    again[kept] = torch.arange(len(kept))
    chosen = offered.batched(kept, config.train.micro_batch_size)
    if split == "train":
        check_sizes(task, section.options, [bucket.size for bucket in chosen])
    return BucketedSamples(dataset, chosen, again[numbers])


def filled(
    config: RunConfig, task: TaskModule, section: ComponentConfig, dataset: SizedDataset
) -> tuple[OfferedBuckets, Tensor, Tensor]:
    """The buckets that rows choose from; frames, height and width of each row, int64 [R,3], 0: its file
    cannot be read; the number of its bucket, int64 [R], -1: none fits. A collective call.

    Args:
        config: of the run.
        task: decides which sizes there are.
        section: the dataset's.
        dataset: the samples.

    Raises:
        ContractError: the task takes no such size.
    """
    offered = offered_buckets(config, task, section.options)
    rows: Tensor = returned(SupportsRowSizes.row_sizes, dataset.row_sizes(), dataset)
    return offered, rows, nearest(rows, list(offered.sizes), config.data.loader.upscale)


def why_unused(rows: Tensor, offered: OfferedBuckets, upscale: bool) -> str:
    """Why the first of rows that fit no bucket does not, and what helps."""
    frames, shortest = int(rows[0, 0]), min(size[0] for size in offered.sizes)
    if frames < shortest:
        media = "images, which have one frame" if frames == 1 else f"clips of {plural(frames, 'frame')}"
        return f"the shortest bucket has {plural(shortest, 'frame')}, too many for {media}"
    if upscale:
        return "it has another shape than every bucket"
    return "too small in height or width; data.loader.upscale: true enlarges them"


def single_pictures(rows: Tensor, offered: OfferedBuckets, numbers: Tensor) -> str:
    """How many clips are in buckets of one frame, in words; empty if none is.

    Args:
        rows: frames, height and width of each row, int64 [R,3].
        offered: the buckets.
        numbers: that of each row's bucket, int64 [R]; -1: none fits.
    """
    frames = torch.tensor([size[0] for size in offered.sizes])[numbers]
    clips = rows[(numbers >= 0) & (frames == 1) & (rows[:, 0] > 1)]
    if not len(clips):
        return ""
    such, one = size_named(clips[0].tolist()), len(clips) == 1
    reads = f"{plural(len(clips), 'clip')} {'is a single picture' if one else 'are single pictures'}"
    return f"{reads}, such as {such}: no bucket of more frames fits {'it' if one else 'them'}"


def _shown(rows: Tensor) -> str:
    least, most = rows.amin(0).tolist(), rows.amax(0).tolist()
    sides = zip(("frames", "high", "wide"), least, most, strict=True)
    return ", ".join(f"{low if low == high else f'{low} to {high}'} {name}" for name, low, high in sides)


@dataclass(frozen=True)
class OfferedBuckets:
    """The sizes of buckets that a dataset's rows choose from.

    Attributes:
        grid: the sizes that the task takes.
        sizes: (frames, height, width), the largest first -> samples of a micro-batch, if the config sets it.
    """

    grid: Grid
    sizes: Mapping[tuple[int, int, int], int | None]

    def batched(self, used: Sequence[int], micro_batch_size: int) -> tuple[Bucket, ...]:
        """The buckets that are used, by their numbers, with as many tokens in a micro-batch as the first."""
        sizes = [*self.sizes]
        budget = self.grid.tokens(sizes[used[0]]) * micro_batch_size
        return tuple(
            Bucket(*sizes[n], self.sizes[sizes[n]] or max(1, budget // self.grid.tokens(sizes[n])))
            for n in used
        )


def check_buckets(config: RunConfig, task: TaskModule, options: Mapping[str, Any]) -> None:
    """Checks, before any data is opened, what decides the buckets of a dataset.

    Args:
        config: of the run.
        task: must take each listed bucket.
        options: of the dataset.

    Raises:
        ContractError: it does not, or `auto` has no limits.
    """
    task.check(options)  # what is wrong whatever the size is
    if config.data.loader.buckets == "auto":
        _limits(options)
        return
    listed = [(each.num_frames, each.height, each.width) for each in config.data.loader.buckets]
    check_sizes(task, options, sorted(listed, key=math.prod, reverse=True))


def _limits(options: Mapping[str, Any]) -> tuple[int, int]:
    high, wide = options.get("max_height"), options.get("max_width")
    if high is None or wide is None:
        raise ContractError(
            "buckets: auto has no limits",
            where="data",
            accepted="max_height and max_width of the dataset, in the place of height and width",
            hint="set them, or list data.loader.buckets",
        )
    return high, wide


def offered_buckets(config: RunConfig, task: TaskModule, options: Mapping[str, Any]) -> OfferedBuckets:
    """The buckets that a run offers to the rows of a dataset.

    Args:
        config: of the run.
        task: decides which sizes there are.
        options: of the dataset.

    Raises:
        ContractError: there are none, or the task does not take one of them.
    """
    loader = config.data.loader
    if loader.buckets != "auto":
        listed = {(each.num_frames, each.height, each.width): each for each in loader.buckets}
        grid = grid_of(task, options, max(size[0] for size in listed))
        sizes = sorted(listed, key=lambda size: (-grid.tokens(size), size))
        return OfferedBuckets(grid, {size: listed[size].micro_batch_size for size in sizes})
    high, wide = _limits(options)
    grid = grid_of(task, options, int(options["num_frames"]))
    sizes = derived(grid, high, wide)
    if loader.group_frame and not loader.group_resolution:
        whole = (high // grid.period * grid.period, wide // grid.period * grid.period)
        sizes = [*dict.fromkeys((size[0], *whole) for size in sizes if all(whole))]
    if loader.group_resolution and not loader.group_frame:
        sizes = [size for size in sizes if size[0] in (1, grid.frames[-1])]
    if not sizes:
        what = f"no clip of {high} x {wide} divides into patches of {grid.period}"
        raise ContractError(what, where="data.train.max_height", hint="raise max_height and max_width")
    return OfferedBuckets(grid, dict.fromkeys(sizes))


def size_named(size: Sequence[int]) -> str:
    """Frames, height and width in words."""
    return " x ".join(map(str, size))


def check_sizes(task: TaskModule, options: Mapping[str, Any], sizes: Sequence[tuple[int, int, int]]) -> None:
    """Checks a task against clips of each bucket, the first one first: it is what the task trains for.

    Raises:
        ContractError: the task does not take them.
    """
    for size in sizes:
        try:
            task.check(_spec(options, size))
        except ContractError as fault:
            what = f"the bucket {size_named(size)} is not a size that the task takes: {fault.what}"
            raise ContractError(
                what, where="data.loader.buckets", accepted=fault.accepted, hint=fault.hint
            ) from None


def grid_of(task: TaskModule, options: Mapping[str, Any], longest: int) -> Grid:
    """The sizes of clips that a task takes, found by its own `check`.

    Args:
        task: the run's.
        options: of the dataset.
        longest: the largest number of frames.

    Raises:
        ContractError: it takes no size.
    """
    asked = copy.copy(task)  # the task may note the first size that it is asked for
    faults: list[ContractError] = []

    def takes(frames: int, side: int) -> bool:
        try:
            asked.check(_spec(options, (frames, side, side)))
        except ContractError as fault:
            faults.append(fault)
            return False
        return True

    period = next((side for frames in (1, longest) for side in _sides() if takes(frames, side)), None)
    if period is None:
        tried = ((frames, 1 << power) for frames in range(longest - 1, 1, -1) for power in range(3, 9))
        period = next((side for frames, side in tried if takes(frames, side)), None)
    if period is None:
        raise faults[0]
    return Grid(tuple(frames for frames in range(1, longest + 1) if takes(frames, period)), period)


def _sides() -> Iterator[int]:
    return chain(range(1, 33), range(40, _LARGEST_PERIOD + 1, 8))


def _spec(options: Mapping[str, Any], size: tuple[int, int, int]) -> dict[str, Any]:
    return {**options, "num_frames": size[0], "height": size[1], "width": size[2]}


def check_group(accumulation: int, buckets_per_step: int) -> None:
    """PlanError unless the micro-batches of a rank in a step divide among the step's buckets."""
    if accumulation % buckets_per_step:
        raise PlanError(
            f"a step of {plural(accumulation, 'micro-batch')} per rank does not divide into"
            f" {plural(buckets_per_step, 'bucket')}",
            where="data.loader.buckets_per_step",
            accepted=", ".join(str(n) for n in range(1, accumulation + 1) if not accumulation % n),
            hint="change it, or train.global_batch_size",
        )
