"""Boxes and points of conversations: from pixels of a file to what a model writes, and back onto images."""

from __future__ import annotations

import json
import math

import pytest
from PIL import Image

from mm_core.builtin.configs.conversations import ConversationSource
from mm_core.contracts import GivesBoxes, Turn
from mm_core.errors import DataError
from mm_core.inference.boxes import draw_boxes
from mm_core.tasks import Conversations

ROW = {
    "messages": [
        {"role": "user", "content": "<image>Where is <ref-object>?"},
        {"role": "assistant", "content": "At <bbox>, its eye at <bbox>."},
    ],
    "images": ["a.png"],
    "objects": {"ref": ["the cat"], "bbox": [[10, 20, 30, 40], [15, 25]]},
}


@pytest.fixture
def place(tmp_path):
    Image.new("RGB", (40, 80)).save(tmp_path / "a.png")
    return tmp_path


def dataset(folder, place, row=ROW, **options):
    (place / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return Conversations(
        [ConversationSource(str(place / "rows.jsonl"))], str(folder), max_length=2048, **options
    )


def said(found):
    return "".join(text for text, learnt in found.rendered(0) if learnt)


def test_boxes_are_written_as_the_model_writes_them(chat_model, place):
    relative = dataset(chat_model("qwen3_vl"), place, boxes="relative_1000")
    assert said(relative) == "At [250, 250, 750, 500], its eye at [375, 312].<|im_end|>"
    assert "Where is the cat?" in "".join(text for text, _ in relative.rendered(0))
    pixels = dataset(chat_model("qwen2_5_vl"), place, boxes="pixels")
    height, width = (
        int(n) * 4 for n in pixels[0]["pieces"][0].vision["image_grid_thw"][0, 1:]
    )  # patches of 4
    assert (height, width) != (80, 40)
    x, y = (lambda n: round(n / 40 * width)), (lambda n: round(n / 80 * height))
    box, point = [x(10), y(20), x(30), y(40)], [x(15), y(25)]
    assert said(pixels) == f"At {box}, its eye at {point}.<|im_end|>"


@pytest.mark.parametrize(("name", "boxes"), [("qwen3_vl", "relative_1000"), ("qwen2_5_vl", "pixels")])
def test_an_answer_gives_the_boxes_back_in_pixels_of_the_file(name, boxes, chat_model, place):
    found = dataset(chat_model(name), place, boxes=boxes)
    conversing = Conversations.conversing(
        found.chat.processor.media.reader,
        sources=found.wanted.sources,
        processor=str(chat_model(name)),
        boxes=boxes,
    )
    assert isinstance(conversing, GivesBoxes)
    image = place / "a.png"
    back = conversing.boxes([Turn("user", "where?", (image,))], said(found))
    assert list(back) == [image]
    box, point = back[image]
    assert box == pytest.approx((10, 20, 30, 40), abs=1) and point == pytest.approx((15, 25), abs=1)
    assert conversing.boxes([Turn("user", "where?", (image,))], "nowhere") == {}
    assert conversing.boxes([Turn("user", "where?")], said(found)) == {}
    draw_boxes(image, back[image], place / "drawn.png")
    with Image.open(place / "drawn.png") as drawn:
        assert drawn.size == (40, 80) and drawn.getpixel((round(box[0]), 30)) == (255, 0, 0)
        assert drawn.getpixel((35, 70)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"objects": None}, "the texts have 2 <bbox>, but the row has no `objects`"),
        (
            {"objects": {"ref": ["the cat"], "bbox": [[1, 2]]}},
            "the texts have 2 <bbox>, but `objects` has 1 boxes",
        ),
        ({"objects": {"ref": ["the cat"], "bbox": [[1, 2, 3], [1, 2]]}}, "has neither four numbers nor two"),
        ({"objects": {"ref": [], "bbox": [[1, 2], [1, 2]]}}, "different numbers of names"),
        (
            {"objects": {"ref": ["the cat"], "bbox": [[1, 2], [1, 2]], "image_id": [0, 1]}},
            "a box is on image 1, but the row has 1",
        ),
        ({"objects": {"ref": ["the cat"], "bbox": [[1, 2], [1, math.nan]]}}, "neither four numbers nor two"),
        ({"objects": {"ref": ["the cat"], "bbox": [[1, 2], 3]}}, "the box 3 has neither four numbers"),
        ({"objects": {"ref": [None], "bbox": [[1, 2], [1, 2]]}}, "has names that are no texts"),
        ({"objects": {"ref": "c", "bbox": [[1, 2], [1, 2]]}}, "has fields that are no lists"),
        ({"objects": {"ref": ["c"], "bbox": [[1, 2], [1, 2]], "image_id": 1}}, "fields that are no lists"),
    ],
)
def test_boxes_that_do_not_match_are_a_bad_row(changed, sentence, chat_model, place):
    with pytest.raises(DataError, match=sentence):
        dataset(chat_model("qwen3_vl"), place, ROW | changed, boxes="relative_1000")


def test_a_model_must_have_a_way_to_write_boxes(chat_model, place):
    with pytest.raises(DataError, match="does not name how the model writes them") as fault:
        dataset(chat_model("qwen3_vl"), place)[0]
    assert "set boxes of the dataset" in fault.value.hint
    with pytest.raises(DataError, match="sees an image in several tiles"):
        dataset(chat_model("idefics3"), place, boxes="pixels")[0]
