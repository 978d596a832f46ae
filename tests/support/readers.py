"""The video reader around torchcodec, where torchcodec and FFmpeg's libraries are installed."""

from __future__ import annotations

from functools import cache

import pytest

from mm_core.data.media.package_readers import TorchcodecReader
from mm_core.errors import DataError


@cache
def torchcodec_loads() -> bool:
    """Whether torchcodec is installed, with an FFmpeg that it can load."""
    try:
        TorchcodecReader()._imported()
    except DataError:
        return False
    return True


TORCHCODEC = pytest.param(
    TorchcodecReader(),
    id="torchcodec",
    marks=pytest.mark.skipif(not torchcodec_loads(), reason="torchcodec or FFmpeg's libraries are missing"),
)
