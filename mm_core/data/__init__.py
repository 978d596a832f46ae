"""Samples: annotations, reading and writing images and clips, transforms, sampler, loader, workers.

The names below are for plugins; each name imports its module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mm_core.lazy import lazy_names

if TYPE_CHECKING:
    from mm_core.data.datasets import shapes as moving_shapes
    from mm_core.data.datasets.video_text import VideoTextDataset, collate_clips
    from mm_core.data.loading.stopping import check_stop
    from mm_core.data.loading.workers import (
        StartWorker,
        read_by_workers,
        start_server,
    )
    from mm_core.data.media.frames import read_frames
    from mm_core.data.media.image_headers import InMemory, opened_image, upright_size
    from mm_core.data.media.images import read_image
    from mm_core.data.media.limits import decoding
    from mm_core.data.media.readers import PyAVReader
    from mm_core.data.media.transforms import ResizeCrop, clip_pixels
    from mm_core.data.media.video_files import write_clips
    from mm_core.data.rows.annotations import inside
    from mm_core.data.rows.json_rows import RowFile, checkable, kind_of
    from mm_core.data.rows.mixture import Mixture
    from mm_core.data.rows.packed_rows import PackedRows
    from mm_core.data.rows.paths import check_folder
    from mm_core.data.rows.prompts import read_prompts

__all__ = [
    "InMemory",
    "Mixture",
    "PackedRows",
    "PyAVReader",
    "ResizeCrop",
    "RowFile",
    "StartWorker",
    "VideoTextDataset",
    "check_folder",
    "check_stop",
    "checkable",
    "clip_pixels",
    "collate_clips",
    "decoding",
    "inside",
    "kind_of",
    "moving_shapes",
    "opened_image",
    "read_by_workers",
    "read_frames",
    "read_image",
    "read_prompts",
    "start_server",
    "upright_size",
    "write_clips",
]

__getattr__ = lazy_names(__name__)
