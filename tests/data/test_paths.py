"""Odd paths in rows: each is an error, skipped and listed, and none ends a run or makes it wait."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from mm_core.contracts import DataRanks, Randomness
from mm_core.data.datasets.video_text import VideoTextDataset
from mm_core.data.loading.loader import MicroBatchLoader
from mm_core.data.loading.sampler import BatchPlan
from mm_core.data.loading.skipped import SkipLedger
from mm_core.data.media.images import read_image
from mm_core.data.media.package_readers import DecordReader
from mm_core.data.media.readers import PyAVReader
from mm_core.data.rows.annotations import inside, read_annotations
from mm_core.data.rows.tables import read_table
from mm_core.errors import DataError
from support.readers import TORCHCODEC

LOOP = "Too many levels of symbolic links"
ODD = {
    "loop.mp4": LOOP,
    "loop.mp4/below.mp4": LOOP,
    "a" * 300 + ".mp4": "File name too long",
    "deep/" * 900 + "a.mp4": "File name too long",
    "half\ud83d.mp4": r"it contains \ud83d, half of a character",
    "byte\udce9.mp4": r"it contains \udce9, half of a character",
    "nul\0.mp4": "embedded null byte",
    "folder.mp4": "is a folder, not a video",
    ".": "is a folder, not a video",
    "pipe.mp4": "is a named pipe, not a video",
    "socket.mp4": "is a socket, not a video",
    "file/below.mp4": "does not exist",
    "gone.mp4": "does not exist",
    "dangling.mp4": "does not exist",
}


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A folder with what the rows of `ODD` name."""
    (tmp_path / "loop.mp4").symlink_to("loop.mp4")
    (tmp_path / "dangling.mp4").symlink_to("nowhere.mp4")
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe.mp4")
    with socket.socket(socket.AF_UNIX) as bound, chdir(tmp_path):  # the name of a socket is short
        bound.bind("socket.mp4")
    return tmp_path


def test_odd_rows_of_videos_are_skipped_and_listed(odd: Path, shapes_data: Path, annotate) -> None:
    rows = json.loads((shapes_data / "data.json").read_text())[:30]
    (odd / "videos").mkdir()
    for row in rows:
        (odd / row["path"]).write_bytes((shapes_data / row["path"]).read_bytes())
    paths = list(ODD)
    bad = [{"path": path, "cap": "a"} for path in paths]
    bad.append({"path": rows[0]["path"], "cap": ["good", "half \ude00"]})
    dataset = VideoTextDataset(annotate(odd / "data.json", bad + rows), 8, 16, 16)
    plan = BatchPlan(len(dataset), 1, 1, 0, "sequential", True)
    ledger = SkipLedger(odd / "run", 1.0)
    loader = MicroBatchLoader(
        dataset,
        plan,
        batch_transform=None,
        rng=Randomness(0),
        share=DataRanks(),
        steps=range(len(bad)),
        workers=0,
        prefetch=2,
        pin_memory=False,
        device_type="cpu",
    )
    batches = list(ledger.watch(loader))
    assert len(batches) == len(bad)
    listed = {}
    for line in (odd / "run" / "skipped.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        listed[entry["index"]] = entry
    assert sorted(listed) == list(range(len(bad)))
    for index, path in enumerate(paths):
        assert ODD[path] in listed[index]["reason"], path
        assert listed[index]["id"] == str(odd / path)
    assert listed[len(paths)]["reason"] == r"the caption contains \ude00, half of a character"
    again = SkipLedger(odd / "run", 1.0)
    again.record([failure for batch in batches for failure in batch.failures])
    assert len((odd / "run" / "skipped.jsonl").read_text().splitlines()) == len(bad), "listed once"


@pytest.mark.parametrize("reader", [PyAVReader(), pytest.param(DecordReader(), id="decord"), TORCHCODEC])
@pytest.mark.parametrize("path", ODD)
def test_readers_and_images_refuse_odd_paths(odd: Path, reader, path: str) -> None:
    # A name of bytes that are no UTF-8 may be a file's: only rows are refused it.
    expected = "does not exist" if path.startswith("byte") else ODD[path]
    for call in (lambda: reader.probe(odd / path), lambda: reader.read(odd / path, [0.0])):
        with pytest.raises(DataError) as caught:
            call()
        assert expected in caught.value.what and caught.value.where == str(odd / path)
        str(caught.value).encode()  # every log and terminal takes it
    with pytest.raises(DataError) as caught:
        read_image(odd / path)
    expected = (
        "there is no such image" if expected == "does not exist" else expected.replace("a video", "an image")
    )
    assert expected in caught.value.what
    str(caught.value).encode()


def test_devices_are_no_videos_and_no_images() -> None:
    for path in (Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(DataError, match="is a device, not a video"):
            PyAVReader().probe(path)
        with pytest.raises(DataError, match="is a device, not an image"):
            read_image(path)


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A folder that all may enter, read by somebody without rights."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    root = os.geteuid() == 0
    yield folder
    if root:
        os.seteuid(0)
    (folder / "closed").chmod(0o755)
    shutil.rmtree(folder)


def test_what_must_not_be_read_is_a_readable_error(nobody: Path) -> None:
    (nobody / "a.mp4").write_bytes(b"x")
    (nobody / "a.mp4").chmod(0)
    (nobody / "closed").mkdir()
    (nobody / "closed" / "b.mp4").write_bytes(b"x")
    (nobody / "closed").chmod(0)
    if os.geteuid() == 0:
        os.seteuid(65534)
    for name in ("a.mp4", "closed/b.mp4"):
        path = inside(nobody, name)
        with pytest.raises(DataError, match="Permission denied"):
            PyAVReader().probe(path)
        with pytest.raises(DataError, match="Permission denied"):
            read_image(path)
    with pytest.raises(DataError, match="Permission denied"):
        list(read_table(nobody / "closed" / "b.csv", [0]))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("loop", "symbolic links"),
        ("a" * 300, "File name too long"),
        ("half\ud83d", r"it contains \\ud83d, half of a character"),
        ("nul\0", "embedded null byte"),
        ("folder", "(Is|is) a (directory|folder)"),
        ("gone", "does not exist"),
        ("file/below", "(does not exist|Not a directory)"),
    ],
)
def test_files_of_rows_at_odd_paths(tmp_path: Path, name: str, sentence: str) -> None:
    for suffix in (".json", ".jsonl", ".csv", ".parquet"):
        if name == "loop":
            (tmp_path / f"loop{suffix}").symlink_to(f"loop{suffix}")
        if name == "folder":
            (tmp_path / f"folder{suffix}").mkdir()
        (tmp_path / "file").touch()
        path = tmp_path / f"{name}{suffix}"
        with pytest.raises(DataError, match=sentence) as caught:
            list(read_table(path, ["a"]))
        str(caught.value).encode()
        with pytest.raises(DataError, match=sentence):
            read_annotations(path)


def test_a_table_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.csv")
    with pytest.raises(DataError, match="is a named pipe, not a table"):
        list(read_table(tmp_path / "rows.csv", ["a"]))


@pytest.mark.parametrize("folder", ["loop", "a" * 300, "nul\0", "half\ud83d", "file"])
def test_the_folder_of_the_videos_at_odd_paths(tmp_path: Path, folder: str, annotate) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    rows = annotate(tmp_path / "rows.json", [{"path": "a.mp4", "cap": "a"}])
    with pytest.raises(DataError, match=r"folder of the videos (does not exist|cannot be opened)") as caught:
        VideoTextDataset(rows, 8, 16, 16, folder=tmp_path / folder)
    assert caught.value.where == str(tmp_path / folder)
