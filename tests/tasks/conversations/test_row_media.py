"""How rows name their images: parts of OpenAI's format, empty fields, and URLs."""

from __future__ import annotations

import base64
from io import BytesIO

import pytest
import torch
from PIL import Image

from mm_core.errors import DataError
from mm_core.tasks.conversations.rows.reading import conversation
from support import conversation_sets as sets

dataset, place = sets.dataset, sets.place

ANSWER = {"role": "assistant", "content": "A cat."}


def row(part):
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}, ANSWER]}


@pytest.mark.parametrize("named", ["a.jpg", {"url": "a.jpg"}, {"url": "a.jpg", "detail": "low"}])
def test_a_part_image_url_is_an_image(named):
    assert conversation(row({"type": "image_url", "image_url": named}), "x").media == (("image", "a.jpg"),)


@pytest.mark.parametrize("key", ["image", "images", "video"])
@pytest.mark.parametrize("empty", ["", [], None, [""]])
def test_an_empty_image_is_a_conversation_of_text_alone(key, empty):
    turns = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}]
    assert conversation({key: empty, "conversations": turns}, "x").media == ()


@pytest.mark.parametrize("url", ["https://a.example/a.jpg", "HTTP://a/a.jpg", "s3://a/a.jpg"])
def test_a_url_is_refused_by_name(url):
    with pytest.raises(DataError, match="is a URL"):
        conversation(row({"type": "image_url", "image_url": {"url": url}}), "x")


@pytest.mark.parametrize("named", [None, 3, {}, {"url": ["a.jpg"]}])
def test_a_part_without_a_path_is_a_bad_row(named):
    with pytest.raises(DataError, match="is not a path"):
        conversation(row({"type": "image_url", "image_url": named}), "x")


def test_an_image_of_the_row_may_be_an_object_with_a_url():
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "That."}]
    row = {"images": [{"url": "a.jpg"}], "conversations": turns}
    assert conversation(row, "x").media == (("image", "a.jpg"),)


def test_a_part_whose_first_keys_are_null_is_named_by_the_others():
    part = {"type": "image", "path": None, "url": "a.jpg"}
    assert conversation(row(part), "x").media == (("image", "a.jpg"),)


def url_of(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def png(width: int, height: int) -> bytes:
    held = BytesIO()
    Image.new("RGB", (width, height), "red").save(held, "png")
    return held.getvalue()


@pytest.mark.parametrize("folded", [False, True])
def test_an_image_in_a_data_url_is_that_of_the_file(place, folded):
    url = url_of((place / "files/b.png").read_bytes())
    url = " " + url.replace("+", "%2B").replace("/9", "/9\n").replace("image/png", "") if folded else url
    parts = [{"type": "image_url", "image_url": each} for each in ({"url": "b.png"}, {"url": url}, url)]
    found = dataset(place, [row(part) for part in [*parts, {"type": "image", "image": url}]])
    first, *others = (found[index] for index in range(4))
    for other in others:
        assert torch.equal(sets.pixels_of(other), sets.pixels_of(first)) and len(sets.pixels_of(first))
        assert torch.equal(other["pieces"][0].of("input_ids"), first["pieces"][0].of("input_ids"))
    assert found.lengths().unique().numel() == 1


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("data:image/png;base64,A", "what follows is not base64"),
        ("data:image/png;base64,!!!!", "what follows is not base64"),
        ("data:image/png,AAAA", "it does not begin as data:image/TYPE;base64,"),
        ("data:text/html;base64,AAAA", "it does not begin as data:image/TYPE;base64,"),
        ("data:image/png;base64," + 2**26 * "A", "it has 67,108,886 characters, more than 67,108,864"),
    ],
)
def test_a_data_url_without_an_image_is_a_bad_row(url, what):
    with pytest.raises(DataError, match=what):
        conversation(row({"type": "image_url", "image_url": {"url": url}}), "x")


def test_a_video_in_a_data_url_is_refused_by_name():
    with pytest.raises(DataError, match="is a URL \\(data:\\)"):
        conversation(row({"type": "video", "video": "data:video/mp4;base64,AAAA"}), "x")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot identify image file"),
        (b"", "the image is an empty file"),
        (png(40, 30)[:60], "the image cannot be read"),
        (png(50, 30), "an image of 30 x 50 exceeds max_pixels"),
    ],
)
def test_limits_and_formats_hold_for_data_urls(place, content, what):
    part = {"type": "image_url", "image_url": url_of(content)}
    found = dataset(place, [row(part)], max_pixels=40 * 30)
    with pytest.raises(DataError, match=what) as fault:
        found[0]
    assert fault.value.where == f"{place}/files/own.jsonl, line 1, image 1 (image/png)"
