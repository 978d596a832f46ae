"""A run of the shipped configs, whose packed rows have no mask: what it computes, and what it prints."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from mm_internvl.testing import make_tiny_checkpoint, make_tiny_conversations

import mm_core
from support import warm

CONFIGS = Path(__file__).parents[1] / "mm_internvl" / "configs"
FEWER = ["train.steps=3", "checkpoint.every=3", "data.loader.workers=0"]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """The tiny twin, whose blocks are recomputed, where its first lines have been done."""
    monkeypatch.chdir(tmp_path)
    make_tiny_checkpoint("ckpt/internvl_tiny")
    make_tiny_conversations("data/digits")
    return CONFIGS / "tiny.yaml"


def logged(name: str) -> list[dict]:
    return [json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_ranks_compute_what_one_computes_under_the_dense_mask(config):
    dense = mm_core.load_config(config, [*FEWER, "run.name=dense", "task.attn_implementation=sdpa"])
    with pytest.warns(mm_core.errors.RunWarning, match="rows are packed, but sdpa computes"):
        mm_core.train(dense)
    command = ["train", "--config", config, "--nproc", 2, *FEWER, "run.name=pieces"]
    done = warm.mm(*command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "rows are packed" not in done.stderr
    one, two = logged("dense"), logged("pieces")
    assert len(one) == len(two) == 3
    for alone, shared in zip(one, two, strict=True):
        assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert shared["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
    said = [mm_core.answer(f"runs/{name}", "which number?") for name in ("dense", "pieces")]
    assert said[0] == said[1]
