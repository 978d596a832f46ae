"""`mm data check` and `mm data inspect` of a config: bad files by name and reason; a page to look at."""

from __future__ import annotations

import base64
import html
import io
import json
import os
import re
import zlib
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from mm_core.builtin.tiny import write_clip
from mm_core.cli.main import main
from support.archives import archive
from support.damaged import damaged
from support.pages import ROOT


def config(path: Path, *sources: dict, **fields: object) -> str:
    """Writes a run whose training data is `media_text` of these sources."""
    run = yaml.safe_load((ROOT / "configs/custom_dit/quickstart.yaml").read_text())
    sizes = {"num_frames": 5, "height": 8, "width": 8}
    run["data"]["train"] = {"type": "media_text", "sources": list(sources), **sizes, **fields}
    run["train"]["micro_batch_size"] = 1
    path.write_text(yaml.safe_dump(run))
    return str(path)


def png(width: int, height: int) -> bytes:
    """The header of a PNG, without pixels."""
    header = b"IHDR" + width.to_bytes(4) + height.to_bytes(4) + b"\x08\x02\x00\x00\x00"
    return b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0d" + header + zlib.crc32(header).to_bytes(4) + bytes(4) + b"IEND"


def picture(format: str, **options: object) -> bytes:
    """A picture of noise in a file of this format."""
    content = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(content, format, **options)
    return content.getvalue()


@pytest.fixture
def bad(tmp_path: Path, encode, encode_audio) -> tuple[Path, dict[str, str]]:
    """A folder of 300 good files and one of each kind of bad file, with the reasons of the bad ones."""
    folder = tmp_path / "p"
    folder.mkdir()
    good = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(good, "PNG")
    for number in range(299):
        (folder / f"{number}.png").write_bytes(good.getvalue())
        (folder / f"{number}.txt").write_text("good")
    encode(folder / "ok.mp4", 9), (folder / "ok.txt").write_text("ok")
    movie = (folder / "ok.mp4").read_bytes()
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    frames[0].save(folder / "animated.webp", save_all=True, append_images=frames[1:])
    write_clip(folder / "short.mp4", torch.zeros(2, 16, 16, 3, dtype=torch.uint8), 8)
    encode_audio(folder / "sound.mp4")
    damaged(encode, folder / "damaged.mp4", 60)
    contents = {
        "empty.jpg": (b"", "the image is an empty file"),
        "zeros.jpg": (bytes(900), "cannot identify image"),
        "page.jpg": (b"<html>404</html>", "cannot identify image"),
        "cut.png": (good.getvalue()[:45], "the image cannot be read"),
        "cut.jpg": (picture("JPEG")[:700], "the image cannot be read: .*truncated"),
        "cut.webp": (picture("WEBP", lossless=True)[:900], "the image cannot be read"),
        "no_pages.tiff": (b"II*\x00" + b"\xff" * 40, "the image cannot be read"),
        "bomb.png": (
            png(30_000, 30_000),
            "the image of 900,000,000 pixels is larger than",
        ),
        "large.png": (png(900, 900), "the image of 900 x 900 is larger than the dataset's max_pixels"),
        "empty.mp4": (b"", "the video is an empty file"),
        "page.mp4": (b"<html>404</html>", "not a readable video: Invalid data found when processing input$"),
        "zeros.mkv": (b"\x1a\x45\xdf\xa3" + bytes(90), "not a readable video"),
        "cut.mp4": (movie[: len(movie) // 2], "not a readable video"),
    }
    for name, (content, _) in contents.items():
        (folder / name).write_bytes(content)
    (folder / "outside.jpg").symlink_to("/etc/hostname")
    (folder / "nowhere.jpg").symlink_to("gone.jpg")
    os.mkfifo(folder / "pipe.png")
    reasons = {name: reason for name, (_, reason) in contents.items()} | {
        "animated.webp": "the WEBP file is animated",
        "short.mp4": "too short: it has 2 frames, but a clip needs 5",
        "sound.mp4": "the file has no video stream",
        "damaged.mp4": r"the video is damaged at \d",
        "outside.jpg": "leaves its folder through a symbolic link",
        "nowhere.jpg": "there is no such image",
        "pipe.png": "this is a named pipe, not an image",
    }
    for name in reasons:
        (folder / name).with_suffix(".txt").write_text("x")
    for name, text in (("latin.png", b"\xff\xfe\xff"), ("wordless.png", None)):
        (folder / name).write_bytes(good.getvalue())
        if text is not None:
            (folder / name).with_suffix(".txt").write_bytes(text)
    (folder / "wordless.txt").symlink_to("gone.txt")
    reasons["latin.png"] = "the caption cannot be read: it is not UTF-8 text"
    reasons["wordless.png"] = "the caption cannot be read: No such file"
    return folder, reasons


def test_each_kind_of_bad_file_is_listed_among_300_good_ones(tmp_path, bad, capsys):
    folder, reasons = bad
    run = config(tmp_path / "run.yaml", {"annotations": str(folder)}, max_pixels=800_000)
    assert main(["data", "check", "--config", run, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    listed = {Path(each["file"]).name: each["reason"] for each in found["bad"]}
    assert len(reasons) >= 20 and {*listed} == {*reasons} and len(found["bad"]) == len(reasons)
    assert found["read"] - len(listed) == 300
    assert {
        name: listed[name] for name, reason in reasons.items() if not re.search(reason, listed[name])
    } == {}


def test_sizes_that_rows_declare_wrongly_are_counted(tmp_path, encode, capsys):
    encode(tmp_path / "a.mp4", 9)  # 64x48, 24 a second
    Image.new("RGB", (9, 8)).save(tmp_path / "b.png")
    right = {"num_frames": 9, "fps": 23.976, "resolution": "48x64"}
    clips = [right, {}, {"num_frames": 12}, {"fps": 30, "width": 65}, *[{"height": 1}] * 4]
    rows = [{"path": "a.mp4", **each} for each in clips]
    rows += [
        {"path": "b.png", **each} for each in ({"height": 8, "width": 9, "fps": 1}, {"height": 9, "width": 8})
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"cap": "x", **row}) + "\n" for row in rows))
    run = config(tmp_path / "run.yaml", {"annotations": str(tmp_path / "a.jsonl")})
    assert main(["data", "check", "--config", run, "--json"]) == 0
    found = [each["declared"] for each in json.loads(capsys.readouterr().out)["differing"]]
    assert found[:2] == ["num_frames 12, not 9", "width 65, not 64; fps 30, not 24"]
    assert found[2:] == ["height 1, not 48"] * 4 + ["height 9, not 8; width 8, not 9"]
    assert main(["data", "check", "--config", run]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "the sizes in 7 rows differ from the files, such as" and len(lines) == 8
    assert lines[1] == f"  {tmp_path / 'a.mp4'}: num_frames 12, not 9"


@pytest.fixture
def three(tmp_path: Path, encode) -> str:
    """A run over a folder with a bad image, a table with a condition, and an archive."""
    (tmp_path / "p").mkdir()
    for name, size in (("wide.png", (640, 160)), ("tall.jpg", (90, 270))):
        Image.new("RGB", size, (200, 40, 40)).save(tmp_path / "p" / name)
    (tmp_path / "p/bad.png").write_bytes(b"")
    (tmp_path / "p/lone.png").write_bytes(b"")
    for name, text in (("wide", "<b>bold</b> & 'wide'"), ("tall", "x" * 999), ("bad", "never seen")):
        (tmp_path / f"p/{name}.txt").write_text(text)
    encode(tmp_path / "clip.mp4", 9, field=(0, 0, 250))
    rows = [{"path": "clip.mp4", "cap": ["first", "second", "third"], "kind": kind} for kind in (1, 1, 2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    archive(tmp_path / "a.tar", {"in.png": (tmp_path / "p/wide.png").read_bytes(), "in.txt": b"inside"})
    table = {"annotations": str(tmp_path / "rows.jsonl"), "where": "kind < 2", "caption_prefix": "clip: "}
    folder, tar = ({"annotations": str(tmp_path / name)} for name in ("p", "a.tar"))
    return config(tmp_path / "run.yaml", folder, table, tar)


@pytest.mark.filterwarnings("ignore:.*left out:mm_core.errors.RunWarning")
def test_the_page_of_inspect_shows_samples_sizes_and_what_is_left_out(tmp_path, three, capsys):
    page = tmp_path / "page.html"
    assert main(["data", "inspect", "--config", three, "--page", str(page)]) == 0
    assert capsys.readouterr().out.endswith(f"page: {page}\n")
    text = page.read_text()
    parts = re.split(r'<p class="prompt">', text)[1:]
    folder, table, tar = (
        [html.unescape(each) for each in re.findall(r"<figcaption>(.*?)<br>", p)] for p in parts
    )
    assert sorted(folder) == ["", "<b>bold</b> & 'wide'", "x" * 999]
    assert table == ["clip: first (and 2 captions more)"] * 2 and tar == ["inside"]
    assert "the image is an empty file (0 bytes)" in parts[0] and "1 row left out: no .txt file" in parts[0]
    assert "1 row left out: where: kind &lt; 2" in parts[1] and "<b>bold" not in text
    sizes = "270 x 90 (1); 160 x 640 (1); 2 of 3 files probed"
    assert sizes in text and "48 x 64, 9 frames (2); 2 of 2 files probed" in text
    sheets = [
        [Image.open(io.BytesIO(base64.b64decode(each))) for each in re.findall(r"jpeg;base64,([^\"]*)", part)]
        for part in parts
    ]
    assert [sorted(sheet.size for sheet in part) for part in sheets] == [
        [(53, 160), (160, 40)],
        [(3 * 64 + 2 * 4, 48)] * 2,
        [(160, 40)],
    ]
    red, blue = sheets[2][0].getpixel((80, 20)), sheets[1][0].getpixel((100, 24))
    assert max(abs(a - b) for a, b in zip((*red, *blue), (200, 40, 40, 0, 0, 250), strict=True)) < 24
    assert "default-src 'none'" in text and "script-src 'none'" in text and "<script" not in text


def test_a_page_shows_each_medium_and_format_that_the_spread_rows_lack(tmp_path, encode, capsys):
    (tmp_path / "p").mkdir()
    names = [f"{number:02}.jpg" for number in range(30)] + ["zz.PNG", "zy.webp"]
    for name in names:
        Image.new("RGB", (20, 16)).save(tmp_path / "p" / name)
    encode(tmp_path / "p/zx.mp4", 9)
    for name in [*names, "zx.mp4"]:
        (tmp_path / "p" / name).with_suffix(".txt").write_text("x")
    run, page = config(tmp_path / "run.yaml", {"annotations": str(tmp_path / "p")}), tmp_path / "page.html"
    for rows, shown in (("2", ["00.jpg", "16.jpg"]), ("3", ["00.jpg", "11.jpg", "22.jpg"])):
        assert main(["data", "inspect", "--config", run, "--rows", rows, "--page", str(page)]) == 0
        assert re.findall('<img alt="(.*?)"', page.read_text()) == [*shown, "zx.mp4", "zy.webp", "zz.PNG"]
    assert "; 16 of 33 files probed" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*left out:mm_core.errors.RunWarning")
def test_a_page_that_cannot_be_written_is_an_error(tmp_path, three, capsys):
    for page, what in ((tmp_path / "no/page.html", "cannot be written"), ("", "this is a folder")):
        assert main(["data", "inspect", "--config", three, "--page", str(page)]) == 1
        fault = capsys.readouterr().err
        assert what in fault and "--page" in fault


@pytest.fixture
def further(tmp_path: Path, encode) -> Path:
    """A table of 4 clips of 9 frames and a picture, with controls, references and numbers, all good."""
    for name, level, frames in (("a.mp4", 0, 9), ("edges.mp4", 250, 9), ("short.mp4", 250, 6)):
        encode(tmp_path / name, frames, field=(0, 0, level))
    for name, size in (("one.png", (32, 16)), ("two.png", (20, 40))):
        Image.new("RGB", size, (200, 40, 40)).save(tmp_path / name)
    row = {"path": "a.mp4", "cap": "x", "edges": "edges.mp4", "shown": ["one.png", "two.png"], "motion": 0.25}
    return rewritten(
        tmp_path / "rows.jsonl",
        [
            row,
            {**row, "shown": []},
            {**row, "edges": "short.mp4", "shown": None},
            {**row, "shown": "two.png", "motion": "3"},
            {**row, "path": "one.png", "edges": "two.png"},
        ],
    )


def rewritten(table: Path, rows: list[dict]) -> Path:
    table.write_text("\n".join(map(json.dumps, rows)))
    return table


def of_fields(table: Path, **fields: object) -> str:
    """A run over a table with further fields."""
    columns = [
        {"name": "control", "column": "edges"},
        {"name": "references", "column": "shown", "kind": "images", "most": 2},
        {"name": "motion", "kind": "number"},
    ]
    source = {"annotations": str(table), "columns": {"fields": columns}}
    return config(table.parent / "run.yaml", source, **fields)


def checked(run: str, capsys) -> tuple[int, dict[str, list[str]]]:
    """Number of rows that `mm data check` reads, and the reasons of each bad file."""
    code = main(["data", "check", "--config", run, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (1 if found["bad"] else 0)
    reasons: dict[str, list[str]] = {}
    for each in found["bad"]:
        reasons.setdefault(each["file"], []).append(each["reason"])
    return found["read"], reasons


def test_check_names_row_column_and_file_of_bad_fields(tmp_path, further, capsys):
    assert checked(of_fields(further), capsys) == (5, {})
    rows = [json.loads(line) for line in further.read_text().splitlines()]
    (tmp_path / "bad.mp4").write_bytes(b"<html>404</html>")
    (tmp_path / "bad.png").write_bytes(b"")
    (tmp_path / "out.png").symlink_to("/etc/hostname")
    rows[0] |= {"edges": "bad.mp4", "shown": ["one.png", "bad.png"]}  # both are listed
    rows[1] |= {"edges": "none.mp4"}
    rows[3] |= {"shown": ["two.png", "gone.png"]}
    rows[4] |= {"edges": "edges.mp4", "shown": "out.png"}  # the control of a picture is a picture
    read, found = checked(of_fields(rewritten(further, rows)), capsys)
    reasons = {
        "bad.mp4": "in the column 'edges' of {}/a.mp4: this is not a readable video",
        "bad.png": "in the column 'shown' of {}/a.mp4: the image is an empty file (0 bytes)",
        "none.mp4": "in the column 'edges' of {}/a.mp4: the video does not exist",
        "gone.png": "in the column 'shown' of {}/a.mp4: there is no such image",
        "edges.mp4": "in the column 'edges' of {}/one.png: the image cannot be read",
        "out.png": "in the column 'shown' of {}/one.png: the path leaves its folder through a symbolic link",
    }
    assert read == 5 and {*found} == {str(tmp_path / name) for name in reasons}
    for name, reason in reasons.items():
        (own,) = found[str(tmp_path / name)]
        assert own.startswith(reason.format(tmp_path)), own


def test_a_control_clip_must_have_what_training_may_read_of_its_clip(tmp_path, further, capsys):
    assert checked(of_fields(further), capsys) == (5, {})  # 6 frames, and the first 5 are read
    for changed in ({"num_frames": 7}, {"random_start": True}, {"height": None, "random_start": True}):
        if changed.get("height", 8) is None:
            changed |= {"width": None, "max_height": 16, "max_width": 16}
        _, found = checked(of_fields(further, **changed), capsys)
        (reason,) = found.pop(str(tmp_path / "short.mp4"))
        assert re.match(r"in the column 'edges' of .*/a.mp4: a frame at .* is needed", reason) and not found


def test_check_decodes_a_control_clip_to_its_last_frame(tmp_path, further, encode, capsys):
    damaged(encode, tmp_path / "edges.mp4", 60)
    _, found = checked(of_fields(further), capsys)
    ((name, reasons),) = found.items()
    assert name == str(tmp_path / "edges.mp4") and len(reasons) == 3
    assert all("the video is damaged at" in each for each in reasons)


def test_the_transform_is_tried_on_control_clips_and_not_on_references(tmp_path, further, encode, capsys):
    encode(tmp_path / "edges.mp4", 9, size=(16, 16))
    sizes = {"height": 32, "width": 48, "transform": {"type": "resize_crop", "resize": "exact"}}
    rows = [json.loads(line) for line in further.read_text().splitlines()][:2]
    _, found = checked(of_fields(rewritten(further, rows), **sizes), capsys)
    what = "the frames of 16 x 16 are smaller than 32 x 48"
    assert found == {str(tmp_path / "edges.mp4"): [f"in the column 'edges' of {tmp_path}/a.mp4: {what}"] * 2}


def test_validate_finds_missing_and_refused_files_of_fields(tmp_path, further, capsys):
    run = of_fields(further, max_pixels=900)
    assert main(["validate", run]) == 0
    rows = [json.loads(line) for line in further.read_text().splitlines()]
    Image.new("RGB", (40, 40)).save(tmp_path / "large.png")
    rows[0] |= {"shown": ["none.png", "large.png"]}
    rows[1] |= {"edges": "gone.mp4"}
    rows[4] |= {"edges": "gone.png"}
    rewritten(further, rows)
    assert main(["validate", run]) == 1
    errors = capsys.readouterr().err
    for what in (
        f"2 of the first 5 files in the column 'edges' of {further} cannot be found, such as gone.mp4",
        f"1 of the first 5 files in the column 'shown' of {further} cannot be found, such as none.png",
        f"1 of the first 5 files in the column 'shown' of {further} would be refused, such as "
        f"{tmp_path}/large.png: the image of 40 x 40 is larger than",
    ):
        assert what in errors


def test_the_page_of_inspect_shows_further_fields(tmp_path, further, capsys):
    rows = [json.loads(line) for line in further.read_text().splitlines()]
    rows[1] |= {"edges": "<none>.mp4"}
    rewritten(further, rows)
    page = tmp_path / "page.html"
    assert main(["data", "inspect", "--config", of_fields(further), "--page", str(page)]) == 0
    figures = re.findall("<figure>(.*?)</figure>", page.read_text())
    shown = [
        re.findall(r'(?:<span class="faint">(\w+)</span>)?<img alt="(.*?)" src="data:.*?,(.*?)">', each)
        for each in figures
    ]
    names = [[(field, name) for field, name, _ in each] for each in shown]
    references = [("references", "one.png"), ("references", "two.png")]
    assert names == [
        [("", "a.mp4"), ("control", "edges.mp4"), *references],
        [("", "a.mp4")],
        [("", "a.mp4"), ("control", "short.mp4")],
        [("", "a.mp4"), ("control", "edges.mp4"), references[1]],
        [("", "one.png"), ("control", "two.png"), *references],
    ]
    own, control, one, two = (Image.open(io.BytesIO(base64.b64decode(each))) for *_, each in shown[0])
    assert own.size == control.size == (3 * 64 + 2 * 4, 48) and (one.size, two.size) == ((32, 16), (20, 40))
    blues = [sheet.getpixel((100, 24))[2] for sheet in (own, control)]
    assert blues[0] < 24 and blues[1] > 226 and one.getpixel((9, 9))[0] > 176
    assert '<span class="faint">control</span><p class="remark">the video does not exist</p>' in figures[1]
    assert [" motion 0.25<" in each for each in figures] == [True, True, True, False, True]
    assert " motion 3<" in figures[3] and "&lt;none&gt;" not in "".join(figures)
