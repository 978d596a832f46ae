"""Tables: every kind of file gives the same cells, and what cannot be read has an error with the reason."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from mm_core.builtin.configs.data import MediaColumns, MediaSource
from mm_core.data.rows.sources import SourceReader
from mm_core.data.rows.tables import Cells, read_table
from mm_core.errors import DataError

ROWS = [("so, so", 3), ('he said "no"', 1), ("über\nzwei 行", 2)]


def save(folder: Path, kind: str) -> Path:
    """ROWS, and a column that nobody asks for before them, as a file of that kind."""
    file = folder / f"rows.{kind}"
    objects = [{"other": 0, "text": text, "label": label} for text, label in ROWS]
    if kind == "json":
        file.write_text(json.dumps(objects, indent=1), encoding="utf-8-sig")
    elif kind == "jsonl":
        file.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in objects), encoding="utf-8")
    elif kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(objects), file, row_group_size=2)
    else:
        mark = "," if kind == "csv" else "\t"
        lines = [mark.join(["other", "text", "label"])]
        lines += [mark.join(["0", '"' + text.replace('"', '""') + '"', str(label)]) for text, label in ROWS]
        file.write_text("\r\n".join(lines) + "\r\n", encoding="utf-8", newline="")
    return file


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "tsv", "parquet"])
def test_each_kind_of_file_gives_the_same_cells_by_name(tmp_path, kind):
    found = list(read_table(save(tmp_path, kind), ["label", "text"]))
    assert [(text, int(label)) for label, text in (cells.values for cells in found)] == ROWS
    assert all(cells.fault is None for cells in found)


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "tsv", "parquet"])
def test_an_optional_column_may_be_absent_and_no_other(tmp_path, kind):
    file = save(tmp_path, kind)
    found = [cells.values for cells in read_table(file, ["answer", "text"], optional=["answer"])]
    assert found == [(None, text) for text, _ in ROWS]
    there = [cells.values[0] for cells in read_table(file, ["text"], optional=["text"])]
    assert there == [text for text, _ in ROWS]
    broken = "no column 'answer'"
    if kind.startswith("json"):
        cells = next(iter(read_table(file, ["answer", "text"], optional=["text"])))
        assert broken in str(cells.fault)
    else:
        with pytest.raises(DataError, match=broken):
            list(read_table(file, ["answer", "text"], optional=["text"]))


def test_an_optional_number_may_be_absent(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('["a"]\n["b", "c"]\n{"x": "d"}\n')
    found = list(read_table(file, [0, 1], optional=[1]))
    assert [cells.values for cells in found[:2]] == [("a", None), ("b", "c")]
    assert "column 0 is a number" in str(found[2].fault)


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet"])
def test_columns_have_numbers_too_and_then_a_first_line_is_no_head(tmp_path, kind):
    texts = [cells.values[0] for cells in read_table(save(tmp_path, kind), [1])]
    assert texts == ([] if kind == "parquet" else ["text"]) + [text for text, _ in ROWS]


def test_lists_a_line_are_rows_whatever_the_suffix(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text('["a", 1]\n["b", 2]\n', encoding="utf-8")
    assert [cells.values for cells in read_table(file, [1, 0])] == [(1, "a"), (2, "b")]
    file.write_text('[["a", 1], ["b"]]', encoding="utf-8")
    assert [*read_table(file, [1])] == [
        Cells("row 1", (1,)),
        Cells("row 2", fault="no column 1: the row has 1"),
    ]


def test_a_line_of_other_length_is_a_broken_row_and_lines_are_counted_through_line_breaks(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text('text,label\n"a\nb",1\nc\n\nd,2\n', encoding="utf-8")
    assert [*read_table(file, ["text"])] == [
        Cells("line 2", ("a\nb",)),
        Cells("line 4", fault="1 column, but the first line has 2"),
        Cells("line 6", ("d",)),
    ]


def test_a_field_may_be_longer_than_the_csv_module_has_it(tmp_path):
    (tmp_path / "rows.csv").write_text(f"text\n{'glad ' * 40000}\n", encoding="utf-8")
    before = csv.field_size_limit()
    (cells,) = read_table(tmp_path / "rows.csv", ["text"])
    assert len(cells.values[0]) == 200000 and csv.field_size_limit() == before


def test_quotes_may_be_letters(tmp_path):
    file = tmp_path / "rows.tsv"
    file.write_text('text\tlabel\n"open\t1\n', encoding="utf-8")
    assert [cells.values for cells in read_table(file, ["text"], quotes=False)] == [('"open',)]
    with pytest.raises(DataError, match="cannot be split into columns: unexpected end of data") as caught:
        list(read_table(file, ["text"], quotes=True))
    assert caught.value.where == f"{file}:2" and "quotes: false" in caught.value.hint
    with pytest.raises(DataError) as caught:
        list(SourceReader(0, MediaSource(str(file), columns=MediaColumns("text", "label"))).rows())
    assert caught.value.hint == "fix the line", "a key that its config has not"


FAULTS = [
    ("rows.csv", b"", "the table is empty"),
    ("rows.jsonl", b" \n", "the table is empty"),
    ("rows.json", b"[]", "the table has no rows"),
    ("rows.csv", b"text,label\n", "the table has no rows"),
    ("rows.csv", b"txt,label\na,1\n", "the table has no column 'text'"),
    ("rows.csv", b"text,text\na,b\n", "2 columns of the table are named 'text'"),
    ("rows.csv", b"text\n\xff\n", "the table is not UTF-8 text (byte 5)"),
    ("rows.parquet", b"PAR1", "the table cannot be read as Parquet: "),
    ("rows.xlsx", b"", "the table's format is unknown: its name ends in .xlsx"),
]


@pytest.mark.parametrize(("name", "content", "sentence"), FAULTS)
def test_what_cannot_be_read_is_one_error(tmp_path, name, content, sentence):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(read_table(file, ["text"]))
    assert caught.value.what.startswith(sentence) and caught.value.where == str(file)
    if "no column" in sentence:
        assert caught.value.accepted == "txt, label" and caught.value.hint == "did you mean 'txt'?"


def test_a_file_that_is_not_there_names_the_one_that_is(tmp_path):
    save(tmp_path, "jsonl")
    with pytest.raises(DataError) as caught:
        list(read_table(tmp_path / "row.jsonl", ["text"]))
    assert (
        caught.value.what == "the table does not exist" and caught.value.hint == "did you mean 'rows.jsonl'?"
    )


def test_without_pyarrow_the_error_names_what_to_install(tmp_path, monkeypatch):
    file = save(tmp_path, "parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="reading Parquet needs pyarrow, which is not installed") as caught:
        list(read_table(file, ["text"]))
    assert caught.value.hint == "run: pip install 'mm-core[parquet]'"
