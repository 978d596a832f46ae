"""How rows name their images: parts of OpenAI's format, empty fields, and URLs."""

from __future__ import annotations

import pytest
from mm_internvl.data.rows import conversation

from mm_core.errors import DataError

ANSWER = {"role": "assistant", "content": "A cat."}


def row(part):
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}, ANSWER]}


@pytest.mark.parametrize("named", ["a.jpg", {"url": "a.jpg"}, {"url": "a.jpg", "detail": "low"}])
def test_a_part_image_url_is_an_image(named):
    assert conversation(row({"type": "image_url", "image_url": named}), "x").media == (("image", "a.jpg"),)


@pytest.mark.parametrize("key", ["image", "images", "video"])
@pytest.mark.parametrize("empty", ["", [], None])
def test_an_empty_image_is_a_conversation_of_text_alone(key, empty):
    turns = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}]
    assert conversation({key: empty, "conversations": turns}, "x").media == ()


@pytest.mark.parametrize("url", ["https://a.example/a.jpg", "HTTP://a/a.jpg", "data:image/png;base64,AAAA"])
def test_a_url_is_refused_by_name(url):
    with pytest.raises(DataError, match="is a URL"):
        conversation(row({"type": "image_url", "image_url": {"url": url}}), "x")


@pytest.mark.parametrize("named", [None, 3, {}, {"url": ["a.jpg"]}])
def test_a_part_without_a_path_is_a_bad_row(named):
    with pytest.raises(DataError, match="is not a path"):
        conversation(row({"type": "image_url", "image_url": named}), "x")
