"""Tiny pipelines of every family, by the real classes, in their layout on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mm_diffusers.testing import tiny_pipeline


@pytest.fixture(scope="session")
def pipeline_of(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a tiny pipeline of a class."""
    made: dict[str, Path] = {}

    def find(kind: str) -> Path:
        if kind not in made:
            made[kind] = tiny_pipeline(tmp_path_factory.mktemp("pipelines") / kind, kind)
        return made[kind]

    return find
