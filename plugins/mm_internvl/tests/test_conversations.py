"""`internvl/conversations`: tiles and frames stand where the placeholders are."""

from __future__ import annotations

from functools import partial

import torch
from mm_internvl.data.conversations import Conversations
from mm_internvl.testing import TOKENS

from mm_core.data.datasets.media_page import render
from mm_core.data.media.images import read_image
from support import conversation_sets as sets

place, said = sets.place, sets.said
internvl = partial(sets.dataset, cls=Conversations, max_tiles=4)


def test_images_and_frames_stand_where_their_placeholders_are(place):
    found = internvl(place)
    head, end = "<|im_start|>", "<|im_end|>\n"
    assert (
        said(found, found[1])
        == f"{head}user\n<img>3</img>\nwhat is this?{end}{head}assistant\na picture{end}"
    )
    frames = "\n".join(f"Frame{n}: <img>1</img>" for n in (1, 2, 3))
    assert said(found, found[3]).startswith(f"{head}user\n{frames}\nwhat is in it?{end}")
    assert said(found, found[4]) == (
        f"{head}system\nthe system{end}{head}user\n<img>1</img>\nwhat?{end}{head}assistant\ngreen{end}"
    )
    for index, files in ((0, []), (1, ["a.png"]), (2, ["b.png", "c.jpg", "a.png"])):
        tiles = [found.chat.processor.tiling.cut(read_image(place / "files" / name)) for name in files]
        wanted = torch.cat([torch.empty(0, 3, 56, 56), *tiles])
        assert torch.equal(sets.pixels_of(found[index]), wanted)
        context = found.chat.processor.tokenizer.context_image_token_id
        assert int((found[index]["pieces"][0].of("input_ids") == context).sum()) == TOKENS * len(wanted)


def test_frames_of_a_video_are_evenly_spread(place):
    pixels = sets.pixels_of(internvl(place)[3])
    assert pixels.shape == (3, 3, 56, 56)
    tiling = internvl(place).chat.processor.tiling
    levels = (pixels.mean((2, 3)) * torch.tensor(tiling.std) + torch.tensor(tiling.mean)) * 255 / 20
    # Frames 2, 6 and 10 of 12, as numpy.arange(12 / 3 / 2, 12, 12 / 3) has them.
    assert levels.mean(1).round().tolist() == [2, 6, 10]
    assert len(sets.pixels_of(internvl(place, frames=100)[3])) == 12


def test_a_page_shows_its_pictures_beside_the_text(place):
    text = render("run", {"train": (internvl(place), [])}, {}, rows=1)
    kinds = ("text alone", "image .png", "image .jpg", "video .mp4")
    assert all(f"rows.jsonl: {kind}" in text for kind in kinds)
    assert '<img alt="clip.mp4"' in text and "48 x 64, 3 frames" in text
    assert "<mark>a circle and a square&lt;|im_end|&gt;" in text and "IMG_CONTEXT&gt; x " in text
