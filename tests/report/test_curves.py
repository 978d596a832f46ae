"""Curves are reduced without losing means, extremes, or values that are not finite."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_core.report.curves import axis, buckets, curve, density, heat_map, means_at, time_split
from mm_core.report.reading import Density, Run, Series, read_run


def series(values, every: int = 1) -> Series:
    found = Series()
    for place, value in enumerate(values):
        found.add((place + 1) * every, value)
    return found


def run_of(**named: Series) -> Run:
    return Run("a", Path("a"), {name.replace("__", "/"): found for name, found in named.items()}, 0.0)


def test_a_short_series_is_shown_point_by_point():
    assert curve(series([3.0, 1.0, 2.0])) == {"x": [1, 2, 3], "y": [3.0, 1.0, 2.0]}


def test_a_bucket_keeps_its_last_step_mean_and_extremes():
    found = curve(series([1.0, 3.0, 5.0, 5.0, 8.0]), points=3)
    assert found == {"x": [2, 4, 5], "y": [2.0, 5.0, 8.0], "low": [1.0, 5.0, 8.0], "high": [3.0, 5.0, 8.0]}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 40))
def test_extremes_survive_and_the_points_are_few(values, points):
    found = curve(series(values), points)
    assert len(found["x"]) <= points and found["x"][-1] == len(values)
    low, high = found.get("low", found["y"]), found.get("high", found["y"])
    assert min(low) == pytest.approx(min(values), rel=1e-5)
    assert max(high) == pytest.approx(max(values), rel=1e-5)
    assert all(a <= m <= b for a, m, b in zip(low, found["y"], high, strict=True))


def test_what_is_not_finite_is_a_gap_and_is_listed():
    found = curve(series([1.0, math.nan, 2.0, math.inf]))
    assert found == {"x": [1, 2, 3, 4], "y": [1.0, None, 2.0, None], "bad": [2, 4], "bad_count": 2}
    wide = curve(series([1.0, math.nan, 3.0, 4.0]), points=2)
    assert (wide["y"], wide["bad"]) == ([1.0, 3.5], [2])


def test_values_whose_sum_overflows_have_a_mean():
    found = curve(series([1.5e308, 1.5e308]), points=1)
    assert found["y"] == [1.5e308] and "bad" not in found


def test_time_counts_the_steps_between_two_lines():
    found = axis(run_of(step_time=series([2.0, 4.0, math.nan], every=10), samples=series([80, 160, 240], 10)))
    assert (found["time_x"], found["time"]) == ([0, 10, 20, 30], [0.0, 20.0, 60.0, 60.0])
    assert found["samples_x"][0] == 0 and found["samples"][-1] == 240


def test_bins_are_sorted_by_number_and_averaged_over_columns():
    run = run_of(**{"loss_by_sigma__0.9-1": series([1.0, 3.0]), "loss_by_sigma__0-0.1": series([4.0])})
    assert heat_map(run, "loss_by_sigma") == {
        "bins": ["0-0.1", "0.9-1"],
        "x": [1, 2],
        "rows": [[4.0, None], [1.0, 3.0]],
    }
    assert heat_map(run, "grad_norm_by_sigma") is None


def test_columns_cover_every_point_once():
    many = [series(range(7)), series(range(3), every=2)]
    columns = buckets(many, columns=3)
    assert columns == [3, 6, 7]
    assert means_at(many[0], columns) == [1.0, 4.0, 6.0]
    assert means_at(many[1], columns) == [0.0, 1.5, None]


def test_a_bin_without_samples_counts_as_none_in_the_density():
    declared = Density("sigma", (0.0, 0.5, 1.0), (0.25, 0.75))
    run = run_of(**{"timesteps_by_sigma__0-0.5": series([1.0]), "timesteps_by_sigma__0.5-1": series([0, 1])})
    found = density(run, declared)
    assert found == {
        "name": "sigma",
        "bins": ["0-0.5", "0.5-1"],
        "realised": [0.5, 0.5],
        "declared": [0.25, 0.75],
    }
    assert density(run, None) is None and density(run_of(loss=series([1.0])), declared) is None


def test_a_phase_that_a_line_leaves_out_took_no_time():
    validation = Series()
    validation.add(2, 4.0)
    found = time_split(run_of(time__data=series([1.0, 3.0]), time__validation=validation))
    assert found == {
        "phases": ["data", "validation"],
        "x": [1, 2],
        "rows": [[1.0, 3.0], [0.0, 4.0]],
        "means": [2.0, 2.0],
    }


def test_a_run_as_training_leaves_it(make_run):
    run = read_run(make_run("a"), "a")
    table = heat_map(run, "loss_by_sigma")
    assert table is not None and table["x"] == [10, 20, 30, 40]
    assert [row[0] for row in table["rows"]] == [1.0 + i for i in range(10)]
    assert axis(run)["time"][-1] == 10.0
