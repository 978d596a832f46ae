"""The whole way in a few seconds, for everybody's `make test`: train, resume, sample, dry run."""

from __future__ import annotations

import os

import yaml

from support.logs import log_of


def test_a_run_trains_resumes_and_samples(tiny, tmp_path, mm):
    common = ("train", "--config", tiny, f"run.dir={tmp_path}", "data.loader.workers=0", "checkpoint.every=2")
    first = mm(*common, "train.steps=2", "lr_schedule.warmup_steps=0")
    assert first.code == 0, first.err
    second = mm(*common, "train.steps=4", "lr_schedule.warmup_steps=0")
    assert second.code == 0 and "at step 2 of 4" in second.err, second.err
    rows = log_of(tmp_path / "tiny")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["samples"] for row in rows] == [8, 16, 24, 32]
    clips = mm("sample", "--run", tmp_path / "tiny", "--prompt", "a red circle moves left", "--steps", 2)
    assert clips.code == 0 and (tmp_path / "tiny/samples/seed_0/contact_sheet.png").exists(), clips.err


def test_a_dry_run_prints_the_plan_and_leaves_nothing(tiny, tmp_path, mm):
    done = mm("train", "--config", tiny, f"run.dir={tmp_path}", "--nproc", 2, "--dry-run")
    assert done.code == 0, done.err
    assert "2 ranks (replicate 1 x shard 2)" in done.out
    assert "8 samples per step = 2 per micro-batch x 2 accumulated x 2 data-parallel ranks" in done.out
    assert not list(tmp_path.iterdir())
    launched = mm("train", "--config", tiny, f"run.dir={tmp_path}", "--dry-run", RANK="0", WORLD_SIZE="2")
    assert launched.code == 0 and launched.out == done.out, launched.err


def test_modules_are_imported_before_the_meta_device_is_entered(tiny, tmp_path, mm):
    (tmp_path / "lazy_task.py").write_text(
        "import torch\n"
        "from mm_core.tasks.text_to_video.task import TextToVideo\n"
        "CONSTANT = torch.ones(2)\n"
        "class LazyTask(TextToVideo):\n"
        "    def check(self, spec):\n"
        "        raise SystemExit(f'the constant lies on {CONSTANT.device}')\n"
    )
    (tmp_path / "plugin.py").write_text(
        "from mm_core import Component, hookimpl\n"
        "@hookimpl\n"
        "def mm_tasks():\n"
        "    config = 'mm_core.builtin.configs.text_to_video:TextToVideoConfig'\n"
        "    return [Component(name='lazy', target='lazy_task:LazyTask', config=config)]\n"
    )
    config = yaml.safe_load(tiny.read_text())
    config["task"]["type"], config["plugins"] = "local/lazy", {"path": ["plugin.py"]}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(config))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = mm("train", "--config", tmp_path / "x.yaml", "--dry-run", PYTHONPATH=path)
    assert "the constant lies on cpu" in done.err
