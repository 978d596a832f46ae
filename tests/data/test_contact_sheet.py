"""Contact sheets: every letter of a prompt is on the sheet, at a size that can be read, or is named."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageFont

from mm_core.data.media import contact_sheet
from mm_core.data.media.contact_sheet import SIZE, font_for, wrapped, write_contact_sheet

LONG = "a red circle moves over a meadow " * 12


def frames(count: int, height: int, width: int) -> np.ndarray:
    return np.full((count, height, width, 3), 128, np.uint8)


@pytest.mark.parametrize("text", [LONG, "一只猫在草地上奔跑" * 30, "x" * 500, f"{LONG} 猫{'x' * 200}"])
def test_a_prompt_is_wrapped_and_nothing_of_it_is_lost(text):
    font = ImageFont.load_default(SIZE)
    lines = wrapped(text, font, 300)
    assert len(lines) > 1 and max(map(font.getlength, lines)) <= 300
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_a_sheet_has_a_title_each_whole_prompt_and_the_frames(tmp_path):
    one = [(frames(3, 64, 96), "a cat")]
    several = [*one, (frames(1, 80, 80), LONG), (frames(49, 8, 8), "tiny")]
    heights = []
    for name, clips, title in (("a", one, ""), ("b", one, "run, step 8, seed 3"), ("c", several, "run")):
        with Image.open(write_contact_sheet(clips, tmp_path / f"{name}.png", title)) as sheet:
            heights.append(sheet.height)
            assert sheet.width >= 8 * (64 + 4)  # room for eight frames that are enlarged to 64 pixels
    line = heights[1] - heights[0]
    lines = len(wrapped(f"1  {LONG}", font_for("a")[0], 640))
    assert lines > 3 and line > SIZE
    assert heights[2] - heights[1] == (lines + 1) * line + 80 + 64 + 4 * 4


def test_letters_that_no_font_has_are_named_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(contact_sheet, "_FOLDERS", ())
    assert font_for("a cat")[1] == ""
    assert font_for("a 猫")[1] == "U+732B"
    monkeypatch.setattr(contact_sheet, "_write", lambda draw, lines, *_: written.extend(lines))
    written: list[str] = []
    write_contact_sheet([(frames(1, 64, 64), "猫")], tmp_path / "a.png")
    assert written[0].startswith("no font of this machine has U+732B; fonts-noto-cjk")


def test_a_font_of_the_machine_is_found_by_the_letters(tmp_path, monkeypatch):
    """A stand-in for a folder of fonts: a file that is no font, and one that has all letters."""
    own, real = ImageFont.load_default(SIZE), ImageFont.truetype
    (tmp_path / "a.ttf").write_text("no font")
    (tmp_path / "b.otf").touch()
    monkeypatch.setattr(contact_sheet, "_FOLDERS", (str(tmp_path),))
    monkeypatch.setattr(
        ImageFont,
        "truetype",
        lambda file, *rest, **more: own if str(file).endswith("b.otf") else real(file, *rest, **more),
    )
    lacking = iter([{"猫"}, set()])
    monkeypatch.setattr(contact_sheet, "_lacks", lambda font, letters: next(lacking))
    assert font_for("猫") == (own, "")
