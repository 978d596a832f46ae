"""Runs with `data.loader.mode: variable`: photos and clips of three shapes and two lengths, in buckets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

import mm_core
from mm_core.builtin.tiny import write_clip
from mm_core.checkpoint.resume_check import differences_of
from mm_core.cli.main import main
from support.checkpoints import state_of
from support.logs import losses
from support.tiny_models import ONE_BLOCK

SHAPES = [(16, 24), (24, 16), (20, 20)]


@pytest.fixture(scope="module")
def media(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("media")
    (root / "photos").mkdir()
    for number in range(9):
        height, width = SHAPES[number % 3]
        Image.new("RGB", (width, height), (20 * number, 0, 90)).save(root / f"photos/{number}.png")
        (root / f"photos/{number}.txt").write_text(f"photo {number}")
    rows = []
    for number in range(14):
        height, width = SHAPES[number % 3]
        frames = torch.full(((5, 9)[number % 2], height, width, 3), 15 * number, dtype=torch.uint8)
        write_clip(root / f"{number}.mp4", frames, 8)
        rows.append({"path": f"{number}.mp4", "cap": f"clip {number}"})
    (root / "clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture
def run(media: Path, tmp_path: Path) -> Path:
    sources = [{"annotations": f"{media}/photos/"}, {"annotations": f"{media}/clips.jsonl"}]
    data = {"type": "media_text", "sources": sources, "max_height": 16, "max_width": 24, "num_frames": 9}
    config = {
        "run": {"name": "one", "dir": str(tmp_path / "runs")},
        "task": ONE_BLOCK,
        "data": {"train": data, "validation": data, "loader": {"mode": "variable", "workers": 0}},
        "validation": {"every": 11, "timesteps": [0.5]},
        "optimizer": {"type": "adamw", "lr": 1e-3},
        "train": {"epochs": 1, "micro_batch_size": 1, "global_batch_size": 2},
        "log": {"trackers": []},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path / "run.yaml"


Plan = Callable[..., str]


@pytest.fixture
def plan(run: Path, capsys: pytest.CaptureFixture[str]) -> Plan:
    """The plan of the run with overrides, or its error."""

    def planned(*overrides: str) -> str:
        code = main(["train", "--dry-run", "--config", str(run), *overrides])
        printed = capsys.readouterr()
        return printed.out if not code else printed.err

    return planned


def test_an_epoch_trains_and_evaluates_each_row_once(run: Path) -> None:
    result = mm_core.train(mm_core.load_config(run))
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert result.step == 11
    assert [line["samples"] for line in lines if "samples" in line][-1] == 23
    assert {line["validation/rows"] for line in lines if "validation/rows" in line} == {23}
    assert main(["eval", "--run", str(result.run_dir)]) == 0


def test_a_plan_shows_buckets_with_counts_and_batch_sizes(plan: Plan) -> None:
    assert (
        "  11 steps of 2 micro-batches x 1 data-parallel rank; the samples of a micro-batch are of one"
        " bucket\n"
        "  frames  height  width  per micro-batch  samples per epoch  padded  dropped\n"
        "       9      16     24                1                  2       0        0\n"
        "       9      24     16                1                  3       1        0\n"
        "       9      16     16                1                  2       0        0\n"
        "       5      16     24                1                  3       1        0\n"
        "       5      24     16                1                  2       0        0\n"
        "       5      16     16                2                  2       0        0\n"
        "       1      16     24                9                  3       1        0\n"
        "       1      24     16                9                  3       1        0\n"
        "       1      16     16               13                  3       1        0\n"
    ) in plan()
    dropped = plan("data.loader.rests=drop")
    assert "       9      24     16                1                  3       0        1\n" in dropped
    assert "samples per step" not in dropped


@pytest.mark.filterwarnings("default")  # clips of 5 frames are single pictures
def test_buckets_of_frames_alone_or_of_sizes_alone(plan: Plan) -> None:
    frames = plan("data.loader.group_frame=true", "data.loader.upscale=true")
    assert [line.split()[:3] for line in table(frames)] == [
        ["9", "16", "24"],
        ["5", "16", "24"],
        ["1", "16", "24"],
    ]
    sizes = plan("data.loader.group_resolution=true")
    assert {line.split()[0] for line in table(sizes)} == {"9", "1"}


def test_one_bucket_has_the_flops_of_one_size(run: Path, media: Path, capsys) -> None:
    photos = f"data.train.sources=[{{annotations: {media}/photos}}]"
    bucket = ("data.loader.buckets=[{num_frames: 1, height: 16, width: 16}]", "data.train.max_height=null")
    sizes = ("data.train.num_frames=1", "data.train.height=16", "data.train.width=16")
    found = []
    for more in (bucket, ("data.loader.mode=sampler", "data.train.max_height=null", *sizes)):
        words = (*more, photos, "data.train.max_width=null", "data.validation=null", "validation=null")
        assert (
            main(
                [
                    "train",
                    "--dry-run",
                    "--json",
                    "--config",
                    str(run),
                    "train.steps=5",
                    "train.epochs=null",
                    *words,
                ]
            )
            == 0
        )
        found.append(json.loads(capsys.readouterr().out)["flops"])
    assert found[0] == pytest.approx(found[1]) and found[0]["forward"] > 0


def table(plan: str) -> list[str]:
    lines = plan.split("samples per epoch  padded  dropped\n")[1].splitlines()
    return lines[: lines.index("")]


@pytest.mark.filterwarnings("default")
def test_listed_buckets_have_their_own_batch_sizes(run: Path, capsys) -> None:
    small = (
        "{num_frames: 1, height: 16, width: 16, micro_batch_size: 4}, {num_frames: 5, height: 16, width: 16}"
    )
    override = f"data.loader.buckets=[{small}, {{num_frames: 5, height: 24, width: 24}}]"
    assert main(["train", "--dry-run", "--config", str(run), override]) == 0
    printed = capsys.readouterr()
    assert [line.split() for line in table(printed.out)] == [
        ["5", "16", "16", "1", "14", "0", "0"],
        ["1", "16", "16", "4", "9", "1", "0"],
    ]
    assert printed.err == "warning: no image or clip of data.train is nearest to the bucket 5 x 24 x 24\n"


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (
            ["data.loader.buckets=[{num_frames: 5, height: 16, width: 18}]"],
            "the bucket 5 x 16 x 18 is not a size that the task takes: width 18 makes 9 latents",
        ),
        (
            ["data.loader.buckets=[{num_frames: 5, height: 64, width: 64}]"],
            "no image or clip of data.train fits a bucket: 1 to 9 frames, 16 to 24 high, 16 to 24 wide",
        ),
        (["data.loader.buckets=[]"], "buckets is empty: list at least one bucket, or write `auto`"),
        (
            ["data.train.max_height=3", "data.train.max_width=3"],
            "no clip of 3 x 3 divides into patches of 4",
        ),
        (["data.loader.mode=sampler"], "the size of the samples is not set"),
        (["data.loader.mode=sampler", "data.loader.rests=keep"], "rests works only with mode: variable"),
        (["data.loader.group_by_length=true"], "group_by_length works only with mode: sampler"),
        (["data.loader.balance=true"], "balance works only with mode: sampler"),
        (
            ["data.loader.buckets_per_step=3"],
            "a step of 2 micro-batches per rank does not divide into 3 buckets",
        ),
        (["data.train={type: shapes, num_frames: 4, height: 8, width: 8}"], "reads its samples in one size"),
        (["data.train.max_height=null", "data.train.max_width=null"], "buckets: auto has no limits"),
        (["data.train.max_width=null"], "max_height and max_width belong together"),
        (["data.train.height=8", "data.train.width=8"], "height and max_height are both set"),
        (
            [
                "data.train.height=8",
                "data.train.width=8",
                "data.train.max_height=null",
                "data.train.max_width=null",
            ],
            "height and width would be ignored: the loader's buckets set the sizes",
        ),
    ],
)
def test_what_is_wrong_with_buckets_is_one_sentence(plan: Plan, overrides: list[str], what: str) -> None:
    assert what in plan(*overrides)


@pytest.mark.filterwarnings("default")
def test_what_fits_no_bucket_is_one_sentence(run: Path, media: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "small").mkdir()
    Image.new("RGB", (4, 3)).save(tmp_path / "small/a.png")
    (tmp_path / "small/a.txt").write_text("x")
    sources = f"[{{annotations: {media}/photos}}, {{annotations: {tmp_path}/small}}]"
    assert main(["train", "--dry-run", "--config", str(run), f"data.train.sources={sources}"]) == 0
    assert capsys.readouterr().err == (
        "warning: no bucket fits 1 row of data.train, such as 1 x 3 x 4, so they are not used:"
        " too small in height or width; data.loader.upscale: true enlarges them\n"
    )


@pytest.mark.filterwarnings("default")
def test_photos_are_not_used_where_the_predictor_takes_no_single_frame(run: Path, capsys) -> None:
    command = ("train", "--dry-run", "--config", str(run), "task.predictor.patch_size=[2, 2, 2]")
    assert main([*command]) == 0
    printed = capsys.readouterr()
    assert {line.split()[0] for line in table(printed.out)} == {"8", "4"}
    assert "no bucket fits 9 rows of data.train, such as 1 x 16 x 24, so they are not used" in printed.err
    assert "the shortest bucket has 2 frames, too many for images, which have one frame" in printed.err


@pytest.mark.filterwarnings("default")
def test_clips_that_become_single_pictures_are_counted(run: Path, capsys) -> None:
    listed = "{num_frames: 9, height: 16, width: 24}, {num_frames: 1, height: 16, width: 16}"
    limits = (
        f"data.{split}.max_{side}=null" for split in ("train", "validation") for side in ("height", "width")
    )
    overrides = [f"data.loader.buckets=[{listed}]", *limits]
    counted = "12 clips are single pictures, such as 5 x 16 x 24: no bucket of more frames fits them"
    assert main(["train", "--dry-run", "--config", str(run), *overrides]) == 0
    assert capsys.readouterr().err == f"warning: data.train: {counted}\n"
    inspected = ["data", "inspect", "--config", str(run)]
    assert main([*inspected, *overrides]) == 0
    assert capsys.readouterr().out.endswith(f"\ndata.train: {counted}\ndata.validation: {counted}\n")
    assert main([*inspected, "--json", *overrides]) == 0
    assert json.loads(capsys.readouterr().out)["buckets"]["train"]["pictures"] == counted
    assert main(inspected) == 0 and "single" not in capsys.readouterr().out


@pytest.mark.filterwarnings("default")
def test_files_that_cannot_be_read_are_counted(run: Path, media: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/a.png").write_bytes(b"no picture")
    (tmp_path / "broken/a.txt").write_text("x")
    broken = f"{{annotations: {tmp_path}/broken}}"
    command = ("train", "--dry-run", "--config", str(run))
    assert main([*command, f"data.train.sources=[{broken}]"]) == 1
    assert "no image or clip can be read" in capsys.readouterr().err
    assert main([*command, f"data.train.sources=[{{annotations: {media}/photos}}, {broken}]"]) == 0
    expected = "warning: 1 file of data.train cannot be read; `mm data check` lists them\n"
    assert capsys.readouterr().err == expected


def test_a_resume_with_another_micro_batch_has_other_steps() -> None:
    def manifest(size: int, mode: str) -> dict[str, Any]:
        return {"config": {"data": {"loader": {"mode": mode}}, "train": {"micro_batch_size": size}}}

    found = [differences_of(manifest(1, mode), manifest(2, mode)) for mode in ("sampler", "variable")]
    assert [[each.verdict for each in differences] for differences in found] == [["safe"], ["allow"]]


@pytest.mark.slow
def test_two_ranks_train_what_one_rank_trains_and_a_resume_is_exact(run: Path, tmp_path: Path, mm) -> None:
    more = (
        "train.epochs=1.5",
        "train.global_batch_size=4",
        "data.loader.buckets_per_step=2",
        "ema={decay: 0.5}",
    )
    for ranks in (1, 2):
        own = (f"run.name=over_{ranks}", f"data.loader.workers={ranks - 1}")
        done = mm("train", "--config", run, "--nproc", ranks, *own, *more)
        assert done.code == 0, done.out + done.err
    one, two = (tmp_path / f"runs/over_{ranks}" for ranks in (1, 2))
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    for name, tensor in state_of(one).items():
        torch.testing.assert_close(state_of(two)[name], tensor, rtol=1e-5, atol=1e-5)
    done = mm("train", "--config", run, "--nproc", 2, "--verify-resume", 3, *more)
    assert done.code == 0, done.out + done.err


@pytest.mark.slow
def test_two_ranks_train_on_although_all_files_of_a_bucket_are_bad(run: Path, media: Path, mm) -> None:
    """Clips whose rows declare what the files do not hold: one bucket has these alone, another two more."""
    rows = [
        {"path": f"bad_{number}.mp4", "cap": "x", "num_frames": 9, "height": height, "width": width}
        for number, (height, width) in enumerate([(8, 24)] * 3 + [(16, 24)] * 2)
    ]
    for row in rows:
        (run.parent / row["path"]).write_bytes(b"no clip")
    (run.parent / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables = (media / "photos", media / "clips.jsonl", run.parent / "bad.jsonl")
    sources = ", ".join(f"{{annotations: {each}}}" for each in tables)
    more = (f"data.train.sources=[{sources}]", "data.loader.max_failed_share=0.5")
    done = mm("train", "--config", run, "--nproc", 2, *more)
    assert done.code == 0, done.out + done.err
    folder = run.parent / "runs/one"
    listed = [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]
    assert {Path(row["id"]).name for row in listed} == {row["path"] for row in rows}
    assert all("not a readable video" in row["reason"] for row in listed)
