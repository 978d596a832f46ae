"""Conditions on rows: a row without the value is left out and counted, and no condition takes long."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from mm_core.builtin.configs.data import MediaSource
from mm_core.data.rows.sources import SourceReader
from mm_core.data.rows.where import Where
from mm_core.errors import DataError

ROWS = [
    {"path": "bad.jpg", "cap": "x", "nsfw": True, "source": "bad"},
    {"path": "unknown.jpg", "cap": "y", "nsfw": None, "source": None},
    {"path": "good.jpg", "cap": "z", "nsfw": False, "source": "web"},
]


def write(file: Path, rows: list[dict[str, object]]) -> MediaSource:
    if file.suffix == ".json":
        file.write_text(json.dumps(rows))
    elif file.suffix == ".csv":
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(rows), file)
    return MediaSource(str(file))


def kept(source: MediaSource, where: str) -> tuple[list[str], dict[str, int]]:
    reader = SourceReader(0, MediaSource(source.annotations, where=where))
    return [row.path for row in reader.rows()], dict(reader.dropped)


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.parquet"])
@pytest.mark.parametrize(
    "where", ["not nsfw", 'source != "bad"', 'source not in ["bad"]', 'not source == "bad"', "nsfw == False"]
)
def test_a_row_without_the_value_does_not_pass_and_is_counted_as_unknown(tmp_path, name, where):
    paths, dropped = kept(write(tmp_path / name, ROWS), where)
    column = "nsfw" if "nsfw" in where else "source"
    assert paths == ["good.jpg"]
    assert dropped == {f"where: {where}": 1, f"where: {column} unknown": 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a or b", True),
        ("b or a", True),
        ("not a and b", False),
        ("b and not a", False),
        ("a and b", None),
        ("not b", None),
        ("not (a and b)", None),
        ("b == None", True),
        ("a is not None", True),
        ("b != None", False),
        ("n != 3", None),
        ("b not in [1]", None),
        ("b + 1 != 3", None),
    ],
)
def test_logic_has_three_values(text, expected):
    given = {"a": True, "b": None, "n": float("nan")}
    if expected is None:
        with pytest.raises(TypeError):
            Where(text)(given)
    else:
        assert Where(text)(given) is expected


@pytest.mark.parametrize("word", ["False", "no", "NO", "0", "f", "off"])
def test_texts_that_mean_no_are_not_true(tmp_path, word):
    rows = [{"path": "a.jpg", "cap": "x", "k": word}, {"path": "b.jpg", "cap": "x", "k": "Yes"}]
    source = write(tmp_path / "a.csv", rows)
    assert kept(source, "k")[0] == kept(source, "k == True")[0] == ["b.jpg"]
    assert kept(source, "not k")[0] == kept(source, "k != True")[0] == ["a.jpg"]
    assert kept(source, 'k == "Yes"')[0] == ["b.jpg"]  # as a text it stays one


@pytest.mark.parametrize(
    "text",
    [
        "x" + "[0]" * 900 + " == 1",
        "x == " + "-" * 900 + "1",
        " + ".join(["x"] * 900) + " > 1",
        "x in [0] * 10 ** 9",
        'x == "a" * 10 ** 9',
        "x == 9 ** 9 ** 9",
        "x == 1 << 10 ** 10",
        'x == "%999999999d" % 1',
        "x > 1 / 0",
    ],
)
def test_a_condition_that_would_take_long_is_refused_by_name(text):
    with pytest.raises(DataError, match=r"nested too deeply|has no value"):
        Where(text)


@pytest.mark.parametrize(
    "text", ["x * 10 ** 9 == 1", "y ** 10 ** 6 > 1", "y * y ** 1000 ** 3 > 1", "y << 10 ** 9 > 1"]
)
def test_products_with_lists_and_large_powers_of_columns_are_counted_in_no_time(text):
    with pytest.raises(TypeError):
        Where(text)({"x": [1, 2], "y": 10**9})


def test_dates_that_python_cannot_hold_are_unknown(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    dates = pa.array([0, 10**18, 86_400_000_000], pa.timestamp("us"))
    days = pa.array([0, 10**8, 1], pa.date32())
    parquet.write_table(
        pa.table({"path": ["a.jpg", "b.jpg", "c.jpg"], "cap": ["x"] * 3, "made": dates, "day": days}),
        tmp_path / "a.parquet",
    )
    source = MediaSource(str(tmp_path / "a.parquet"))
    for where in ("made != 3", "day != 3"):
        paths, dropped = kept(source, where)
        assert paths == ["a.jpg", "c.jpg"] and dropped == {f"where: {where.split()[0]} unknown": 1}


NESTED = [
    {"path": "null.jpg", "cap": "x", "meta": {"lang": None}, "tags": [None], "score": {"of": float("nan")}},
    {"path": "de.jpg", "cap": "x", "meta": {"lang": "de"}, "tags": ["a"], "score": {"of": 2.0}},
    {"path": "lacks.jpg", "cap": "x", "meta": {}, "tags": [], "score": {}},
]


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ('meta["lang"] != "en"', ["de"]),
        ('not (meta["lang"] == "en")', ["de"]),
        ('meta["lang"] not in ["en"]', ["de"]),
        ('meta["lang"] != None', ["de"]),
        ('meta["lang"] == None', ["null", "lacks"]),
        ('tags[0] != "b"', ["de"]),
        ('score["of"] != 3', ["de"]),
        ('not (score["of"] > 3)', ["de"]),
        ('cap not in ["y", meta["lang"]]', ["de"]),
        ('cap in ["x", meta["lang"]]', ["null", "de", "lacks"]),
        ('1 < score["of"] <= 2', ["de"]),
    ],
)
def test_no_value_within_a_column_is_unknown_too(tmp_path, where, names):
    found, _ = kept(write(tmp_path / "rows.json", NESTED), where)
    assert found == [f"{name}.jpg" for name in names]


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("(nsfw or violent) == False", ["no"]),
        ("(not nsfw) == True", ["mixed", "no"]),
        ("nsfw in [False]", ["mixed", "no"]),
        ("nsfw not in [True]", ["mixed", "no"]),
        ("nsfw == False == violent", ["no"]),
        ("(nsfw == violent) == (nsfw == violent)", ["mixed", "no", "yes"]),
    ],
)
def test_texts_that_mean_no_are_not_true_within_larger_conditions(tmp_path, where, names):
    rows = [("mixed", "False", "True"), ("no", "no", "no"), ("yes", "True", "False")]
    table = [{"path": f"{name}.jpg", "cap": "x", "nsfw": one, "violent": other} for name, one, other in rows]
    found, _ = kept(write(tmp_path / "rows.csv", table), where)
    assert found == [f"{name}.jpg" for name in names]
