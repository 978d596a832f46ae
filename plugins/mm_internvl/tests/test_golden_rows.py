"""What `internvl/conversations` makes of 200 rows is what it made when its code was mm_internvl's own."""

from __future__ import annotations

import json

import golden_rows
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:rows are packed, but sdpa"),
]

WANTED = json.loads(golden_rows.FILE.read_text())
"""Made by golden_rows.py with the code of commit 3d572876, before rows, templates and packing moved into
mm_core."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return golden_rows.make(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("name", golden_rows.DATASETS)
def test_rows_lengths_packs_and_questions_are_those_of_before(place, name):
    found, wanted = golden_rows.hashes(place, name), WANTED[name]
    pixels, before = found.pop("pixels", []), {**wanted}.pop("pixels", [])
    for one, other in zip(pixels, before, strict=True):
        assert one == (other and pytest.approx(other, rel=1e-4, abs=0.1))
    if name == "short":
        rows = zip(found["rows"].split(), wanted["rows"].split(), strict=True)
        assert found["rows"].split() == [new if old == "cut" else old for new, old in rows]
        assert "cut" not in found["rows"]
        assert found["questions"] == wanted["questions"]
        return
    assert found == {key: value for key, value in wanted.items() if key != "pixels"}
