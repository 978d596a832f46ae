"""Further fields of `media_text`: control clips of the window, crop and flip of their clip, and numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from mm_core.builtin.configs.data import MediaColumns, MediaField, MediaSource, MediaTextConfig
from mm_core.builtin.tiny import write_clip
from mm_core.contracts import Randomness
from mm_core.data.cache.hashes import FileHashes
from mm_core.data.cache.rows import CacheRows, PartKey
from mm_core.data.datasets.media_text import MediaTextDataset
from mm_core.data.media.transforms import ResizeCrop
from mm_core.errors import DataError
from support.archives import archive

FIELDS = (MediaField("control", "edges"), MediaField("motion", kind="number"))


def rows_of(folder: Path, **changed: object) -> Path:
    """Three clips of 9 frames, each its own control, so that equal reading gives equal pixels."""
    rows = []
    for number in range(3):
        frames = torch.randint(0, 255, (9, 6, 8, 3), generator=torch.Generator().manual_seed(number))
        shown = frames.repeat_interleave(4, 1).repeat_interleave(4, 2).to(torch.uint8)
        write_clip(folder / f"{number}.mp4", shown, 8)
        rows.append(
            {"path": f"{number}.mp4", "cap": f"clip {number}", "edges": f"{number}.mp4", "motion": 0.5}
        )
    rows[1].update(changed)
    table = folder / "rows.jsonl"
    table.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return table


def dataset(table: Path, fields: tuple[MediaField, ...] = FIELDS) -> MediaTextDataset:
    source = MediaSource(str(table), columns=MediaColumns(fields=fields))
    transform = ResizeCrop(crop="random", flip=0.5)
    return MediaTextDataset([source], 4, 16, 16, transform=transform, random_start=True)


def test_a_control_clip_has_the_window_the_crop_and_the_flip_of_its_clip(tmp_path):
    samples = dataset(rows_of(tmp_path))
    drawn = [samples.sample_at(n, Randomness(0).at("data", e, n)) for e in range(4) for n in range(3)]
    assert all(torch.equal(each["control"], each["pixels"]) for each in drawn)
    assert len({each["pixels"].numpy().tobytes() for each in drawn}) > 6  # the draws differ
    given = [{**each, "key": None, "weight": 1.0} for each in drawn[:3]]
    batch = samples.collate(given)
    assert batch.fields["control"].shape == (3, 3, 4, 16, 16) and batch.fields["motion"].tolist() == [0.5] * 3
    assert torch.equal(batch.fields["control"], batch.pixels)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"motion": "fast"}, "the field `motion` is 'fast', not a number"),
        ({"motion": True}, "the field `motion` is True, not a number"),
        ({"motion": float("nan")}, "the field `motion` is nan, not a number"),
        ({"edges": 3}, "the field `control` is 3, not a path"),
        ({"edges": ""}, "the field `control` is '', not a path"),
        ({"edges": "a\0.mp4"}, r"the field `control` is 'a\x00.mp4', not a path"),
        ({"edges": "\ud800.mp4"}, r"the field `control` is '\ud800.mp4', not a path"),
        ({"shown": ["\ud800.png"]}, r"the field `shown` is ['\ud800.png'], not a path or a list"),
        ({"shown": 3}, "the field `shown` is 3, not a path or a list of paths"),
        ({"shown": ["a.png", ""]}, "the field `shown` is ['a.png', ''], not a path or a list of paths"),
        ({"shown": ["a.png"] * 3}, "the field `shown` has 3 paths, but `most` is 2"),
    ],
)
def test_a_cell_that_is_no_value_of_its_field_names_the_row(tmp_path, changed, message):
    with pytest.raises(DataError) as raised:
        dataset(rows_of(tmp_path, **changed), (*FIELDS, *((SHOWN,) if "shown" in changed else ())))
    assert message in str(raised.value) and "line 2" in str(raised.value)


def test_a_control_clip_that_is_missing_short_or_outside_skips_its_sample_alone(tmp_path):
    frames = torch.zeros(2, 24, 32, 3, dtype=torch.uint8)
    write_clip(tmp_path / "short.mp4", frames, 8)
    for edges, words in (("none.mp4", "none.mp4"), ("short.mp4", "short.mp4"), ("../x.mp4", "folder")):
        samples = dataset(rows_of(tmp_path, edges=edges))
        assert samples[0]["motion"] == 0.5
        with pytest.raises(DataError) as raised:
            samples[1]
        assert words in str(raised.value)


def test_sources_that_differ_and_names_that_are_taken_are_refused_in_the_config():
    for fields, words in (((MediaField("caption"),), "caption is taken"), ((FIELDS[0],) * 2, "is taken")):
        with pytest.raises(ValueError, match=words):
            MediaColumns(fields=fields)
    several = [(MediaField("shown", kind="images", most=most),) for most in (1, 2)]
    for pair in ((FIELDS, ()), several):
        one, other = (MediaSource("a.jsonl", columns=MediaColumns(fields=fields)) for fields in pair)
        with pytest.raises(ValueError, match=r"columns\.fields differ between sources"):
            MediaTextConfig((one, other))


def test_folders_and_archives_have_no_columns_for_fields(tmp_path):
    rows_of(tmp_path)
    with pytest.raises(DataError, match="this source is a folder"):
        dataset(tmp_path)
    tar = archive(tmp_path / "a.tar", {"0.mp4": (tmp_path / "0.mp4").read_bytes(), "0.txt": b"x"})
    with pytest.raises(DataError, match=r"`columns\.fields` needs a table"):
        dataset(tar)


def test_a_feature_depends_on_the_fields_that_its_part_reads_and_on_no_other(tmp_path):
    parts = [PartKey("latents", False, bytes(16)), PartKey("input control", False, bytes(16), ("control",))]
    parts.append(PartKey("input motion", False, bytes(16), ("motion",)))

    def keys(table: Path, number: int):
        rows = CacheRows(dataset(table), None, 1, 0)
        return rows.keys([(1, 0)], parts, FileHashes(tmp_path / f"hashes{number}"))[0]

    plain = keys(rows_of(tmp_path), 0)
    moved = keys(rows_of(tmp_path, motion=0.75), 1)
    other = keys(rows_of(tmp_path, edges="2.mp4"), 2)
    assert (plain == moved).tolist() == [True, True, False]
    assert (plain == other).tolist() == [True, False, True]
    assert not keys(rows_of(tmp_path, edges="none.mp4"), 3)["high"][1]


SHOWN = MediaField("shown", kind="images", most=2)


def pictures_of(folder: Path) -> list[torch.Tensor]:
    drawn = [
        torch.randint(0, 255, (3, 5 + n, 9 - n), generator=torch.Generator().manual_seed(n)) for n in range(3)
    ]
    for number, picture in enumerate(drawn):
        Image.fromarray(picture.byte().permute(1, 2, 0).numpy()).save(folder / f"{number}.png")
    return [picture.byte() for picture in drawn]


@pytest.mark.parametrize(
    ("cell", "numbers"),
    [
        (["2.png", "0.png"], (2, 0)),
        ("1.png", (1,)),
        ('["1.png", "2.png"]', (1, 2)),
        ([], ()),
        (None, ()),
        ("", ()),
    ],
)
def test_pictures_of_a_cell_are_read_in_their_own_size(tmp_path, cell, numbers):
    pictures = pictures_of(tmp_path)
    rows_of(tmp_path)
    rows = [
        json.loads(line) | {"shown": "0.png"} for line in (tmp_path / "rows.jsonl").read_text().splitlines()
    ]
    rows[1]["shown"] = cell
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    samples = dataset(tmp_path / "rows.jsonl", (*FIELDS, SHOWN))
    drawn = samples.sample_at(1, Randomness(0).at("data", 0, 1))["shown"]  # neither cropped nor flipped
    assert len(drawn) == len(numbers)
    assert all(torch.equal(one[:, 0], pictures[n]) for one, n in zip(drawn, numbers, strict=True))
    batch = samples.collate([{**samples[n], "key": None, "weight": 1.0} for n in range(2)])
    assert [len(row) for row in batch.fields["shown"].rows] == [1, len(numbers)]


def test_a_table_of_text_has_lists_as_json(tmp_path):
    pictures_of(tmp_path)
    rows_of(tmp_path)
    table = tmp_path / "rows.csv"
    table.write_text('path,cap,shown\n0.mp4,a,"[""1.png"", ""2.png""]"\n1.mp4,b,\n2.mp4,c,0.png\n')
    samples = dataset(table, (SHOWN,))
    assert [len(samples[n]["shown"]) for n in range(3)] == [2, 0, 1]


def test_features_of_pictures_and_caption_depend_on_both(tmp_path):
    pictures_of(tmp_path)
    part = PartKey("text states", False, bytes(16), ("shown",), caption=True)
    parts = [part, PartKey("input shown", False, bytes(16), ("shown",))]

    def keys(number: int, **changed: object):
        rows_of(tmp_path)
        rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        rows = [{**row, "shown": ["0.png", "1.png"], **changed} for row in rows]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        cached = CacheRows(dataset(tmp_path / "rows.jsonl", (SHOWN,)), None, 1, 0)
        return cached.keys([(1, 0)], parts, FileHashes(tmp_path / f"hashes{number}"))[0]

    plain = keys(0, cap="one")
    assert (plain == keys(1, cap="two")).tolist() == [False, True]
    assert (plain == keys(2, cap="one", shown=["1.png", "0.png"])).tolist() == [False, False]
    assert (plain == keys(3, cap="one", shown=["0.png"])).tolist() == [False, False]
    assert not keys(4, cap="one", shown=["0.png", "none.png"])["high"].any()
    assert (plain == keys(5, cap="one")).all()
