"""Runs: resume and worlds change nothing, and everything a user gets wrong is a readable error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from mm_core.cli.main import main
from mm_core.config.load import load_config
from mm_core.inference.sample import sample
from mm_core.training.run import assemble, process_group
from support.checkpoints import tensors
from support.logs import losses

pytestmark = pytest.mark.slow


def equal(a: Path, b: Path) -> bool:
    left, right = tensors(a), tensors(b)
    assert left.keys() == right.keys() and any(key.startswith("optimizer.") for key in left)
    return all(torch.equal(left[key], right[key]) for key in left)


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory, mm) -> Path:
    """The tiny run on 2 ranks, uninterrupted."""
    folder = tmp_path_factory.mktemp("whole")
    done = mm("train", "--config", tiny, "--nproc", 2, f"run.dir={folder}")
    assert done.code == 0, done.err
    return folder / "tiny"


def interrupted(whole: Path, folder: Path) -> Path:
    """A copy of the run as it was after step 6."""
    shutil.copytree(whole, folder / "tiny")
    shutil.rmtree(folder / "tiny/checkpoints/step_00000012")
    (folder / "tiny/checkpoints/LATEST").write_text("step_00000006\n")
    return folder / "tiny"


def test_a_run_folder_holds_what_the_design_lists(whole):
    names = {path.name for path in whole.iterdir()}
    assert {"config.yaml", "manifest.json", "metrics.jsonl", "checkpoints", "loss.png"} <= names
    first = json.loads((whole / "metrics.jsonl").read_text().splitlines()[0])
    assert {"step", "loss", "lr", "grad_norm", "step_time", "data_wait", "samples"} <= first.keys()
    manifest = json.loads((whole / "manifest.json").read_text())
    assert {"mm-core", "mm-custom-dit"} <= {row["distribution"] for row in manifest["plugins"]}


def test_resumed_on_two_ranks_equals_uninterrupted(whole, tiny, tmp_path, mm):
    run = interrupted(whole, tmp_path)
    done = mm("train", "--config", tiny, "--nproc", 2, f"run.dir={tmp_path}")
    assert done.code == 0, done.err
    assert "resumed" in done.err and "at step 6 of 12" in done.err
    assert equal(run / "checkpoints/step_00000012", whole / "checkpoints/step_00000012")
    assert losses(run) == losses(whole)


def test_resumed_on_one_rank_goes_on_as_on_two_and_back(whole, tiny, tmp_path, mm):
    run = interrupted(whole, tmp_path)
    done = mm(
        "train", "--config", tiny, "--nproc", 1, f"run.dir={tmp_path}", "train.steps=12", "checkpoint.every=3"
    )
    assert done.code == 0, done.err
    assert losses(run)[6:] == pytest.approx(losses(whole)[6:], rel=1e-6)
    shutil.rmtree(run / "checkpoints/step_00000012")
    one = losses(run)
    done = mm("train", "--config", tiny, "--nproc", 2, f"run.dir={tmp_path}", "checkpoint.every=3")
    assert done.code == 0 and "at step 9 of 12" in done.err, done.err
    assert losses(run) == pytest.approx(one, rel=1e-6)


def test_state_at_load_is_bit_equal_on_another_world(whole, tiny, tmp_path, mm):
    run = interrupted(whole, tmp_path)
    before = tensors(run / "checkpoints/step_00000006")
    config = load_config(tiny, [f"run.dir={tmp_path}", "data.loader.workers=0"])
    with process_group():
        assembly = assemble(config)
        state = assembly.engine.state_dict()
        assembly.reporter.close("done")
        assert assembly.start == 6
        loaded = {
            f"{part}.{name}": (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()
            for part, named in state.items()
            for name, t in named.items()
        }
    assert loaded.keys() == before.keys()
    assert all(torch.equal(loaded[key], before[key]) for key in before)


def test_one_rank_equals_two_ranks(whole, tiny, tmp_path, mm):
    done = mm("train", "--config", tiny, "--nproc", 1, f"run.dir={tmp_path}")
    assert done.code == 0, done.err
    assert losses(tmp_path / "tiny") == pytest.approx(losses(whole), rel=1e-5)


def test_a_clip_does_not_depend_on_what_is_sampled_beside_it(whole):
    prompts = ["a red circle moves left", "a blue square moves up"]
    together = sample(whole, prompts=prompts, steps=3)
    (alone,) = sample(whole, prompts[0], steps=3)
    assert torch.allclose(alone.pixels, together[0].pixels, atol=1e-5)
    assert not torch.allclose(together[0].pixels, together[1].pixels, atol=1e-2)


def test_sampling_writes_clips_and_overwrites_none(whole, tmp_path, mm):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle moves left\na blue square moves up\na green circle moves right\n")
    common = ("sample", "--run", whole, "--prompts", prompts, "--steps", 3)
    done = mm(*common, "--out", tmp_path / "all")
    assert done.code == 0, done.err
    names = sorted(path.name for path in (tmp_path / "all").iterdir())
    assert names == [
        "000-a-red-circle-moves-left.mp4",
        "001-a-blue-square-moves-up.mp4",
        "002-a-green-circle-moves-right.mp4",
        "contact_sheet.png",
        "prompts.json",
    ]
    once, twice = (mm("sample", "--run", whole, "--prompt", "x", "--steps", 1, "--seed", 5) for _ in range(2))
    assert "samples/seed_5;" in once.out and "samples/seed_5-2;" in twice.out


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["train.micro_batch_size=3"], "global_batch_size 8 is not a multiple of micro_batch_size 3"),
        (
            ["engine.sub_modules_to_wrap=[predictor.layers.{*}]"],
            "pattern 'predictor.layers.{*}' matches no module",
        ),
        (["engine.sharding_size=2"], "sharding_size 2 does not divide 1 rank"),
        (["engine.sub_modules_to_wrap=[predictor.blocks]"], "'predictor.blocks' is a container"),
        (["engine.reduce_dtype=fp16"], "fp32, bf16"),
        (["optimizer.type=adan"], "no optimizer is named 'adan'"),
        (["data.train.annotations=nowhere.json"], "nowhere.json"),
        (["task.predictor.in_channels=16"], "16"),
        (["data.train.height=18"], "18"),
        (["lr_schedule.warmup_steps=20"], "warmup_steps"),
        (["train.micro_batch_size=128", "train.global_batch_size=128"], "fewer than a global batch of 128"),
    ],
)
def test_bad_input_is_a_readable_error(tiny, tmp_path, mm, overrides, sentence):
    done = mm("train", "--config", tiny, f"run.dir={tmp_path}", *overrides)
    assert done.code == 1
    assert sentence in done.err
    assert "Traceback" not in done.err
    notes = [line for line in done.err.splitlines() if line.startswith("with data.loader.workers: 0")]
    assert done.err.splitlines()[len(notes)].startswith("mm: error: ")


def test_a_batch_that_does_not_divide_over_ranks(tiny, tmp_path, mm):
    done = mm("train", "--config", tiny, f"run.dir={tmp_path}", "--nproc", 3, "--dry-run")
    assert done.code == 1
    assert "global_batch_size 8 does not divide into micro-batches of 2 on 3 data-parallel ranks" in done.err
    assert "a multiple of 6: 6, 12" in done.err


def test_a_checkpoint_of_another_model_lists_the_keys(whole, tiny, tmp_path, mm):
    interrupted(whole, tmp_path)
    done = mm("train", "--config", tiny, f"run.dir={tmp_path}", "task.predictor.num_layers=3",
              "--allow", "task.predictor")  # fmt: skip
    assert done.code == 1 and "Traceback" not in done.err
    assert "predictor.blocks.2" in done.err


def test_resume_never_overwrites_nothing(whole, tiny, tmp_path, mm):
    run = interrupted(whole, tmp_path)
    done = mm("train", "--config", tiny, f"run.dir={tmp_path}", "--resume", "never")
    assert done.code == 1 and "holds checkpoints up to step 6" in done.err
    assert losses(run) == losses(whole)


def test_a_finished_run_has_nothing_to_do(whole, tiny, mm):
    done = mm("train", "--config", tiny, f"run.dir={whole.parent}")
    assert done.code == 0 and "step 12 of 12" in done.out


@pytest.mark.parametrize("step", [3, 6])
def test_to_stop_after_a_step_that_is_taken_already_changes_nothing(step, whole, tiny, tmp_path, capsys):
    """Exit code 75, so that a queue that types the same command again sees that the run is not done."""
    run = interrupted(whole, tmp_path)

    def saved() -> dict[Path, tuple[int, bytes]]:
        files = (path for path in (run / "checkpoints").rglob("*") if path.is_file())
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = saved()
    assert main(["train", "--config", str(tiny), f"run.dir={tmp_path}", "--stop-after", str(step)]) == 75
    assert "stopped by --stop-after after step 6 of 12" in capsys.readouterr().out
    assert saved() == before
    assert losses(run) == losses(whole)[:6]


def test_unreadable_clips_are_skipped_counted_and_listed(shapes, tiny, tmp_path, mm):
    folder = tmp_path / "spoilt"
    shutil.copytree(shapes, folder)
    videos = sorted((folder / "videos").iterdir())
    videos[0].write_bytes(b"")
    videos[1].write_bytes(videos[1].read_bytes()[:300])
    videos[2].unlink()
    annotations = f"data.train.annotations={folder / 'data.json'}"
    done = mm("train", "--config", tiny, f"run.dir={tmp_path}", annotations, "--nproc", 2)
    assert done.code == 0, done.err
    assert "samples that could not be read were replaced" in done.err
    rows = [json.loads(line) for line in (tmp_path / "tiny/skipped.jsonl").read_text().splitlines()]
    assert {Path(row["id"]).name for row in rows} == {video.name for video in videos[:3]}
    assert all(row["reason"] for row in rows)

    strict = "data.loader.max_failed_share=0.01"
    done = mm("train", "--config", tiny, f"run.dir={tmp_path / 'strict'}", annotations, strict)
    assert done.code == 1 and "Traceback" not in done.err
    assert "samples could not be read" in done.err and "max_failed_share=0.01" in done.err


def test_the_published_examples_mistake_is_named_with_its_line(tiny, tmp_path, mm):
    broken = tmp_path / "data.json"
    broken.write_text('[\n {"path": "a.mp4", "cap": "x", "resolution": {480, 832}}\n]\n')
    done = mm("train", "--config", tiny, f"run.dir={tmp_path}", f"data.train.annotations={broken}")
    assert done.code == 1 and "Traceback" not in done.err
    assert f"{broken}:2" in done.err and "height" in done.err


def test_a_path_outside_of_the_folder_is_refused(shapes, tiny, tmp_path, mm):
    rows = tmp_path / "inner/data.json"
    rows.parent.mkdir()
    rows.write_text(json.dumps([{"path": "../secret.mp4", "cap": "x"}] * 8))
    done = mm("train", "--config", tiny, f"run.dir={tmp_path}", f"data.train.annotations={rows}")
    assert done.code == 1 and "Traceback" not in done.err
    assert "../secret.mp4" in done.err and "outside" in done.err


def test_a_changed_order_is_reported_on_resume(whole, tiny, tmp_path, mm):
    interrupted(whole, tmp_path)
    changes = ("data.loader.sampler=sequential", "engine.pin_memory=false")
    done = mm("train", "--config", tiny, f"run.dir={tmp_path}", *changes)
    assert done.code == 1 and done.err.endswith("add --allow data.loader.sampler\n"), (
        "the engine's key is marked"
    )
    assert "random -> sequential" in done.err and "changes which samples come when" in done.err
