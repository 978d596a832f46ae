"""torch.save files that unpack to more than their size are refused before any byte is unpacked."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from mm_core.errors import CheckpointError
from mm_core.weights.stored import open_stored


def pack(path: Path, numbers: int, *, only: str = "") -> Path:
    """Zeros as torch saves them; members with `only` in their name are compressed to a thousandth."""
    whole = io.BytesIO()
    torch.save({"w": torch.zeros(numbers)}, whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as target:
        for member in source.infolist():
            kind = zipfile.ZIP_DEFLATED if only in member.filename else zipfile.ZIP_STORED
            target.writestr(member.filename, source.read(member), compress_type=kind)
    return path


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_a_bomb_is_refused_by_the_sizes_that_it_declares(tmp_path, suffix):
    path = pack(tmp_path / f"weights{suffix}", 2_000_000)
    size = path.stat().st_size
    assert size < 100_000
    with pytest.raises(CheckpointError) as caught:
        open_stored(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: this file was refused without loading it: its {size:,} bytes unpack to ")
    assert "but torch.save never compresses" in said and "safetensors" in said


def test_one_member_is_enough(tmp_path):
    """Only the pickle is compressed, which torch unpacks first."""
    whole = io.BytesIO()
    torch.save({"w": torch.zeros(3), "x": "a" * 1_000_000}, whole)
    path = tmp_path / "w.pt"
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as target:
        for member in source.infolist():
            kind = zipfile.ZIP_DEFLATED if member.filename.endswith("data.pkl") else zipfile.ZIP_STORED
            target.writestr(member.filename, source.read(member), compress_type=kind)
    with pytest.raises(CheckpointError, match=r"loading it: its [\d,]+ bytes unpack to 1,00"):
        open_stored(path)


@pytest.mark.parametrize("large", [False, True])
def test_a_second_directory_that_declares_less(tmp_path, monkeypatch, large):
    """zipfile reads the one right before the end, and torch the one that the end points to."""
    if large:
        monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 0)  # a large archive's end is written
    raw = pack(tmp_path / "w.pt", 2_000_000).read_bytes()
    end = raw.rfind(b"PK\x06\x06" if large else b"PK\x05\x06")
    first = raw.find(b"PK\x01\x02")
    second = bytearray(raw[first:end])
    at = 0
    while at < len(second):
        struct.pack_into("<I", second, at + 24, 0)  # the size that it unpacks to
        at += 46 + sum(struct.unpack_from("<HHH", second, at + 28))
    (tmp_path / "w.pt").write_bytes(raw[:end] + second + raw[end:])
    with pytest.raises(CheckpointError, match=r"loading it: (its zip directory is not|.*the archive is d)"):
        open_stored(tmp_path / "w.pt")


def test_a_packed_member_is_refused_however_small(tmp_path):
    path = pack(tmp_path / "w.pt", 1000, only="data.pkl")
    with pytest.raises(CheckpointError, match=r"its member 'archive/data.pkl' is compressed, but torch"):
        open_stored(path)


@pytest.mark.parametrize("change", ["a comment", "something before", "something between"])
def test_an_archive_that_torch_would_not_write(tmp_path, change):
    raw = pack(tmp_path / "w.pt", 100, only="nothing").read_bytes()
    end = raw.rfind(b"PK\x05\x06")
    content = {
        "a comment": raw[:-2] + b"\x02\x00ab",
        "something before": raw[:40] + raw,
        "something between": raw[:end] + b"ab" + raw[end:],
    }[change]
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"loading it: (its zip directory is not|.*the archive is d)"):
        open_stored(tmp_path / "w.pt")


def test_a_large_archive_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 0)
    path = pack(tmp_path / "w.pt", 100, only="nothing")
    assert b"PK\x06\x06" in path.read_bytes()
    assert open_stored(path).read("w", (slice(0, 3),)).tolist() == [0.0, 0.0, 0.0]


def test_a_directory_that_is_cut_off_or_unknown_is_one_error(tmp_path):
    whole = pack(tmp_path / "w.pt", 100, only="nothing").read_bytes()
    for content in (whole[:-30], whole[: len(whole) // 2], b"PK\x03\x04", b"PK\x03\x04" + b"\xff" * 100):
        (tmp_path / "w.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match="this file was refused without loading it: "):
            open_stored(tmp_path / "w.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_saves_is_read(tmp_path, zipped):
    """Many small tensors, whose names take more bytes than their numbers; also as torch wrote before 1.6."""
    state = {f"blocks.{number}.a_long_name.weight": torch.full((1,), float(number)) for number in range(300)}
    torch.save(state, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    stored = open_stored(tmp_path / "w.pt")
    assert float(stored.read("blocks.7.a_long_name.weight", (slice(0, 1),))) == 7.0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("import torch", "torch.save did not write it: it begins with the text b'import torch'"),
        ("<html>", "it begins with the text b'<html>'"),
        ("version https://git-lfs.github.com/spec/v1\noid", "it is a pointer of Git LFS: `git lfs pull`"),
        ("", "torch.save did not write it"),
    ],
)
def test_a_file_of_another_kind_under_this_name_is_named_by_its_beginning(tmp_path, content, reason):
    (tmp_path / "w.pt").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        open_stored(tmp_path / "w.pt")
    assert reason in caught.value.what
