"""A decoder that never comes back: its worker ends, its clip is named, and the run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mm_core.config.load import load_config
from mm_core.plan.planning import make_plan
from support.logs import losses

PLUGIN = Path(__file__).with_name("hanging_reader.py")


@pytest.mark.slow
def test_a_decoder_that_hangs_is_ended_with_its_worker_and_the_run_goes_on_as_without_its_clip(
    tiny, shapes, tmp_path, mm
):
    clips = [row["path"] for row in json.loads((shapes / "data.json").read_text())]
    stuck = [Path(clip).name for clip in clips[5:23:17]]

    def run(name: str, refuses: bool) -> Path:
        reader = f"{{type: local/hanging, clips: {json.dumps(stuck)}, refuses: {str(refuses).lower()}}}"
        done = mm(
            "train", "--config", tiny, "--nproc", 2, f"run.dir={tmp_path}", f"run.name={name}",
            f"plugins.path=[{PLUGIN}]", f"data.train.reader={reader}", "data.loader.workers=2",
            f"data.decode_seconds={60 if refuses else 6}", "train.steps=8", "lr_schedule={type: constant}",
            "data.loader.max_failed_share=1",
        )  # fmt: skip
        assert done.code == 0, done.err
        return tmp_path / name

    hung, refused = run("hung", False), run("refused", True)
    listed, expected = (
        [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]
        for folder in (hung, refused)
    )
    assert {Path(line["id"]).name for line in listed} == set(stuck)
    assert {line["reason"] for line in listed} == {"the decoder did not end within 6 s"}
    assert sorted((line["id"], line["index"]) for line in listed) == sorted(
        (line["id"], line["index"]) for line in expected
    )
    assert losses(hung) == losses(refused) and len(losses(hung)) == 8


@pytest.mark.slow
def test_a_build_of_a_cache_leaves_a_clip_out_whose_decoder_hangs(tiny, shapes, tmp_path, mm):
    clips = [row["path"] for row in json.loads((shapes / "data.json").read_text())]
    reader = f"{{type: local/hanging, clips: {json.dumps([Path(clips[30]).name])}}}"
    done = mm(
        "cache", "build", "--config", tiny, f"plugins.path=[{PLUGIN}]", f"data.train.reader={reader}",
        f"data.cache.dir={tmp_path}/cache", "data.loader.workers=2", "data.decode_seconds=6",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "encoded 63 latents" in done.out and "1 sample cannot be read" in done.out, done.out


def test_the_plan_notes_that_nothing_ends_a_decoder_in_the_training_process(tiny):
    def notes(*overrides: str) -> str:
        return " ".join(make_plan(load_config(tiny, overrides), world=1).notes)

    assert "data.decode_seconds does not hold" in notes()
    assert "decode_seconds" not in notes("data.loader.workers=2")
