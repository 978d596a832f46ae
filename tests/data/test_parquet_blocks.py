"""Parquet in blocks: the same mapped files, bit for bit, and the same errors as row by row."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mm_core.builtin.configs.data import MediaColumns, MediaSource
from mm_core.data.rows.annotations import MAY_ESCAPE, escapes
from mm_core.data.rows.mapped_rows import MappedRows
from mm_core.data.rows.media_rows import RowBlock
from mm_core.data.rows.sources import SourceReader
from mm_core.errors import DataError

pa = pytest.importorskip("pyarrow")
pc = pytest.importorskip("pyarrow.compute")
parquet = pytest.importorskip("pyarrow.parquet")

PATHS = ["a.jpg", "deep/B.JpEg", "c.mp4", "ä 二.TIFF", "no_suffix", "x.m\u212av", "a.jpg\n", "a.png/b"]
DOTS = ["..hidden.png", "a..b.webp", "...", "a/.../b.mp4", "\n/x.bmp", "é", "a\\..\\b.jpg"]
BROKEN_PATHS = [
    None,
    "",
    "/etc/a.jpg",
    "../a.jpg",
    "a/../b.jpg",
    "a/..",
    "..",
    "C:\\a.jpg",
    "\\\\a\\b\\c.jpg",
]
NUMBERS = [49, 0, -1, None, 2**31 - 1, 2**31, 2**40, 7]
RATES = [24.0, 23.976, 0.0, None, math.nan, math.inf, -1.0, 1e-9]


def table(**columns: Any) -> Any:
    """A table of eight rows, whose columns are `columns` besides paths and captions."""
    captions = ["one", "", "drei 三", "four", "five\n", "six", "seven", "&amp;"]
    return pa.table({"path": PATHS, "cap": captions, **columns})


PLAIN = {
    "no sizes": table(),
    "dots": table(path=[*DOTS, "a."]),
    "numbers": table(num_frames=NUMBERS, fps=RATES, height=NUMBERS[::-1], width=NUMBERS),
    "texts": table(
        num_frames=["49", "x", "", None, "4.0", "1e3", " 7", "²"],
        fps=["24", "nan", None, "inf", "-1", "0x3", "1_0", "23.976"],
    ),
    "small kinds": table(
        num_frames=pa.array([1, 2, None] + [3] * 5, pa.uint8()), fps=pa.array([1.5] * 8, pa.float32())
    ),
    "true and false": table(num_frames=[True, False] * 4, height=[1.0, 1.5] * 4),
    "nothing known": table(num_frames=pa.nulls(8), resolution=pa.nulls(8)),
    "resolution in text": table(
        resolution=["480x832", "480*832", " 7 , 9 ", "wide", None, "0x4", "4x" + "9" * 5000, ""],
        height=NUMBERS,
    ),
    "resolution in lists": table(
        resolution=[[480, 832], [480], [], None, [0, 4], [1, None], [2, 3, 4], [5, 6]]
    ),
    "resolution in objects": table(
        resolution=[{"height": 480, "width": 832}, None, {"height": None, "width": 3}, {"height": -1}] * 2,
        width=NUMBERS,
    ),
    "captions in lists": table(
        cap=[["one"], ["one", "", "three"], [""], ["x"], ["y"], ["z"], ["a", "b"], ["c"]]
    ),
    "a list of long texts": table(cap=pa.array([["one", "two"]] * 8, pa.large_list(pa.string()))),
    "long texts": table(cap=pa.array(["one"] * 8, pa.large_string())),
    "categories": table(
        cap=pa.array(["one", "two"] * 4).dictionary_encode(),
        num_frames=pa.array([3, None] * 4).dictionary_encode(),
    ),
}
ODD = {
    "a path like a drive's": table(path=["a:b.jpg"] * 8),
    "a zero byte": table(cap=["a\0b"] * 8),
    "zero bytes that are as many as captions": table(cap=[["a\0b"], []] * 4),
    "lists with nulls": table(cap=[["one", None], ["two"]] * 4),
    "broken paths": table(path=BROKEN_PATHS[:8]),
    "more broken paths": table(path=BROKEN_PATHS[1:]),
    "paths of numbers": table(path=[1] * 8),
    "paths in bytes": table(path=[b"a.jpg"] * 8),
    "captions missing": table(cap=["x", None] * 4),
    "captions in empty lists": table(cap=[["x"], []] * 4),
    "captions in lists of nulls": table(cap=[["x"], [None]] * 4),
    "captions of numbers": table(cap=[1.0] * 8),
    "no captions": table(cap=pa.nulls(8)),
    "lists in lists": table(cap=[[["x"], ["y", "z"]]] * 8),
    "no rows": table().slice(0, 0),
    "no caption column": table().drop_columns(["cap"]),
    "one name twice": pa.table([PATHS, PATHS, PATHS], names=["path", "cap", "cap"]),
}


def outcome(folder: Path, source: MediaSource, how: str) -> tuple[object, int]:
    """The mapped files and counts, or the error; and the number of blocks."""
    blocks = 0

    def counted(rows):
        nonlocal blocks
        for row in rows:
            blocks += isinstance(row, RowBlock)
            yield row

    reader = SourceReader(3, source)
    (folder / how).mkdir()
    try:
        MappedRows.write(counted(getattr(reader, how)()), folder / how)
    except DataError as fault:
        return fault.render(), blocks
    return (
        reader.kept,
        reader.dropped,
        *((folder / how / name).read_bytes() for name in ("facts.npy", "text.npy", "ends.npy")),
    ), blocks


def compared(folder: Path, rows: Any, **fields: Any) -> int:
    """Compares both ways to read a table; returns the number of blocks."""
    parquet.write_table(rows, folder / "rows.parquet")
    source = MediaSource(str(folder / "rows.parquet"), **fields)
    (expected, _), (found, blocks) = (outcome(folder, source, how) for how in ("rows", "blocks"))
    assert found == expected
    return blocks


@pytest.mark.parametrize("name", PLAIN)
def test_blocks_are_the_rows_bit_for_bit(tmp_path, name):
    assert compared(tmp_path, PLAIN[name]) == 1


@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_or_broken_is_judged_row_by_row(tmp_path, name):
    assert compared(tmp_path, ODD[name]) == 0


def test_columns_by_name_and_number_and_several_captions(tmp_path):
    columns = {"b": ["x"] * 8, "c": [["y", "z"]] * 8, "d": NUMBERS}
    for number, (named, blocks) in enumerate(
        (
            (MediaColumns(caption=("cap", "b", "c"), width="d"), 1),
            (MediaColumns(caption=("path", "path")), 1),
            (MediaColumns(path=0, caption=(1, 3)), 1),
            (MediaColumns(caption=("b", "d")), 0),
            (MediaColumns(path="gone"), 0),
            (MediaColumns(path=9), 0),
        )
    ):
        (tmp_path / str(number)).mkdir()
        assert compared(tmp_path / str(number), table(**columns), columns=named) == blocks


def test_a_broken_row_far_behind_is_named_by_its_number(tmp_path):
    count = 70_000  # more than a batch
    paths = [f"{number}.jpg" for number in range(count)]
    rows = pa.table({"path": paths, "cap": paths, "width": range(count)})
    assert compared(tmp_path, rows) == 2
    paths[66_000] = "../x.jpg"
    (tmp_path / "b").mkdir()
    assert compared(tmp_path / "b", rows.set_column(0, "path", [paths])) == 1
    source = MediaSource(str(tmp_path / "b/rows.parquet"))
    with pytest.raises(DataError, match=r"row 66001: the path '../x.jpg' leads outside"):
        list(SourceReader(0, source).blocks())


def test_a_condition_is_tried_on_each_row(tmp_path):
    assert compared(tmp_path, table(width=NUMBERS), where="width > 4") == 0


def test_text_that_is_not_utf8_is_an_error_of_the_table(tmp_path):
    bad = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    )
    parquet.write_table(pa.table({"path": ["a.jpg"], "cap": bad}), tmp_path / "a.parquet")
    for how in ("rows", "blocks"):
        with pytest.raises(DataError, match=r"cannot be read as Parquet: .*UTF8"):
            list(getattr(SourceReader(0, MediaSource(str(tmp_path / "a.parquet"))), how)())


def test_no_path_that_escapes_passes_as_plain():
    pieces = ["a", "..", ".", "/", "\\", ":", "\n", "é", "", "C"]
    paths = [
        one + two + three + four for one in pieces for two in pieces for three in pieces for four in pieces
    ]
    plain = pc.invert(pc.match_substring_regex(pa.array(paths), MAY_ESCAPE)).to_pylist()
    assert sum(plain) > 1000
    assert [path for path, passes in zip(paths, plain, strict=True) if passes and escapes(path)] == []


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(lambda pa: pa.array([10**7, 1], pa.date32()), id="date"),
        pytest.param(lambda pa: pa.array([2**62 + 1, 1], pa.timestamp("ns")), id="nanoseconds"),
        pytest.param(lambda pa: pa.array([2**62, 1], pa.duration("s")), id="duration"),
        pytest.param(lambda pa: pa.array([1, 2], pa.timestamp("s", tz="Nowhere/Bad")), id="zone"),
        pytest.param(lambda pa: pa.array([[10**7, 1], [1, 1]], pa.list_(pa.date32())), id="list"),
    ],
)
@pytest.mark.parametrize("column", ["fps", "num_frames", "resolution"])
def test_sizes_that_python_cannot_hold_declare_nothing(tmp_path, values, column):
    pa = pytest.importorskip("pyarrow")
    columns = {"path": ["a.jpg", "b.jpg"], "cap": ["x", "y"], column: values(pa)}
    pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), tmp_path / "a.parquet")
    reader = SourceReader(0, MediaSource(str(tmp_path / "a.parquet")))
    MappedRows.write(reader.blocks(), tmp_path)
    (first, _) = MappedRows(tmp_path)
    assert (first.num_frames, first.fps, first.height) == (None, None, None)
