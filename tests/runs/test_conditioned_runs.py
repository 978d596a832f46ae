"""Runs of a model with conditions, embedded guidance and a dynamic shift: over ranks, validated, sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from support.logs import losses

pytestmark = pytest.mark.slow

PLUGIN = Path(__file__).with_name("conditioned_dit.py")
OPTIONS = ("train.steps=4", "lr_schedule={type: constant}", "checkpoint.every=4")


@pytest.fixture(scope="module")
def conditioned(tiny, tmp_path_factory) -> Path:
    config = yaml.safe_load(tiny.read_text(encoding="utf-8"))
    task = config["task"]
    task["predictor"]["type"] = "local/conditioned_dit"
    task["text_encoder"] = {"type": "local/pooled_bytes", "hidden_size": 32}
    task["scheduler"] = {"type": "flow_match", "dynamic_shift": {"base_tokens": 8, "max_tokens": 64}}
    task["train_guidance"] = 2.5
    path = tmp_path_factory.mktemp("conditioned") / "conditioned.yaml"
    path.write_text(yaml.safe_dump(config | {"plugins": {"path": [str(PLUGIN)]}}), encoding="utf-8")
    return path


def test_two_ranks_train_what_one_rank_trains_and_guidance_changes_the_clip(conditioned, tmp_path, mm):
    for ranks in (1, 2):
        options = (*OPTIONS, f"run.dir={tmp_path}", f"run.name=ranks_{ranks}")
        done = mm("train", "--config", conditioned, "--nproc", ranks, *options)
        assert done.code == 0, done.out + done.err
    one, two = (losses(tmp_path / f"ranks_{ranks}") for ranks in (1, 2))
    assert two == pytest.approx(one, rel=1e-4)
    files = {}
    for scale in ("1", "8"):
        out = tmp_path / f"scale_{scale}"
        named = ("--prompt", "a red circle", "--steps", 2, "--guidance", scale, "--fps", 8, "--out", out)
        done = mm("sample", "--run", tmp_path / "ranks_1", *named)
        assert done.code == 0, done.out + done.err
        (clip,) = out.glob("*.mp4")
        files[scale] = clip.read_bytes()
    assert files["1"] != files["8"]
    refused = mm("sample", "--run", tmp_path / "ranks_1", "--prompt", "a", "--negative-prompt", "b")
    assert refused.code != 0
    assert "negative_prompt: the request has a negative prompt, but embedded guidance makes" in refused.err


def test_a_dry_run_names_a_condition_that_nothing_gives(conditioned, mm):
    plain = "task.text_encoder={type: bytes, hidden_size: 32}"
    done = mm("train", "--config", conditioned, "--dry-run", plain)
    assert done.code != 0
    assert (
        "conditioned_dit.py, line 23: the predictor's forward needs `pooled`, which nothing gives" in done.err
    )
    assert "Traceback" not in done.err
