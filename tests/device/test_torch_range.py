"""A torch newer than those that mm_core is tested with is a note of the plan, not an obstacle."""

from __future__ import annotations

import pytest
import torch

from mm_core.config.load import load_config
from mm_core.device import kind, untested_torch
from mm_core.plan import make_plan


@pytest.mark.parametrize("installed", ["2.7.1", "2.13.0+cpu", "2.15.0+cu132", "2.15.1.dev20270101"])
def test_a_tested_minor_version_has_no_note(installed):
    assert untested_torch(installed) == ()


@pytest.mark.parametrize("installed", ["2.16.1+cu132", "3.0.0"])
def test_a_newer_minor_version_has_one(installed):
    assert untested_torch(installed) == (
        f"torch {installed} is newer than 2.15, the newest that this mm_core is tested with",
    )


def test_the_note_is_in_the_plan(tiny, monkeypatch):
    monkeypatch.setattr(kind, "NEWEST_TORCH", (2, 0))
    assert make_plan(load_config(tiny), 1).notes[0].startswith(f"torch {torch.__version__} is newer than 2.0")
