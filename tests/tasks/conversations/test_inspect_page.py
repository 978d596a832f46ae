"""`mm data inspect --page` of conversations: pictures, what is learnt, and what cannot be read."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import pytest
import yaml
from PIL import Image

from mm_core.cli.main import main
from mm_core.config.dump import to_mapping
from mm_core.data.datasets.media_page import render
from support import conversation_sets as sets

place = sets.place


def page(found, rows: int | None = None) -> str:
    return render("run", {"train": (found, [])}, {}, rows)


def test_a_page_shows_rows_with_their_pictures_and_what_is_learnt(place):
    rows = re.split('<section class="card">', page(sets.dataset(place), 6))[1:]
    assert [len(re.findall("<img", row)) for row in rows] == [0, 1, 3, 1, 1, 0]
    assert "learnt: <mark>so</mark>" in page(sets.dataset(place), 6)
    marked = [re.findall("<mark>(.*?)</mark>", row) for row in rows]
    assert marked[0] == ["a colour&lt;|im_end|&gt;"]
    assert marked[2] == ["the image&lt;|im_end|&gt;", "red&lt;|im_end|&gt;"]
    assert "what is this?" in rows[1] and "what is this?" not in "".join(marked[1])
    sheet = Image.open(io.BytesIO(base64.b64decode(re.findall(r'jpeg;base64,([^"]*)', rows[3])[0])))
    frames = [sheet.getpixel((32 + 68 * number, 24))[0] for number in range(3)]
    assert sheet.size == (3 * 64 + 2 * 4, 48) and frames == sorted(frames) and frames[0] + 60 < frames[2]


def test_few_rows_are_joined_by_one_of_each_kind_and_source(place):
    many = [sets.data.asked("what?", "a colour")] * 40
    many[17] = sets.data.asked("<video>\nwhat?", "a circle", video="clip.mp4")
    many[33] = sets.data.asked("<image>\nwhat?", "a picture", image="absent.png")
    many[35] = {"conversations": "none"}
    text = page(sets.dataset(place, many), 2)
    assert re.findall("row (\\d+) ", text) == ["1", "18", "21", "34", "36"]
    broken = re.split('<section class="card">', text)[4:]
    assert "absent.png" in broken[0] and "image .png" in broken[0] and "cannot be read" in broken[1]
    assert all('<p class="remark">' in row and "<mark>" not in row for row in broken)


@pytest.mark.filterwarnings("ignore:rows are packed, but sdpa")
def test_a_packed_row_shows_all_its_conversations_and_those_that_cannot_be_read(place):
    many = [sets.data.asked("<image>\nwhat?", f"picture {n}", image="a.png") for n in range(3)]
    many[1]["image"] = "absent.png"
    text = page(sets.dataset(place, many, packing=True))
    assert "".join(re.findall("<mark>(.*?)</mark>", text)).count("picture") == 2
    assert text.count('<img alt="a.png"') == 2 and text.count('<p class="remark">') == 1


def test_the_command_writes_the_page(place, tmp_path: Path, capsys):
    config = tmp_path / "chat.yaml"
    made = sets.config_of(tmp_path, place / "model", place / "files/rows.jsonl")
    config.write_text(yaml.safe_dump(to_mapping(made)))
    words = ["data", "inspect", "--config", str(config), "--page", str(tmp_path / "page.html")]
    assert main([*words, "--rows", "1"]) == 0
    assert capsys.readouterr().out.endswith(f"page: {tmp_path}/page.html\n")
    text = (tmp_path / "page.html").read_text()
    assert text.count('<section class="card">') == 4  # text alone, .png, .jpg and the clip
