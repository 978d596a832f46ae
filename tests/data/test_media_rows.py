"""Sources of images and clips: every format gives the same rows, and what is wrong is named."""

from __future__ import annotations

import csv
import json
import re
import tarfile
import zlib
from pathlib import Path

import pytest
from PIL import Image

from mm_core.builtin.configs.data import CaptionTags, MediaColumns, MediaSource
from mm_core.data.datasets.first_rows import of_media_text
from mm_core.data.rows.mapped_rows import MappedRows
from mm_core.data.rows.media_rows import MediaRow, declared
from mm_core.data.rows.sources import SourceReader
from mm_core.data.rows.where import Where
from mm_core.errors import DataError
from support.archives import archive

ROWS = [
    {"path": "a.jpg", "cap": "one", "width": 832, "height": 480, "num_frames": 1, "fps": 24.0},
    {"path": "deep/b.MP4", "cap": "two, 二", "width": 320, "height": 240, "num_frames": 49, "fps": 12.5},
    {"path": "c.webm", "cap": 'three "3"', "width": 640, "height": 480, "num_frames": 81, "fps": 30.0},
]
FORMATS = ("rows.json", "rows.jsonl", "rows.csv", "rows.tsv", "rows.parquet")


def write(path: Path, rows: list[dict] = ROWS) -> Path:
    """Writes rows as a table of the kind that its name has."""
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            table.writeheader()
            table.writerows(rows)
    return path


def read(path: Path, most: int | None = None, **fields: object) -> list[MediaRow]:
    return list(SourceReader(0, MediaSource(str(path), **fields)).rows(most))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FORMATS)
def test_every_table_gives_the_same_rows(tmp_path, name):
    image, clip, other = read(write(tmp_path / name))
    assert image == MediaRow(0, "a.jpg", "image", ("one",), 1, 24.0, 480, 832)
    assert clip == MediaRow(0, "deep/b.MP4", "clip", ("two, 二",), 49, 12.5, 240, 320)
    assert (other.path, other.captions) == ("c.webm", ('three "3"',))


@pytest.mark.parametrize("name", FORMATS)
def test_where_keeps_the_rows_that_it_names_and_counts_the_others(tmp_path, name):
    reader = SourceReader(0, MediaSource(str(write(tmp_path / name)), where="width >= 480 and fps != 30"))
    assert [row.path for row in reader.rows()] == ["a.jpg"]
    assert reader.dropped == {"where: width >= 480 and fps != 30": 2}


@pytest.mark.parametrize("name", FORMATS)
def test_an_unknown_column_is_named_with_those_that_there_are(tmp_path, name):
    for fields in ({"where": "wdith > 4"}, {"columns": MediaColumns(caption="wdith")}):
        with pytest.raises(DataError, match="'wdith'") as fault:
            read(write(tmp_path / name), **fields)
        assert "width" in fault.value.render()


@pytest.mark.parametrize("name", FORMATS)
def test_a_path_that_leaves_its_folder_is_refused_before_any_file_is_opened(tmp_path, name):
    for path in ("../x.jpg", "/etc/x.jpg", "a/../../x.jpg", "C:\\x.jpg"):
        with pytest.raises(DataError, match=r"leads outside the folder|is absolute: rows have"):
            read(write(tmp_path / name, [ROWS[0], {**ROWS[1], "path": path}]))


def test_columns_have_other_names_or_numbers(tmp_path):
    renamed = [{"file": row["path"], "text": row["cap"], "long": "more"} for row in ROWS]
    columns = MediaColumns(path="file", caption=("text", "long"))
    assert read(write(tmp_path / "a.csv", renamed), columns=columns)[0].captions == ("one", "more")
    (tmp_path / "b.csv").write_text("a.jpg,one\nb.mp4,two\n")
    rows = read(tmp_path / "b.csv", columns=MediaColumns(path=0, caption=1))
    assert [(row.path, row.captions) for row in rows] == [("a.jpg", ("one",)), ("b.mp4", ("two",))]


@pytest.mark.parametrize(
    ("resolution", "sides"),
    [
        ({"height": 480, "width": 832}, (480, 832)),
        ([480, 832], (480, 832)),
        ("480x832", (480, 832)),
        ("wide", (None, None)),
        ([480], (None, None)),
        (7, (None, None)),
    ],
)
def test_a_declared_size_has_three_forms_and_none_is_an_error(resolution, sides):
    assert declared(None, None, resolution, None, None)[2:] == sides
    assert declared("49", "24", resolution, "64", 96.0) == (49, 24.0, 64, 96)
    assert declared(-1, "x", None, 0, True) == (None, None, None, None)
    assert declared(10**12, 10**400, "1x" + "9" * 5000, 2**31, 2**31 - 1) == (None, None, 1, 2**31 - 1)


def test_a_row_without_the_size_that_where_needs_is_left_out_with_the_reason(tmp_path):
    rows = [ROWS[0], {"path": "b.mp4", "cap": "x", "resolution": "480x640"}, {"path": "c.mp4", "cap": "x"}]
    reader = SourceReader(0, MediaSource(str(write(tmp_path / "a.jsonl", rows)), where="width > 400"))
    assert [row.path for row in reader.rows()] == ["a.jpg", "b.mp4"]
    assert reader.dropped == {"where: width unknown": 1}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('open("x") == 1', "calls a function"),
        ("path.upper() == 1", "calls a function"),
        ("path.real == 1", "uses an attribute"),
        ("[x for x in path]", "contains '"),
        ("width = 4", "is not a condition"),
        ("width >", "is not a condition"),
        ("(" * 500, "is not a condition"),
        ("lambda: width", "contains '"),
        ("1 > 0", "names no column"),
        ("width @ 2 > 1", "contains 'width @ 2'"),
        ("width == 2j", "contains '2j'"),
    ],
)
def test_a_condition_that_is_more_than_a_comparison_is_refused(tmp_path, text, what):
    with pytest.raises(DataError, match=what):
        Where(text)
    options = {"sources": [MediaSource(str(write(tmp_path / "a.json")), where=text)]}
    assert [what in fault.what for fault in of_media_text(options)] == [True]


def test_a_condition_compares_numbers_texts_and_lists():
    row = {"width": 832, "source": "web", "tags": ["a", "b"]}
    for text in ('width / 2 > 400 and source in ["web", "film"]', '"b" in tags', "not width == 3"):
        assert Where(text)(row)
    for text in ("width > source", "width ** 99999999 > 1", "tags[7] == 1"):
        with pytest.raises(TypeError):
            Where(text)(row)


def test_a_folder_has_media_with_captions_beside_them(tmp_path):
    for name in ("b.JPG", "a.png", "deep/c.mp4", "deep/lone.mp4", "notes.md", ".hidden.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        if name != "deep/lone.mp4":
            (tmp_path / name).with_suffix(".txt").touch()
    reader = SourceReader(3, MediaSource(str(tmp_path)))
    assert [(row.path, row.medium) for row in reader.rows()] == [
        ("a.png", "image"),
        ("b.JPG", "image"),
        ("deep/c.mp4", "clip"),
    ]
    assert reader.dropped == {"no .txt file beside it": 1} and reader.opened().uncaptioned == 1


def test_what_has_no_caption_gets_that_of_its_source_and_is_counted(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("a.png", "b.png", "a.txt"):
        (folder / name).touch()
    bare = [{"path": "a.png", "cap": "own"}, {"path": "b.png", "cap": ""}, {"path": "c.png"}]
    csv_rows = [{"path": row["path"], "cap": row.get("cap", "")} for row in bare]
    places = {
        folder: ["a.png own", "b.png ohwx"],
        write(tmp_path / "rows.jsonl", bare): ["a.png own", "b.png ohwx", "c.png ohwx"],
        write(tmp_path / "rows.csv", csv_rows): ["a.png own", "b.png ohwx", "c.png ohwx"],
        write(tmp_path / "rows.parquet", csv_rows): ["a.png own", "b.png ohwx", "c.png ohwx"],
        write(tmp_path / "no_captions.csv", [{"path": "a.png"}]): ["a.png ohwx"],
        archive(tmp_path / "0.tar", {"1.jpg": b"x", "1.txt": b"own", "2.jpg": b"y"}): [
            "1.jpg own",
            "2.jpg ohwx",
        ],
    }
    for path, expected in places.items():
        reader = SourceReader(0, MediaSource(str(path), caption="ohwx"))
        found = [f"{row.path} {''.join(row.captions) or 'own'}" for row in reader.blocks()]
        assert (found, reader.dropped) == (expected, {})
        assert reader.opened().filled == sum("ohwx" in each for each in expected)


def test_rows_of_conversations_name_the_dataset_that_reads_them(tmp_path):
    llava = [{"id": "1", "image": "a.jpg", "conversations": [{"from": "human", "value": "<image>?"}]}]
    with pytest.raises(DataError, match=r"found: conversations, id, image\); data.train.type: conversations"):
        read(write(tmp_path / "data.json", llava))


def test_a_source_s_caption_does_not_hide_captions_under_another_name(tmp_path):
    other = [{"path": "a.png", "caption": "own"}]
    for place in (
        write(tmp_path / "rows.csv", other),
        write(tmp_path / "rows.jsonl", other),
        archive(tmp_path / "0.tar", {"1.jpg": b"x", "1.json": b'{"caption": "own"}'}),
    ):
        with pytest.raises(DataError, match=re.escape("columns: {caption: caption}")):
            read(place, caption="ohwx")
    table = write(tmp_path / "b.csv", [{"path": "a.png", "cap": "own"}])
    with pytest.raises(DataError, match="no column 'cpa'"):
        read(table, caption="ohwx", columns=MediaColumns(caption="cpa"))


def test_blank_captions_are_those_of_the_source_in_every_kind_of_it(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/A.PNG").touch()
    (tmp_path / "folder/a.txt").write_text(" ")
    blank = [{"path": "a.png", "cap": " "}, {"path": "b.png", "cap": 7}]
    for place in (
        tmp_path / "folder",
        write(tmp_path / "rows.csv", blank[:1]),
        archive(tmp_path / "0.tar", {"1.jpg": b"x", "1.txt": b"\n"}),
    ):
        assert [row.captions for row in read(place, caption="ohwx")] == [("ohwx",)]
    with pytest.raises(DataError, match="the caption is a number"):
        read(write(tmp_path / "rows.jsonl", blank), caption="ohwx")


def test_an_archive_is_read_in_place_by_offsets(tmp_path):
    members = {
        "s/1.jpg": b"JPEG",
        "s/1.txt": b"eins\n",
        "s/2.mp4": b"CLIP!",
        "s/2.json": b'{"cap": ["two", "zwei"], "width": 640, "resolution": "480x640"}',
        "s/3.mp4": b"no caption",
        "s/__key__": b"",
    }
    path = archive(tmp_path / "0.tar", members)
    first, second = read(path)
    assert first[:4] == (0, "s/1.jpg", "image", ("eins",))
    assert second[:8] == (0, "s/2.mp4", "clip", ("two", "zwei"), None, None, 480, 640)
    for row, content in ((first, b"JPEG"), (second, b"CLIP!")):
        assert path.read_bytes()[row.start : row.start + row.size] == content
    archive(tmp_path / "1.tar", {"s/1.png": b"x", "s/1.txt": b"again"})
    assert [row.archive for row in read(tmp_path)] == [0, 0, 1]
    assert [row.path for row in read(path, where="width > 4")] == ["s/2.mp4"]


def test_members_of_one_name_are_refused(tmp_path):
    path = archive(tmp_path / "a.tar", {"1.jpg": b"", "1.txt": b"one"})
    other = archive(tmp_path / "b", {"1.jpg": b"", "1.txt": b"another"})
    path.write_bytes(path.read_bytes()[:1536] + other.read_bytes())  # as by `tar --concatenate`
    with pytest.raises(DataError, match=r"two members of the archive are named '1.jpg'"):
        read(path)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: archive(path, {"/etc/1.jpg": b""}), "'/etc/1.jpg' of the archive leads outside"),
        (lambda path: archive(path, {"a/../../1.jpg": b""}), "leads outside its folder"),
        (lambda path: archive(path, {"../l.jpg": b""}, tarfile.SYMTYPE), "leads outside its folder"),
        (lambda path: path.write_bytes(b"\x1f\x8b" + bytes(600)), "the archive cannot be read"),
        (lambda path: path.write_bytes(archive(path, {"1.jpg": bytes(4000)}).read_bytes()[:2000]), "cut off"),
        (lambda path: archive(path, {"1.jpg": b"", "1.txt": b"\xff"}), "not UTF-8"),
        (lambda path: archive(path, {"1.jpg": b"", "1.json": b"[]"}), "not a JSON object"),
        (lambda path: archive(path, {"1.md": b""}), "the source has no image or clip"),
        (
            lambda path: archive(path, {"1.jpg": b"", "1.a.txt": b"a", "1.b.txt": b"b"}),
            "whether '1.a.txt' or '1.b.txt' belongs to '1.jpg'",
        ),
        (
            lambda path: archive(path, {"1.a.jpg": b"", "1.b.jpg": b"", "1.c.txt": b"c"}),
            "whether '1.c.txt' belongs to '1.a.jpg' or '1.b.jpg'",
        ),
        (
            lambda path: archive(path, {"1.jpg": b"", "1.txt": b"a", "1.TXT": b"b"}),
            "'1.txt' and '1.TXT' are both the text",
        ),
    ],
)
def test_an_archive_that_cannot_be_trusted_or_read_is_refused(tmp_path, make, what):
    make(tmp_path / "a.tar")
    with pytest.raises(DataError, match=what):
        read(tmp_path / "a.tar")


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([{"path": "a.jpg", "cap": None}], "the caption is null"),
        ([{"path": "a.jpg", "cap": ["x", 3]}], "the caption is a list"),
        ([{"path": "", "cap": "x"}], "the path is empty text"),
        ([{"path": "a.jpg", "cap": "\ud800"}], "half of a character"),
        ([{"path": "a.jpg", "cap": "x"}, ["b"]], "row 2: column 'path' is a name, but the row is a list"),
    ],
)
def test_broken_rows_are_named_all_at_once(tmp_path, rows, what):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows))
    with pytest.raises(DataError, match=what):
        read(path)


@pytest.mark.parametrize(
    ("annotations", "what"),
    [
        ("a.xlsx", "the source is of no known kind"),
        ("empty", "the source has no image or clip"),
        ("a.json", "2 of the first 3 files of .* cannot be found, such as deep/b.MP4"),
    ],
)
def test_what_no_source_can_be_shows_before_a_run_starts(tmp_path, annotations, what):
    (tmp_path / "a.xlsx").touch()
    (tmp_path / "a.jpg").touch()
    (tmp_path / "empty").mkdir()
    write(tmp_path / "a.json")
    (found,) = of_media_text({"sources": [MediaSource(f"{tmp_path}/{annotations}")], "max_pixels": 100})
    assert re.search(what, found.render())


def test_what_training_would_refuse_shows_before_a_run_starts(tmp_path):
    for name, size in (("large.png", (40, 9)), ("small.png", (9, 9))):
        Image.new("L", size).save(tmp_path / name)
    header = (30_000).to_bytes(4) * 2 + b"\x08\x02\x00\x00\x00"
    chunk = b"\x00\x00\x00\x0dIHDR" + header + zlib.crc32(b"IHDR" + header).to_bytes(4)
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + b"\x00\x00\x00\x00IEND")
    (tmp_path / "damaged.jpg").write_bytes(b"skipped in training")
    (tmp_path / "out.mp4").symlink_to("/etc/hostname")
    for path in [*tmp_path.iterdir()]:
        path.with_suffix(".txt").write_text("x")
    source = MediaSource(str(tmp_path))
    one, other = of_media_text({"sources": [source], "max_pixels": 100})
    assert re.search("2 of the first 5 files of .* would be refused, such as .*: the image of", one.what)
    assert re.search("1 of the first 5 .*out.mp4: the path leaves its folder through a symbolic", other.what)
    (tmp_path / "large.txt").unlink()
    (tmp_path / "out.txt").unlink()
    (found,) = of_media_text({"sources": [source], "max_pixels": 100})
    assert found.what.endswith("of 900,000,000 pixels is larger than the dataset's max_pixels")
    assert found.accepted == "up to 100 pixels"
    (found,) = of_media_text({"sources": [source], "max_pixels": 10**9})
    assert found.what.endswith("is larger than Pillow opens") and "max_pixels" not in found.hint
    (tmp_path / "bomb.txt").unlink()
    assert not [*of_media_text({"sources": [source], "max_pixels": 100})]


def test_the_head_of_a_source_is_read_without_the_rest(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(ROWS[0]) + "\n{broken\n")
    assert len(read(tmp_path / "a.jsonl", 1)) == 1
    with pytest.raises(DataError, match="not JSON"):
        read(tmp_path / "a.jsonl")
    many = [{**ROWS[0], "path": "../a.jpg"}, *[ROWS[0]] * 200]
    with pytest.raises(DataError, match=r"line 1: the path '../a.jpg' leads outside"):
        read(write(tmp_path / "c.jsonl", many), 100)
    assert len(read(write(tmp_path / "b.jsonl"), 1, where="only_in_later_rows == 3")) == 0


def test_mapped_rows_are_what_was_written(tmp_path):
    rows = [
        MediaRow(0, "ä.jpg", "image", ("one", "", "三")),
        MediaRow(7, "b.mp4", "clip", (), 49, 23.976, 480, 832, 3, 2**40, 2**33),
        MediaRow(1, "c\0.mp4", "clip", ("a\0b", "c")),
    ]
    MappedRows.write(iter(rows), tmp_path)
    found = MappedRows(tmp_path)
    assert [*found] == [*rows[:2], MediaRow(1, "c .mp4", "clip", ("a b", "c"))]
    assert found[-2:] == [*found][-2:] and found.facts["width"].tolist() == [0, 832, 0]


def test_a_folder_of_paths_is_for_tables_only(tmp_path):
    with pytest.raises(DataError, match="this source is no table"):
        read(tmp_path, folder=str(tmp_path))


def test_names_of_columns_are_not_for_folders(tmp_path):
    (tmp_path / "a.png").touch(), (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="`columns` names the columns of a table, but this source is"):
        read(tmp_path, columns=MediaColumns(caption="text"))
    assert len(read(tmp_path, columns=MediaColumns(caption="cap"))) == 1
    archive(tmp_path / "a.tar", {"b.png": b"", "b.json": b'{"text": "x"}'})
    assert read(tmp_path, columns=MediaColumns(caption="text"))[0].captions == ("x",)


def test_tags_need_a_separator():
    with pytest.raises(ValueError, match="separator"):
        CaptionTags(separator=" ")
