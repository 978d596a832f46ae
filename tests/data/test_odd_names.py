"""Names and texts that are not UTF-8: every name reaches the loader, or is a bad row; none is a traceback."""

from __future__ import annotations

import json
import os

import pytest

from mm_core.builtin.configs.data import MediaSource
from mm_core.data.rows.mapped_rows import MappedRows
from mm_core.data.rows.sources import SourceReader
from mm_core.errors import DataError

LATIN = os.fsdecode(b"caf\xe9.png")


def mapped(source, folder):
    folder.mkdir()
    MappedRows.write(SourceReader(0, source).blocks(), folder)
    return [row.path for row in MappedRows(folder)]


def test_names_of_files_that_are_not_utf8_reach_the_loader(tmp_path):
    media = tmp_path / "media"
    media.mkdir()
    for name in (LATIN, "plain.png"):
        (media / name).touch()
        (media / name).with_suffix(".txt").write_text("a caption")
    assert mapped(MediaSource(str(media)), tmp_path / "rows") == [LATIN, "plain.png"]
    table = tmp_path / "a.jsonl"
    table.write_text(json.dumps({"path": LATIN, "cap": "x"}) + "\n")
    assert mapped(MediaSource(str(table)), tmp_path / "more") == [LATIN]


def test_half_of_a_character_in_a_path_far_down_a_table_is_a_bad_row(tmp_path):
    rows = [{"path": "a.png", "cap": "x"} for _ in range(150)]
    rows += [{"path": "\ud83da.png", "cap": "x"}, {"path": "a.png", "cap": "\udce9"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"2 rows cannot be used") as fault:
        mapped(MediaSource(str(tmp_path / "a.jsonl")), tmp_path / "rows")
    assert r"line 151: the path contains \ud83d, half of a character" in str(fault.value)
    assert r"line 152: the caption contains \udce9, half of a character" in str(fault.value)


@pytest.mark.parametrize("column", ["path", "cap", "width"])
def test_a_column_of_parquet_that_is_not_utf8_is_an_error_in_blocks_and_in_rows(tmp_path, column):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    good = pa.array(["ok.png", "cafe.png"])
    bad = pa.Array.from_buffers(pa.string(), 2, [None, good.buffers()[1], pa.py_buffer(b"ok.pngcaf\xe9.png")])
    table = pa.table({"path": good, "cap": good, "width": good, column: bad})
    parquet.write_table(table, tmp_path / "a.parquet")
    for where in (None, "width != 3"):
        with pytest.raises(DataError, match="cannot be read as Parquet"):
            [*SourceReader(0, MediaSource(str(tmp_path / "a.parquet"), where=where)).blocks()]


@pytest.mark.parametrize("suffix", ["json", "parquet"])
def test_a_path_with_a_nul_is_a_bad_row_and_no_other_file(tmp_path, suffix):
    (tmp_path / "a .jpg").touch()
    rows = [{"path": "a\0.jpg", "cap": "x"}]
    if suffix == "json":
        (tmp_path / "a.json").write_text(json.dumps(rows))
    else:
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="contains a NUL"):
        [*SourceReader(0, MediaSource(str(tmp_path / f"a.{suffix}"))).blocks()]
