"""Tiny pipelines of every family, by the real classes, in their layout on disk."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
from mm_diffusers.families import FAMILIES
from mm_diffusers.testing import tiny_pipeline
from tuned import SMALL


@pytest.fixture(scope="session", autouse=True)
def small_pictures() -> None:
    """The pipelines that edit pictures resize them to small areas."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (name for name, family in FAMILIES.items() if family.areas):
            module = sys.modules[getattr(diffusers, kind).__module__]
            own = module.calculate_dimensions
            patch.setattr(
                module, "calculate_dimensions", lambda area, ratio, own=own: own(SMALL.get(area, area), ratio)
            )
        yield


@pytest.fixture(scope="session")
def pipeline_of(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a tiny pipeline of a class."""
    made: dict[str, Path] = {}

    def find(kind: str) -> Path:
        if kind not in made:
            made[kind] = tiny_pipeline(tmp_path_factory.mktemp("pipelines") / kind, kind)
        return made[kind]

    return find
