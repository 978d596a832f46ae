"""Samples: annotations, reading and writing images and clips, transforms, sampler, loader, workers.

The names below are for plugins; each name imports its module when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mm_core.data.datasets import shapes as moving_shapes
    from mm_core.data.datasets.video_text import collate_clips
    from mm_core.data.loading.stopping import check_stop
    from mm_core.data.loading.workers import (
        StartWorker,
        deaths_explained,
        start_server,
        starting,
        starts_explained,
    )
    from mm_core.data.media.images import opened_image, read_image
    from mm_core.data.media.readers import PyAVReader
    from mm_core.data.media.video_files import write_clips
    from mm_core.data.rows.annotations import inside
    from mm_core.data.rows.json_rows import RowFile, kind_of
    from mm_core.data.rows.packed_rows import PackedRows
    from mm_core.data.rows.paths import check_folder
    from mm_core.data.rows.prompts import read_prompts

__all__ = [
    "PackedRows",
    "PyAVReader",
    "RowFile",
    "StartWorker",
    "check_folder",
    "check_stop",
    "collate_clips",
    "deaths_explained",
    "inside",
    "kind_of",
    "moving_shapes",
    "opened_image",
    "read_image",
    "read_prompts",
    "start_server",
    "starting",
    "starts_explained",
    "write_clips",
]

_HOMES = {
    "datasets.video_text": ("collate_clips",),
    "loading.stopping": ("check_stop",),
    "loading.workers": ("StartWorker", "deaths_explained", "start_server", "starting", "starts_explained"),
    "media.images": ("opened_image", "read_image"),
    "media.readers": ("PyAVReader",),
    "media.video_files": ("write_clips",),
    "rows.annotations": ("inside",),
    "rows.json_rows": ("RowFile", "kind_of"),
    "rows.packed_rows": ("PackedRows",),
    "rows.paths": ("check_folder",),
    "rows.prompts": ("read_prompts",),
}


_MODULES = {"moving_shapes": "datasets.shapes"}
"""Names that are modules."""


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"mm_core.data.{_MODULES[name]}")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"mm_core.data.{home}"), name)
    raise AttributeError(f"module 'mm_core.data' has no attribute {name!r}")
