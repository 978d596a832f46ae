"""Reading samples: annotations, video readers, transforms, the sampler, the loader, the skip ledger.

The names below are those that plugins use; each resolves, and its part of the room is imported, when it is
first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    "deaths_explained",
    "inside",
    "kind_of",
    "opened_image",
    "read_image",
    "read_prompts",
    "start_server",
    "starting",
    "starts_explained",
    "write_clips",
]

_HOMES = {
    "PackedRows": "rows.packed_rows",
    "PyAVReader": "media.readers",
    "RowFile": "rows.json_rows",
    "StartWorker": "loading.workers",
    "check_folder": "rows.paths",
    "check_stop": "loading.stopping",
    "deaths_explained": "loading.workers",
    "inside": "rows.annotations",
    "kind_of": "rows.json_rows",
    "opened_image": "media.images",
    "read_image": "media.images",
    "read_prompts": "rows.prompts",
    "start_server": "loading.workers",
    "starting": "loading.workers",
    "starts_explained": "loading.workers",
    "write_clips": "media.video_files",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mm_core.data' has no attribute {name!r}")
    return getattr(import_module(f"mm_core.data.{_HOMES[name]}"), name)
