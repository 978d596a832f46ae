"""Annotation files: what is accepted, and the error for everything else."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest

from mm_core.data.rows.annotations import Annotation, inside, read_annotations
from mm_core.data.rows.json_rows import RowFile
from mm_core.data.rows.packed_rows import PackedRows
from mm_core.errors import DataError


def fault(tmp_path: Path, text: str, name: str = "data.json") -> DataError:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(DataError) as caught:
        read_annotations(file)
    assert str(caught.value.where).startswith(str(file))
    return caught.value


def test_rows_are_read_with_their_facts_and_further_columns_ignored(tmp_path: Path) -> None:
    rows = [
        {"path": "a.mp4", "cap": "one"},
        {
            "path": "b/b.mp4",
            "cap": ["one", "two"],
            "num_frames": 49,
            "fps": 23.976,
            "resolution": {"height": 480, "width": 832},
            "aesthetic_score": 5.5,
        },
    ]
    expected = [
        Annotation(1, "a.mp4", ("one",)),
        Annotation(2, "b/b.mp4", ("one", "two"), 49),
    ]
    lines = "\n".join(json.dumps(row) for row in rows)
    for name, text in {
        "list.json": json.dumps(rows, indent=2),
        "lines.jsonl": lines + "\n\n",
        "lines_called_json.json": lines,
        "bom.json": "\ufeff" + json.dumps(rows),
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert read_annotations(tmp_path / name) == expected, name


def test_packed_rows_are_the_rows_and_travel_in_shared_memory() -> None:
    rows = [Annotation(n, f"{n}.mp4", ("é", "two")[: n % 3], n + 7) for n in range(1, 6)]
    packed = PackedRows(rows, Annotation)
    assert list(packed) == rows and len(packed) == 5
    assert packed[-1] == rows[-1] and packed[1:4:2] == rows[1:4:2]
    with pytest.raises(IndexError):
        packed[5]
    assert not len(PackedRows([], Annotation)) and not list(PackedRows([], Annotation))
    there = pickle.loads(ForkingPickler.dumps(packed))  # as for a worker
    assert list(there) == rows
    packed._bytes.fill_(0)
    assert there._bytes.is_shared() and not there._bytes.any(), "one memory"


def test_captions_may_hold_any_line_separator(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"path": "a.mp4", "cap": "x\u2028y"}\n', encoding="utf-8")
    assert read_annotations(file)[0].captions == ("x\u2028y",)


def test_the_published_example_that_is_no_json_is_explained(tmp_path: Path) -> None:
    # As tutorials print it: a resolution in braces without names.
    text = '[\n  {\n    "path": "a.mp4",\n    "cap": "a",\n    "resolution": {480, 832}\n  }\n]\n'
    error = fault(tmp_path, text)
    assert error.where == f"{tmp_path / 'data.json'}:5"
    assert "not JSON" in error.what and '"resolution": {480, 832}' in error.what
    assert error.hint and '{"height": 480, "width": 832}' in error.hint
    assert error.accepted and '"path"' in error.accepted and '"cap"' in error.accepted


def test_a_broken_line_of_jsonl_is_named(tmp_path: Path) -> None:
    error = fault(tmp_path, '{"path": "a", "cap": "b"}\n{"path": "a", "cap": \n', "x.jsonl")
    assert str(error.where).endswith("x.jsonl:2")


def test_missing_keys_are_listed_with_their_rows(tmp_path: Path) -> None:
    rows = [{"path": "a", "cap": "b"}, {"video": "a", "cap": "b"}, {"path": "a"}, {"path": "a"}]
    error = fault(tmp_path, json.dumps(rows))
    assert error.what.splitlines() == [
        "3 rows cannot be used",
        "  row 2: no 'path' (found: cap, video); the dataset media_text reads it with columns: {path: video}",
        "  row 3, row 4: no 'cap' (found: path)",
    ]


def test_thousands_of_like_faults_stay_one_line(tmp_path: Path) -> None:
    error = fault(tmp_path, json.dumps([{"path": "a"}] * 5000))
    assert "row 1, row 2" in error.what and "and 4990 more" in error.what and len(error.what) < 400


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (["a"], "a list instead of a row"),
        ({"path": 3, "cap": "x"}, "path is a number, not a file name"),
        ({"path": "", "cap": "x"}, "path is empty text, not a file name"),
        ({"path": "a", "cap": []}, "cap is empty list, not a caption"),
        ({"path": "a", "cap": ["x", 3]}, "cap is a list, not a caption or a list of captions"),
        ({"path": "a", "cap": None}, "cap is null"),
        ({"path": "../a.mp4", "cap": "x"}, "'../a.mp4' leads outside the folder"),
        ({"path": "b/../../a.mp4", "cap": "x"}, "leads outside the folder"),
        ({"path": "/etc/passwd", "cap": "x"}, "is absolute"),
        ({"path": "C:\\a.mp4", "cap": "x"}, "is absolute"),
        ({"path": "a", "cap": "x", "num_frames": 0}, "num_frames is 0, not a positive whole number"),
        ({"path": "a", "cap": "x", "num_frames": 4.5}, "num_frames is 4.5"),
        ({"path": "a", "cap": "x", "fps": "24"}, "fps is '24', not a positive number"),
        ({"path": "a", "cap": "x", "fps": float("nan")}, "fps is nan"),
        ({"path": "a", "cap": "x", "resolution": [480]}, "resolution is a list, not"),
        ({"path": "a", "cap": "x", "resolution": {"height": -1, "width": 2}}, "resolution.height is -1"),
    ],
)
def test_every_other_fault_of_a_row_has_a_readable_error(tmp_path: Path, row, sentence) -> None:
    error = fault(tmp_path, json.dumps([{"path": "ok", "cap": "ok"}, row]))
    assert f"row 2: {sentence}" in error.what or ("row 2" in error.what and sentence in error.what)


def test_files_that_hold_no_rows(tmp_path: Path) -> None:
    assert fault(tmp_path, "").what == "the annotation file is empty"
    assert fault(tmp_path, " \n ").what == "the annotation file is empty"
    assert fault(tmp_path, "[]").what == "the annotation file lists no samples"
    assert "a number, not a list" in fault(tmp_path, "3").what
    assert "an object, not a list of rows" in fault(tmp_path, '{\n"a": [1]\n}').what
    assert "nested too deeply" in fault(tmp_path, "[" * 100_000).what


DIGITS = "9" * 5000  # more than Python makes a number of
DEEP = "[" * 400 + "]" * 400  # JSON is read so deeply, and pickle does not follow


def test_a_row_that_no_parser_takes_is_a_row_alone(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [f'{{"a": {DIGITS}}}', '{"a": 1}', f'{{"a": {DEEP}}}', '{"a": %s' % ("[" * 100_000), "[2]"]
    for rows in (lines, lines[::-1]):
        file.write_text("\n".join(rows) + "\n")
        for name in ("rows.jsonl", "rows.txt"):
            file = file.rename(tmp_path / name)
            read = list(RowFile(file, "file", "rows").json_values())
            assert [place for place, _ in read] == [f"line {n}" for n in range(1, 6)]
            values = [value for _, value in read]
            values = values if rows is lines else values[::-1]
            assert (values[1], values[4]) == ({"a": 1}, [2])
            assert [values[n].what for n in (0, 2, 3)] == [
                "a whole number has too many digits",
                "the JSON is nested too deeply",
                "the JSON is nested too deeply",
            ]
            at = 1 if rows is lines else 5
            assert values[0].where == f"{file}:{at}"


def test_a_list_of_rows_with_what_no_parser_takes(tmp_path: Path) -> None:
    assert (
        fault(tmp_path, f'[{{"path": "a",\n"cap": {DIGITS}}}]').what == "a whole number has too many digits"
    )
    (tmp_path / "deep.json").write_text(f'[{{"a": 1}}, {{"a": {DEEP}}}]')
    (_, good), (place, bad) = RowFile(tmp_path / "deep.json", "file", "rows").json_values()
    assert good == {"a": 1} and place == "row 2" and bad.what == "the JSON is nested too deeply"


def test_the_byte_that_is_no_text_is_counted_from_the_start(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    good = ('{"cap": "é"}\n' * 20_000).encode()
    file.write_bytes(good + b"{\xff}\n")
    with pytest.raises(DataError, match=rf"the file is not UTF-8 text \(byte {len(good) + 1}\)"):
        list(RowFile(file, "file", "rows").json_values())


def test_rows_are_not_waited_for_in_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(DataError, match="the file cannot be read: it is a named pipe, not a plain file"):
        list(RowFile(pipe, "file", "rows").json_values())


@pytest.mark.parametrize("layout", ["lines", "list"])
def test_of_many_rows_little_more_is_in_memory_than_what_is_kept(tmp_path: Path, layout) -> None:
    rows = [json.dumps({"path": f"{n}.mp4", "cap": "word " * 400}) for n in range(5000)]
    file = tmp_path / "rows.json"
    file.write_text("\n".join(rows) if layout == "lines" else f"[{','.join(rows)}]")
    size = file.stat().st_size
    del rows
    tracemalloc.start()
    kept = sum(1 for _ in RowFile(file, "file", "rows").json_values())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept == 5000
    assert peak < (0.05 if layout == "lines" else 2.5) * size


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text("[]")
    with pytest.raises(DataError, match="does not exist") as caught:
        read_annotations(tmp_path / "dta.json")
    assert "'data.json'" in str(caught.value.hint)
    with pytest.raises(DataError, match="does not exist") as caught:
        read_annotations(tmp_path / "nowhere" / "data.json")
    assert "folder" in str(caught.value.hint)
    (tmp_path / "latin.json").write_bytes('[{"path": "é"}]'.encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8"):
        read_annotations(tmp_path / "latin.json")
    with pytest.raises(DataError, match="cannot be read"):
        read_annotations(tmp_path)


def test_a_link_may_stay_in_the_folder_and_not_leave_it(tmp_path: Path) -> None:
    folder = tmp_path / "videos"
    folder.mkdir()
    (folder / "a.mp4").write_text("a")
    (tmp_path / "secret.mp4").write_text("s")
    (folder / "good.mp4").symlink_to(folder / "a.mp4")
    (folder / "bad.mp4").symlink_to(tmp_path / "secret.mp4")
    (tmp_path / "alias").symlink_to(folder)
    assert inside(folder, "good.mp4").read_text() == "a"
    assert inside(tmp_path / "alias", "a.mp4").read_text() == "a", "the folder itself may be a link"
    with pytest.raises(DataError, match="leaves its folder through a symbolic link"):
        inside(folder, "bad.mp4")


def test_a_resolution_may_be_two_numbers(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text('[{"path": "a.mp4", "cap": "a", "resolution": [480, 832]}]')
    assert read_annotations(file)[0].path == "a.mp4"
    file.write_text('[{"path": "a.mp4", "cap": "a", "resolution": [480, -1]}]')
    with pytest.raises(DataError, match="resolution is -1"):
        read_annotations(file)
