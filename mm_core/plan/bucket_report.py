"""What falls into each bucket of a dataset, and what fits none, in words."""

from __future__ import annotations

import numpy as np
import torch

from mm_core.config.sections import RunConfig
from mm_core.contracts import TaskModule
from mm_core.data.datasets.media_report import Bucketed
from mm_core.data.datasets.media_text import MediaTextDataset
from mm_core.errors import plural
from mm_core.plan.bucketing import (
    check_buckets,
    check_sizes_set,
    filled,
    single_pictures,
    size_named,
    why_unused,
)


def report_buckets(config: RunConfig, task: TaskModule, dataset: MediaTextDataset, split: str) -> Bucketed:
    """What an epoch of a dataset has in each bucket, and the rows in none.

    Args:
        config: of a run whose loader's mode is `variable`.
        task: decides which sizes there are.
        dataset: the samples.
        split: their key under `data`.

    Raises:
        ContractError: the config has no buckets that the task takes.
    """
    section, upscale = config.data.splits[split], config.data.loader.upscale
    check_sizes_set(config, type(dataset), section.options, split)
    check_buckets(config, task, section.options)
    offered, rows, numbers = filled(config, task, section, dataset)
    known = (rows > 0).all(1)
    taken = numbers[dataset.epoch_rows(0)]
    counts = taken[taken >= 0].bincount(minlength=len(offered.sizes))
    used = numbers[numbers >= 0].bincount().nonzero().flatten().tolist()
    buckets = offered.batched(used, config.train.micro_batch_size) if used else ()
    reasons: dict[str, tuple[int, str]] = {}
    lost, copies = np.unique(rows[known & (numbers < 0)].numpy(), axis=0, return_counts=True)
    for size, count in zip(lost.tolist(), copies.tolist(), strict=True):
        why = why_unused(torch.tensor([size]), offered, upscale)
        before, first = reasons.get(why, (0, size_named(size)))
        reasons[why] = before + count, first
    unread = len(rows) - int(known.sum())
    return Bucketed(
        [(bucket, int(counts[number])) for bucket, number in zip(buckets, used, strict=True)],
        [
            f"no bucket fits {plural(count, 'row')}, such as {first}: {why}"
            for why, (count, first) in reasons.items()
        ]
        + ([f"{plural(unread, 'file')} cannot be read; `mm data check` lists them"] if unread else []),
        single_pictures(rows, offered, numbers),
        torch.where(numbers < 0, -1, torch.searchsorted(torch.tensor(used, dtype=torch.int64), numbers)),
    )
