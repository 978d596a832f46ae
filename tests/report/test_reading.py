"""A run's folder is read as it is, even if a crash has truncated its files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mm_core.errors import MMError
from mm_core.report.reading import Density, labels, read_run, read_runs, read_series, read_shots


def test_every_metric_is_a_series_of_its_own_steps(make_run):
    run = read_run(make_run("a"), "a")
    assert list(run.series["loss"].steps) == list(range(1, 41))
    assert run.series["loss"].values[3] == 0.5
    assert list(run.series["validation/loss"].steps) == [10, 20, 30, 40]
    assert (run.last_step, run.planned_steps, run.remarks) == (40, 40, [])
    assert run.density == Density("sigma", tuple(i / 10 for i in range(11)), (0.1,) * 10)


def test_torn_lines_are_counted_and_passed_over(tmp_path):
    good = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2)]
    odd = [
        '{"step": 3, "los',
        "[1]",
        '{"loss": 1}',
        '{"step": "4", "loss": 1}',
        '{"step": true}',
        "\x00\x00",
        '{"step": 5, "loss": ' + "[" * 100_000,
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([*good, "", *odd]))
    series, torn = read_series(path)
    assert (list(series["loss"].steps), torn) == ([1, 2], len(odd))


def test_what_is_no_number_is_no_point(tmp_path):
    path = tmp_path / "metrics.jsonl"
    huge = "1" + "0" * 400
    path.write_text(
        '{"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": "x", "e": null, "f": true}\n'
        f'{{"step": 2, "a": 1, "b": {huge}, "c": -{huge}}}\n'
    )
    series, torn = read_series(path)
    assert torn == 0 and series.keys() == {"a", "b", "c"}
    assert math.isnan(series["a"].values[0]) and series["a"].values[1] == 1.0
    assert list(series["b"].values) == [math.inf, math.inf]
    assert list(series["c"].values) == [-math.inf, -math.inf]


def test_a_run_that_went_back_to_an_older_step_shows_its_later_life(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [(1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0), (3, 30.0)]
    path.write_text("".join(json.dumps({"step": s, "loss": v}) + "\n" for s, v in rows))
    series, _ = read_series(path)
    assert (list(series["loss"].steps), list(series["loss"].values)) == ([1, 2, 3], [1.0, 20.0, 30.0])


def test_files_that_cannot_be_read_are_remarked_upon(make_run):
    folder = make_run("a")
    (folder / "manifest.json").write_text('{"config": {')
    (folder / "telemetry.json").write_text("[]")
    (folder / "config.yaml").unlink()
    (folder / "config.yaml").mkdir()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    run = read_run(folder, "a")
    assert run.remarks == [
        "1 line of metrics.jsonl skipped: not readable",
        "manifest.json skipped: not readable",
        "telemetry.json skipped: not readable",
        "config.yaml skipped: not readable",
    ]
    assert run.planned_steps is None and run.density is None


@pytest.mark.parametrize(
    "bins",
    [
        {"name": "sigma", "edges": [0, 1], "declared": [0.5, 0.5]},
        {"name": 1, "edges": [0, 1], "declared": [1]},
        {"name": "sigma", "edges": "01", "declared": [1]},
        {"name": "sigma", "edges": [0, math.nan], "declared": [1]},
        None,
    ],
)
def test_a_density_that_does_not_fit_is_none(make_run, bins):
    folder = make_run("a")
    (folder / "telemetry.json").write_text(json.dumps({"bins": bins}))
    assert read_run(folder, "a").density is None


def test_clips_are_found_by_step_with_their_prompts(make_run):
    shots = read_shots(make_run("a", sampled=(20, 10)) / "samples")
    assert [shot.step for shot in shots] == [10, 20]
    assert [prompt for prompt, _ in shots[0].clips] == ["a red circle moves left", "a blue square moves up"]
    assert shots[0].sheet is not None and all(path.is_file() for _, path in shots[0].clips)


def test_clips_of_a_sampling_that_was_cut_short_are_named_by_their_files(make_run):
    folder = make_run("a", sampled=(20,)) / "samples"
    (folder / "step_00000020/prompts.json").write_text('[{"path": "000-a')
    (folder / "seed_0").mkdir()
    (folder / "step_00000030").mkdir()
    (shot,) = read_shots(folder)
    assert [prompt for prompt, _ in shot.clips] == ["a red circle moves left", "a blue square moves up"]


def test_prompts_lead_to_no_file_outside_of_their_folder(make_run, tmp_path):
    folder = make_run("a", sampled=(20,)) / "samples"
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    rows = [{"path": "../../../secret.mp4", "cap": "x"}, {"path": str(tmp_path / "secret.mp4"), "cap": "y"}]
    (folder / "step_00000020/prompts.json").write_text(json.dumps([*rows, {"path": 1, "cap": "z"}, "w"]))
    (shot,) = read_shots(folder)
    assert len(shot.clips) == 2 and all(path.parent.name == "step_00000020" for _, path in shot.clips)


def test_a_link_among_the_clips_is_not_followed(make_run, tmp_path):
    folder = make_run("a", sampled=(20,)) / "samples"
    (tmp_path / "secret").write_bytes(b"secret")
    for name in ("000-a-red-circle-moves-left.mp4", "contact_sheet.png"):
        (folder / "step_00000020" / name).unlink()
        (folder / "step_00000020" / name).symlink_to(tmp_path / "secret")
    (shot,) = read_shots(folder)
    assert [prompt for prompt, _ in shot.clips] == ["a blue square moves up"] and shot.sheet is None


def test_labels_are_as_short_as_they_can_be():
    assert labels([Path("/r/a"), Path("/r/b")]) == ["a", "b"]
    assert labels([Path("/one/x/a"), Path("/two/x/a"), Path("/two/b")]) == ["one/x/a", "two/x/a", "b"]


def test_a_run_that_is_named_twice_is_shown_once(make_run):
    folder = make_run("a")
    assert [run.label for run in read_runs([folder, folder / ".." / "a"])] == ["a"]


def test_what_is_no_run_is_a_readable_error(make_run, tmp_path):
    folder = make_run("shapes")
    with pytest.raises(MMError) as absent:
        read_runs([tmp_path / "shape"])
    assert absent.value.render() == (
        f"{tmp_path / 'shape'}: there is no such run\n  accepted: a run's folder, such as runs/NAME\n"
        "  hint: did you mean 'shapes'?"
    )
    with pytest.raises(MMError, match="this is a file, not a run's folder"):
        read_runs([folder / "config.yaml"])
    with pytest.raises(
        MMError, match=r"this folder is not a run but contains 1 run(.|\n)*mm report .*shapes"
    ):
        read_runs([tmp_path])
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(MMError, match=r"this folder is not a run: it contains no metrics\.jsonl"):
        read_runs([folder, empty])


def test_a_run_that_has_logged_nothing_yet_is_a_readable_error(make_run):
    folder = make_run("a")
    (folder / "metrics.jsonl").write_text('{"step": 1')
    with pytest.raises(MMError, match="this run has logged nothing yet"):
        read_run(folder, "a")
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(MMError, match="this run has logged nothing yet: it contains no"):
        read_run(folder, "a")
