"""The sizes of the rows of `media_text`: as declared, or by the header of the file."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mm_core.data.rows.mapped_rows import read_once
from mm_core.errors import DataError, RunWarning, plural

if TYPE_CHECKING:
    from mm_core.data.datasets.media_text import MediaTextDataset

_THREADS = 16
_EVERY = 10.0
"""Seconds between two messages about headers that are read."""


def sizes_of(dataset: MediaTextDataset) -> Tensor:
    """Frames at the dataset's rate, height and width of each row, int64 [R,3]; 0: its file cannot be read.

    What a row declares is not checked. Where it declares too little, one rank of a host reads the header.

    Args:
        dataset: the rows.
    """
    facts, rate = dataset.rows.facts, dataset.wanted.fps
    frames = np.where(facts["image"], 1, facts["num_frames"])
    found = np.column_stack([frames, facts["height"], facts["width"]]).astype(np.int64)
    rates = facts["fps"].copy()
    lacks = (found == 0).any(1) | ((rates == 0) & ~facts["image"] if rate is not None else False)
    unknown = lacks.nonzero()[0]
    if len(unknown):
        folder, _ = read_once(partial(_probe, dataset, unknown.tolist()))
        read = np.load(folder / "sizes.npy")
        found[unknown], rates[unknown] = read[:, :3].astype(np.int64), read[:, 3]
    if rate is not None:
        clips = ~facts["image"] & (found[:, 0] > 0)
        spacing = rates[clips] / rate
        found[clips, 0] = np.floor((found[clips, 0] - 1) / spacing + 1e-6) + 1
    return torch.from_numpy(found)


def _probe(dataset: MediaTextDataset, numbers: Sequence[int], folder: Path) -> None:
    """Writes frames, height, width and frames per second of some rows, by their headers; 0: unreadable."""
    found = np.zeros((len(numbers), 4))
    began = shown = time.monotonic()
    with ThreadPoolExecutor(_THREADS) as pool:
        for place, size in enumerate(pool.map(partial(_header, dataset), numbers)):
            found[place] = size
            if time.monotonic() - shown > _EVERY:
                shown = time.monotonic()
                what = f"{place + 1} of {plural(len(numbers), 'header')} read in {shown - began:.0f} s"
                warnings.warn(f"{what}; declare num_frames, height and width of the rows", RunWarning, 2)
    np.save(folder / "sizes.npy", found)


def _header(dataset: MediaTextDataset, number: int) -> tuple[float, float, float, float]:
    try:
        info = dataset.header(dataset.rows[number])
    except DataError:
        return 0.0, 0.0, 0.0, 0.0  # training lists it, with the reason
    return info.num_frames, info.height, info.width, info.fps
