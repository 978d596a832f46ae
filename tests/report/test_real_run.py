"""The page of a trained run: every part of it finds the files that training writes."""

from __future__ import annotations

import json
import re

import pytest

pytestmark = pytest.mark.slow


def test_every_part_of_the_page_finds_what_training_writes(tiny, shapes, tmp_path, mm):
    held_out = (
        f"{{type: video_text, annotations: {shapes / 'data.json'}, num_frames: 8, height: 16, width: 16}}"
    )
    done = mm(
        "train", "--config", tiny, f"run.dir={tmp_path}", "train.steps=4", "log.detail_every=2",
        f"data.validation={held_out}", "ema={decay: 0.9}", "data.loader.workers=0",
        "validation={every: 2, clips: 4, samples: {prompts: [a red circle], steps: 2}}",
    )  # fmt: skip
    assert done.code == 0, done.err
    done = mm("report", tmp_path / "tiny", "--out", tmp_path / "page.html")
    assert done.code == 0 and done.out.startswith(f"{tmp_path / 'page.html'} ("), done.err
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    (run,) = json.loads(text)["runs"]
    assert run["remarks"] == [] and dict(run["summary"])["steps"] == "4 of 4"
    assert {"loss", "lr", "grad_norm", "step_time", "data_wait", "samples_per_second", "memory"} <= run[
        "curves"
    ].keys()
    assert run["curves"]["validation/loss"]["x"] == run["curves"]["validation_ema/loss"]["x"] == [2, 4]
    assert (run["scale"], run["loss_by"]["x"], run["grad_norm_by"]["x"]) == ("sigma", [2, 4], [2, 4])
    assert sum(run["density"]["realised"]) == pytest.approx(1, abs=1e-4)
    assert sum(run["density"]["declared"]) == pytest.approx(1, abs=1e-3)
    assert "forward_backward" in run["time"]["phases"]
    assert run["axis"]["samples"][-1] == 32 and run["axis"]["time"][-1] > 0
    assert [(shot["step"], [clip["prompt"] for clip in shot["clips"]]) for shot in run["shots"]] == [
        (2, ["a red circle"]),
        (4, ["a red circle"]),
    ]
    assert run["config"]["train.steps"] == "4" and "steps: 4" in run["config_text"]
    assert run["environment"]["data.train.rows"] == "64" and "plugins.mm-custom-dit" in run["environment"]
