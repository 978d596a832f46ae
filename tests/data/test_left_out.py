"""Every file of a source folder is used, or counted with its reason."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from PIL import Image

from mm_core.builtin.configs.data import MediaSource
from mm_core.cli.main import main
from mm_core.cli.main import train_main as train
from mm_core.contracts import Source
from mm_core.data.datasets.media_text import MediaTextDataset
from mm_core.data.rows.sources import SourceReader
from mm_core.diffusion.encoders.text import ByteTokenizer, HFTokenizer
from mm_core.errors import DataError, RunWarning
from mm_core.tasks.text_to_video.captions import cut_captions
from support.archives import archive
from support.pretrained_models import save_words
from support.ranks import run_ranks
from support.tiny_models import ONE_BLOCK


def read(folder: Path, *files: str) -> tuple[list[str], Mapping[str, int]]:
    """The paths of a folder's rows, and what is left out, once it has these files."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    reader = SourceReader(0, MediaSource(str(folder)))
    rows = [row.path for row in reader.rows()]
    return rows, reader.opened().dropped


def test_captioned_files_of_unknown_suffixes_are_counted_by_their_suffix(tmp_path):
    odd = (
        "b.xyz",
        "b.txt",
        "sub/c.XYZ",
        "sub/c.txt",
        "d.tar.gz",
        "d.tar.txt",
        "bare",
        "bare.txt",
        "E.abc",
        "e.txt",
    )
    rows, dropped = read(tmp_path, "a.jpg", "a.txt", *odd)
    assert rows == ["a.jpg"]
    assert dropped == {
        ".abc is not read": 1,
        ".xyz is not read": 2,
        ".gz is not read": 1,
        "a file without a suffix is not read": 1,
    }


def test_archives_and_links_to_nothing_are_counted(tmp_path):
    (tmp_path / "gone").symlink_to("/nowhere/photos")
    (tmp_path / "round").symlink_to("round")
    rows, dropped = read(tmp_path, "a.jpg", "a.txt", "b.zip", "c.7z", "d.RAR")
    assert rows == ["a.jpg"]
    assert dropped == {
        "a link that leads to nothing": 2,
        "a compressed archive is not read: unpack it": 3,
    }


def test_what_lies_beside_a_picture_and_its_caption_is_not_counted(tmp_path):
    files = (
        "a.jpg",
        "a.txt",
        "a.json",
        "a.npz",
        "a.mp4",
        "odd.xyz",
        "README.md",
        "README.txt",
        ".b.xyz",
        ".b.txt",
    )
    assert read(tmp_path, *files) == (["a.jpg", "a.mp4"], {})


def test_captions_without_an_image_or_clip_are_counted(tmp_path):
    rows, dropped = read(tmp_path, "a.jpg", "a.txt", "lone.txt", "sub/b.txt", "sub/b.json")
    assert rows == ["a.jpg"] and dropped == {"a .txt file without an image or clip beside it": 2}


def test_a_folder_of_nothing_that_is_read_names_the_suffixes(tmp_path):
    for files, what in (
        (("a.xyz", "b.xyz", "c"), r"no image or clip: its files are \.xyz \(2\), no suffix \(1\)"),
        (("a.txt",), r"every row is left out: \.xyz is not read \(1 row\); its files are"),
    ):
        with pytest.raises(DataError, match=what):
            read(tmp_path, *files)


def test_a_source_of_which_every_row_is_left_out_has_the_reasons(tmp_path):
    hint = "write captions, or set `caption` of the source"
    reason = "no .txt member and no caption in a .json member"
    archive(tmp_path / "a.tar", {"1.jpg": b"", "2.jpg": b""})
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips/a.mp4").touch()
    (tmp_path / "a.jsonl").write_text('{"path": "a.jpg", "cap": "x", "width": 8}\n')
    for name, options, what, hint_of in (
        ("clips", {}, "no .txt file beside it (1 row)", hint),
        ("a.tar", {}, f"{reason} (2 rows)", hint),
        ("a.jsonl", {"where": "width > 8"}, "where: width > 8 (1 row)", None),
    ):
        with pytest.raises(DataError) as fault:
            list(SourceReader(0, MediaSource(str(tmp_path / name), **options)).rows())
        assert fault.value.what == f"every row is left out: {what}"
        assert fault.value.hint == hint_of and fault.value.accepted is None


def test_names_that_differ_by_case_are_used_where_one_caption_fits(tmp_path):
    (tmp_path / "b.TXT").write_text("of b")
    (tmp_path / "a.txt").write_text(" of\0A\n")
    files = (
        "A.JPG",
        "b.png",
        "c.jpg",
        "C.jpg",
        "c.TXT",
        "d.jpg",
        "D.txt",
        "d.TXT",
        "e.jpg",
        "E.jpg",
        "e.txt",
    )
    rows, dropped = read(tmp_path, *files)
    assert rows == ["A.JPG", "b.png", "e.jpg"]
    assert dropped == {
        "no .txt file beside it": 4,
        "a .txt file without an image or clip beside it": 3,
    }
    with pytest.warns(RunWarning, match=r"left out: .*beside it \(4\)"):
        data = MediaTextDataset([MediaSource(str(tmp_path), caption_prefix="a ")], 1, 8, 8)
    assert [data.caption(row, None) for row in data.rows[:2]] == ["a of A", "a of b"]


def test_a_caption_of_another_case_that_is_no_text_is_counted(tmp_path):
    os.mkfifo(tmp_path / "A.txt")
    (tmp_path / "B.txt").write_bytes(b"\xff")
    rows, dropped = read(tmp_path, "a.jpg", "b.jpg", "c.jpg", "c.txt")
    assert rows == ["c.jpg"] and dropped == {"its .txt file cannot be read": 2}


def test_linked_folders_are_counted_and_met_once(tmp_path):
    for name in ("out", "data"):
        read(tmp_path / name, "a.jpg", "a.txt")
    data = tmp_path / "data"
    (data / "loop").symlink_to(data)
    (data / "again").symlink_to("loop")
    (data / "other").symlink_to(tmp_path / "out")
    rows, dropped = read(data)
    assert rows == ["a.jpg"]
    assert dropped == {
        "a linked folder, whose files are read in their own place": 2,
        "a linked folder: files outside the source are not read (name it as a source of its own)": 1,
    }
    (tmp_path / "link").symlink_to(data)
    assert read(tmp_path / "link") == (rows, dropped)


def test_a_folder_that_the_system_refuses_is_counted(tmp_path, monkeypatch):
    source = tmp_path / "source"
    read(source, "a.jpg", "a.txt")
    monkeypatch.chdir(source)
    for _ in range(20):  # deeper than a path may be long
        Path("d" * 250).mkdir()
        os.chdir("d" * 250)
    rows, dropped = read(source)
    assert rows == ["a.jpg"] and dropped == {"a folder that cannot be opened: File name too long": 1}


def a_run(folder: Path, **encoder: int) -> str:
    """A config whose sources leave out rows and have empty captions: a folder, a table and an archive."""
    photos = folder / "photos"
    photos.mkdir()
    for number, text in enumerate(("a cat", "", " \n", "&nbsp;")):
        Image.new("RGB", (8, 8)).save(photos / f"{number}.png")
        (photos / f"{number}.txt").write_text(text)
    (photos / "4.txt").write_text("of a picture that is not there")
    rows = [{"path": "0.png", "cap": cap} for cap in ("a", "", ["b", "  "], ["", ""])]
    (photos / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    archive(folder / "a.tar", {"1.png": (photos / "0.png").read_bytes(), "1.txt": b"c"})
    table = {"annotations": str(photos / "rows.jsonl")}
    sources = [{"annotations": str(photos)}, table, {**table, "caption_prefix": "a photo of "}]
    train = {"type": "media_text", "sources": [*sources, {"annotations": str(folder / "a.tar")}]}
    config = {
        "run": {"name": "media", "dir": str(folder / "runs")},
        "task": {**ONE_BLOCK, "text_encoder": {**ONE_BLOCK["text_encoder"], **encoder}},
        "data": {"train": {**train, "num_frames": 1, "height": 8, "width": 8}, "loader": {"workers": 0}},
        "engine": {"type": "fsdp2"},
        "optimizer": {"type": "adamw", "lr": 1e-3},
        "train": {"steps": 2, "micro_batch_size": 1, "global_batch_size": 4},
        "log": {"trackers": []},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return str(folder / "run.yaml")


@pytest.mark.filterwarnings("ignore:.*left out:mm_core.errors.RunWarning")
def test_plan_inspect_and_check_show_what_is_left_out_and_empty(tmp_path, capsys):
    run = a_run(tmp_path)
    photos = f"data.train: {tmp_path}/photos"
    notes = [
        f"{photos}: 1 row left out: a .txt file without an image or clip beside it",
        f"{photos}: 3 empty captions, used as any other",
        f"{photos}/rows.jsonl: 4 empty captions, used as any other",
    ]
    for command in (["inspect"], ["check"]):
        assert main(["data", *command, "--config", run]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if line.startswith("data.train")] == notes
    assert main(["data", "check", "--config", run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == notes
    assert main(["data", "inspect", "--config", run, "--json"]) == 0
    assert [each["empty_captions"] for each in json.loads(capsys.readouterr().out)["train"]] == [3, 4, 0, 0]
    assert train(["--config", run, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("note: data.")] == [f"note: {note}" for note in notes]


def test_a_row_that_is_wrong_is_an_error_of_the_plan_wherever_it_stands(tmp_path, capsys):
    run = a_run(tmp_path)
    rows = [json.dumps({"path": "0.png", "cap": "a"})] * 150 + [json.dumps({"path": "0.png"})]
    (tmp_path / "photos/rows.jsonl").write_text("\n".join(rows))
    assert train(["--config", run, "--dry-run"]) == 1
    assert "line 151" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*left out:mm_core.errors.RunWarning")
def test_captions_that_the_tokenizer_cuts_are_counted_by_check_and_by_the_run(tmp_path, capsys):
    run = a_run(tmp_path, max_length=7)
    rows = [{"path": "0.png", "cap": ["short", "exactl", "longer than this", "é" * 4]}]
    (tmp_path / "photos/rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["data", "check", "--config", run]) == 0
    cut = "of 13 captions cut to 7 tokens (max_length of the text encoder); the longest has 28"
    assert f"data.train: 6 {cut}" in capsys.readouterr().out
    assert train(["--config", run]) == 0
    shown = capsys.readouterr().err
    assert re.search(r"warning: a caption has \d+ tokens, of which 7 are read \(max_length", shown)
    assert re.search(r"warning: [1-8] of 8 captions cut to 7 tokens .*; the longest has \d+", shown)


@pytest.mark.filterwarnings("ignore:.*left out:mm_core.errors.RunWarning")
def test_captions_that_are_cut_are_counted_when_a_cache_is_built(tmp_path, capsys):
    run = a_run(tmp_path, max_length=7)
    (tmp_path / "photos/rows.jsonl").write_text(json.dumps({"path": "0.png", "cap": "longer than this"}))
    assert main(["cache", "build", "--config", run, f"data.cache.dir={tmp_path}/cache"]) == 0
    shown = capsys.readouterr().out
    # each text once: of the pictures, "", "a cat", "c", and the row's with and without its prefix
    assert "2 of 5 captions cut to 7 tokens (max_length of the text encoder); the longest has 28" in shown


def test_tokens_are_counted_before_the_cut_with_those_that_are_added(tmp_path):
    save_words(tmp_path)
    for tokenizer in (ByteTokenizer(4), HFTokenizer(str(tmp_path), 4)):
        texts = ["w3", "w3 w4 w5 w6 w7 w8", ""]
        _, mask = tokenizer(texts)
        counts = tokenizer.token_counts(texts)
        assert [min(4, count) for count in counts] == mask.sum(1).tolist()
        assert cut_captions(tokenizer, texts, mask) == [counts[1]] and counts[1] > 4


@pytest.mark.slow
def test_the_cut_captions_of_all_ranks_are_one_number():
    said = "2 of 20 captions cut to 16 tokens (max_length of the text encoder); the longest has 22\n"
    assert run_ranks(Path(__file__).with_name("cut_ranks.py"), 3) == [said] * 3


@pytest.mark.filterwarnings("ignore:.*left out:mm_core.errors.RunWarning")
def test_the_cache_keeps_the_rows_that_were_read_before_and_knows_those_that_are_new(tmp_path):
    read(tmp_path, "b.jpg", "b.txt")

    def sources() -> dict[str, Source]:
        data = MediaTextDataset([MediaSource(str(tmp_path))], 1, 8, 8)
        return {
            Path(each.id).name: each for each in (data.source_of(n, None, None) for n in range(len(data)))
        }

    before = sources()
    (tmp_path / "A.jpg").touch()
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "c.xyz").touch()
    first = sources()
    (tmp_path / "a.txt").write_text("two")
    second = sources()
    assert first["b.jpg"] == second["b.jpg"] == before["b.jpg"] and len(first) == 2
    assert first["A.jpg"] != second["A.jpg"]
