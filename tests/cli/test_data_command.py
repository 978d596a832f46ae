"""`mm data`, and what `mm validate` and `mm-train --dry-run` find in the sources of a run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

import mm_core
from mm_core.builtin.tiny import write_clip
from mm_core.cli.main import main
from support.tiny_models import ONE_BLOCK


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run over photos with captions beside them, a table of clips, and a table of both with other names."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "clips").mkdir()
    for number in range(3):
        Image.new("RGB", (20, 16), (80 * number, 0, 0)).save(tmp_path / f"photos/{number}.jpg")
        (tmp_path / f"photos/{number}.txt").write_text(f"photo {number}")
    for number in range(3):
        grey = torch.full((6, 16, 24, 3), 60 * number, dtype=torch.uint8)
        write_clip(tmp_path / f"clips/{number}.mp4", grey, 8)
    clips = [{"path": f"clips/{n}.mp4", "cap": f"clip {n}", "width": 240 * n} for n in range(3)]
    (tmp_path / "clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in clips))
    (tmp_path / "more.csv").write_text("file,text\nclips/0.mp4,more\nphotos/1.jpg,and more\n")
    (tmp_path / "theirs.jsonl").write_text('{"video": "clips/0.mp4", "caption": "a"}\n')
    (tmp_path / "theirs.csv").write_text("file_name,text\nclips/0.mp4,a\n")
    sources = [
        {"annotations": f"{tmp_path}/photos/"},
        {"annotations": f"{tmp_path}/clips.jsonl", "weight": 2, "where": "width >= 240"},
        {"annotations": f"{tmp_path}/more.csv", "columns": {"path": "file", "caption": "text"}},
    ]
    train = {"type": "media_text", "sources": sources, "num_frames": 5, "height": 8, "width": 8}
    config = {
        "run": {"name": "media", "dir": str(tmp_path / "runs")},
        "task": ONE_BLOCK,
        "data": {"train": train, "loader": {"workers": 0, "drop_last": False}},
        "engine": {"type": "fsdp2"},
        "optimizer": {"type": "adamw", "lr": 1e-3},
        "train": {"steps": 3, "micro_batch_size": 1, "global_batch_size": 4},
        "log": {"trackers": []},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path / "run.yaml"


def changed(run: Path, **changes: object) -> Path:
    """The run with keys of its dataset, or of its second source (`source_...`), changed."""
    config = yaml.safe_load(run.read_text())
    train = config["data"]["train"]
    for name, value in changes.items():
        where = train["sources"][1] if name.startswith("source_") else train
        where[name.removeprefix("source_")] = value
    run.write_text(yaml.safe_dump(config))
    return run


def test_three_sources_of_images_and_clips_train(run: Path) -> None:
    result = mm_core.train(mm_core.load_config(run))
    assert result.step == 3
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["loss"] > 0 for line in lines)
    manifest = json.loads((result.run_dir / "manifest.json").read_text())
    assert manifest["data"]["train"]["rows"] == 3 + 2 * 2 + 2


def test_inspect_is_a_table_with_what_is_left_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", "--config", str(run)]) == 0
    out = capsys.readouterr().out.replace(f"{run.parent}/", "")
    head, table = out.split("\n", 1)
    assert head.split() == ["SPLIT", "SOURCE", "IMAGES", "CLIPS", "PER", "EPOCH", "HEIGHT", "x", "WIDTH"]
    assert table == (
        "train  photos/      3       0      3          16 x 20 (3); 3 of 3 files probed\n"
        "train  clips.jsonl  0       2      4          16 x 24, 6 frames (2); 2 of 2 files probed\n"
        "train  more.csv     1       1      2          16 x 24, 6 frames (1); 16 x 20 (1); "
        "2 of 2 files probed\n"
        "data.train: clips.jsonl: 1 row left out: where: width >= 240\n"
    )
    assert main(["data", "inspect", "--config", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["train"][0]["images"] == 3


def test_inspect_names_how_many_sizes_it_does_not_show(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3, 8):
        Image.new("RGB", (16 + number, 16)).save(run.parent / f"photos/{number}.png")
        (run.parent / f"photos/{number}.txt").write_text("x")
    assert main(["data", "inspect", "--config", str(run)]) == 0
    assert (
        capsys.readouterr()
        .out.splitlines()[1]
        .endswith("16 x 20 (4); 16 x 19 (1); 16 x 21 (1); 16 x 22 (1) + 1 more; 8 of 8 files probed")
    )


@pytest.mark.parametrize("action", ["inspect", "check"])
def test_data_of_a_run_with_adapters_needs_no_peft(
    run: Path, action: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapters = "train.adapters=[{targets: [to_q], rank: 2}]"
    options = (adapters, "train.base_dtype=bf16", "checkpoint.export=lora/peft", "data.loader.mode=variable")
    sizes = ("data.train.height=null", "data.train.width=null", "data.train.max_height=16")
    monkeypatch.setitem(sys.modules, "peft", None)
    command = ["data", action, "--config", str(run), *options, *sizes, "data.train.max_width=16"]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "PEFT" not in printed.out + printed.err
    assert ("BUCKETS OF" if action == "inspect" else "0 bad") in printed.out


def test_inspect_shows_buckets_and_what_is_in_none(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load(run.read_text())
    train = config["data"]["train"] | {"max_height": 16, "max_width": 16, "sources": []}
    train["sources"] = [{"annotations": f"{tmp_path}/{name}"} for name in ("photos", "clips")]
    for number in range(3):
        (tmp_path / f"clips/{number}.txt").write_text("x")
    del train["height"], train["width"]
    config["data"] = {"train": train, "loader": {"mode": "variable", "workers": 0}}
    run.write_text(yaml.safe_dump(config))
    Image.new("RGB", (2, 2)).save(run.parent / "photos/2.jpg")
    (run.parent / "photos/1.jpg").write_bytes(b"no image")
    page = tmp_path / "page.html"
    assert main(["data", "inspect", "--config", str(run), "--page", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2:5] for line in lines[1:3]] == [["3", "0", "1"], ["0", "3", "3"]]  # per epoch
    first = next(number for number, line in enumerate(lines) if line.startswith("BUCKETS OF"))
    assert lines[first].endswith("  FRAMES  HEIGHT  WIDTH  PER MICRO-BATCH  SAMPLES PER EPOCH")
    table = [line.split() for line in lines[first + 1 : first + 3]]
    assert table == [["train", "5", "8", "12", "1", "3"], ["train", "1", "12", "16", "2", "1"]]
    why = "too small in height or width; data.loader.upscale: true enlarges them"
    lost = f"no bucket fits 1 row, such as 1 x 2 x 2: {why}"
    unread = "1 file cannot be read; `mm data check` lists them"
    assert lines[first + 3 : -1] == [f"data.train: {lost}", f"data.train: {unread}"]
    text = page.read_text()
    assert "samples per epoch" in text and lost in text
    assert len(re.findall(", bucket 5 x 8 x 12<", text)) == 3 and text.count(", in no bucket<") == 2
    assert main(["data", "inspect", "--config", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["buckets"]["train"]
    assert found["unfit"] == [lost, unread] and found["buckets"][1]["samples"] == 1
    assert main(["data", "inspect", "--config", str(run), "data.loader.buckets=[]"]) == 1
    assert "buckets" in capsys.readouterr().err


def test_check_lists_the_bad_files_and_exits_with_1(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", "--config", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("the sizes in 2 rows differ") and out.endswith("\n7 samples read, 0 bad\n")
    bad = run.parent / "photos/2.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    assert main(["data", "check", "--config", str(run), "--workers", "2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{bad}: the image cannot be read: ") and lines[-1] == "7 samples read, 1 bad"
    assert main(["data", "check", "--config", str(run), "--json"]) == 1
    assert [row["file"] for row in json.loads(capsys.readouterr().out)["bad"]] == [str(bad)]


@pytest.mark.parametrize("command", ["check", "inspect"])
def test_names_and_texts_of_files_command_no_terminal(run: Path, capsys, command: str) -> None:
    """File names and reasons with control characters are printed as escapes, in text and in JSON."""
    wild = "x\x1b[2J\x9b1m\nforged.png"
    folder = run.parent / "wild"
    folder.mkdir()
    (folder / wild).write_bytes(b"no image")
    rows = [
        {"path": str(folder / wild), "text": "a \x1b]0;title\x07 caption"},
        {"path": "absent\x1b[1m\r.mp4"},
    ]
    (folder / "rows\x1b[7m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    document = yaml.safe_load(run.read_text())
    document["data"]["train"]["sources"] = [{"annotations": str(folder / "rows\x1b[7m.jsonl")}]
    run.write_text(yaml.safe_dump(document))
    for more in ([], ["--json"]):
        main(["data", command, "--config", str(run), *more])
        printed = capsys.readouterr()
        for text in printed:
            assert not any(mark in text for mark in ("\x1b", "\x9b", "\r", "\nforged")), repr(text)
        assert "\\x1b[" in printed.out + printed.err or "\\u001b[" in printed.out
        if more and printed.out:
            json.loads(printed.out)


def test_a_split_that_is_missing_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", "--config", str(run), "--split", "test"]) == 1
    assert "the config has no data.test" in capsys.readouterr().err


def test_other_datasets_can_be_checked_and_not_inspected(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = "data.train={type: shapes, num_frames: 4, height: 8, width: 8, clips: 3}"
    assert main(["data", "check", "--config", str(run), shapes]) == 0
    assert capsys.readouterr().out == "3 samples read, 0 bad\n"
    assert main(["data", "inspect", "--config", str(run), shapes]) == 1
    assert "has no sources to inspect" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["validate"], ["train", "--dry-run", "--config"]])
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"source_where": "exec('x') > 1"}, "`where: exec('x') > 1` calls a function"),
        ({"source_where": "hight > 1"}, "'hight'"),
        ({"source_columns": {"path": "file"}}, "no column 'file' (found: cap, path, width)"),
        (
            {"source_annotations": "theirs.jsonl"},
            "no column 'path' (found: caption, video); set columns: {path: video, caption: caption}",
        ),
        (
            {"source_annotations": "theirs.csv"},
            "  accepted: file_name, text\n  hint: set columns: {path: file_name, caption: text}",
        ),
        ({"source_folder": "/dev/null"}, "the folder of the images and clips does not exist"),
    ],
)
def test_what_is_wrong_with_a_source_shows_before_the_run(run, capsys, command, changes, what) -> None:
    if "source_annotations" in changes:
        changes = {
            "source_annotations": f"{run.parent}/{changes['source_annotations']}",
            "source_columns": {},
        }
    assert main([*command, str(changed(run, **changes))]) == 1
    assert what in capsys.readouterr().err


def test_validate_reads_the_heads_of_sources_without_torch(run: Path) -> None:
    (run.parent / "photos/1.jpg").unlink()
    code = (
        "import sys; from mm_core.cli.main import main; code = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "validate", str(run)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "1 of the first 2 files of" in done.stderr and "such as photos/1.jpg" in done.stderr


@pytest.mark.parametrize(
    ("override", "what"),
    [
        (
            "task.predictor.patch_size=[5,2,2]",
            "the data has images, clips of one frame, which this task does",
        ),
        (
            "train.micro_batch_size=2",
            "would join images, which have one frame, and clips in micro-batches of 2",
        ),
    ],
)
def test_a_plan_names_what_images_do_not_fit(run: Path, capsys, override: str, what: str) -> None:
    assert main(["train", "--dry-run", "--config", str(run), override]) == 1
    assert what in capsys.readouterr().err
    assert main(["train", "--dry-run", "--config", str(run), override, "data.train.num_frames=1"]) == int(
        "patch" in override
    )


def test_json_of_conversations_has_the_pieces_of_the_first_rows(
    run: Path, chat_model, tmp_path: Path, capsys
) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": "red"}]},
        {"messages": [{"role": "user", "content": "say <|im_end|>"}, {"role": "assistant", "content": "no"}]},
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    config = yaml.safe_load(run.read_text())
    sources = [{"annotations": str(tmp_path / "chat.jsonl")}]
    chat = {"type": "conversations", "sources": sources, "max_length": 2048}
    config |= {"validation": {"every": 500}}
    config["data"]["validation"] = {**chat, "processor": str(chat_model("qwen3_vl"))}
    run.write_text(yaml.safe_dump(config))
    words = ["data", "inspect", "--config", str(run), "--rows", "2", "--json"]
    assert main([*words, "--split", "validation"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed[printed.index("{") :])["validation"]  # DeepSpeed writes a line when imported
    assert found["rows"] == 4 and len(found["first"]) == 2
    assert found["first"][0]["pieces"] == [
        {"text": "<|im_start|>user\nwhat<|im_end|>\n<|im_start|>assistant\n", "learnt": False},
        {"text": "red<|im_end|>", "learnt": True},
        {"text": "\n", "learnt": False},
    ]
    assert "special token of the model" in found["first"][1]["error"]
    assert main(words) == 0
    both = json.loads(capsys.readouterr().out)
    assert both["validation"] == found and both["train"][0]["images"] == 3
