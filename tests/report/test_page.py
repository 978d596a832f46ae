"""The page contains everything it needs, stays small, and runs nothing that a run has written."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from mm_core.cli.main import main
from mm_core.report.clips import embed, encoded_size, spread
from mm_core.report.page import differing, environment, render, summary, to_json
from mm_core.report.reading import Run, Series, read_run, read_runs

HOSTILE = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 1"> <!-- & " \u2028'


def data_of(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(text)


def test_the_page_shows_what_the_run_reports(make_run):
    page = render([read_run(make_run("a", sampled=(20, 40)), "a")], 10**7)
    (run,) = data_of(page)["runs"]
    assert run["curves"]["loss"]["y"][:4] == [2.0, 1.0, 0.666667, 0.5]
    assert run["curves"]["validation_ema/loss"] == {
        "x": [10, 20, 30, 40],
        "y": [0.25, 0.125, 0.0833333, 0.0625],
    }
    assert "samples_per_second" in run["curves"] and "samples" not in run["curves"]
    assert run["config"] == {"run.name": "a", "optimizer.type": "core/adamw", "optimizer.lr": "0.001"}
    assert run["config_text"] == "run: {name: a}\n"
    assert [shot["step"] for shot in run["shots"]] == [20, 40]
    assert all(clip["src"].startswith("data:video/mp4;base64,") for s in run["shots"] for clip in s["clips"])


def test_nothing_is_loaded_from_elsewhere(make_run):
    page = render([read_run(make_run("a", sampled=(20,)), "a")], 10**7)
    shell = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.S)
    assert re.findall(r"https?://[^\"\s]+", shell) == ["http://www.w3.org/2000/svg"]  # a name, not an address
    assert "default-src 'none'" in shell and "unsafe" not in shell and "@import" not in shell
    assert not re.search(r"\bsrc=\"?(?!data:)", shell) and not re.search(r"url\((?!#)", shell)


def test_markup_of_a_run_stays_text(make_run):
    folder = make_run("a", sampled=(20,), prompts=(HOSTILE,))
    (folder / "config.yaml").write_text(HOSTILE)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 41, HOSTILE: 1.0}) + "\n")
    page = render([read_run(folder, HOSTILE)], 10**7)
    assert page.count("<script") == 2 and "<img" not in page and "<!--" not in page
    assert "<title>&lt;/script&gt;" in page
    data = data_of(page)
    assert data["prompts"] == [HOSTILE] and HOSTILE in data["runs"][0]["curves"]
    assert data["runs"][0]["config_text"] == HOSTILE


def test_text_that_utf8_cannot_hold_is_replaced():
    assert json.loads(to_json({"prompt": "a\ud800b"})) == {"prompt": "a?b"}


@pytest.mark.slow
def test_a_million_steps_make_less_than_three_megabytes():
    draw = random.Random(0)
    values = array("d", (draw.random() for _ in range(10**6)))
    steps = array("q", range(1, 10**6 + 1))
    names = ["loss", "lr", "grad_norm", "step_time", "data_wait", "samples_per_second", "tokens_per_second"]
    names += ["samples", "memory", "mfu", "time/data", "time/encode", "time/forward_backward"]
    curves = {name: Series(steps, values) for name in names}
    every = Series(steps[49::50], values[49::50])
    for kind in ("loss", "grad_norm", "timesteps"):
        curves |= {f"{kind}_by_sigma/{i / 10:g}-{(i + 1) / 10:g}": every for i in range(10)}
    for weights in ("validation", "validation_ema"):
        curves |= {f"{weights}/loss_at/0.{i}": every for i in (1, 3, 5, 7, 9)} | {f"{weights}/loss": every}
    page = render([Run("a", Path("a"), curves, 0.0)], 0)
    assert len(page) < 3e6
    assert len(data_of(page)["runs"][0]["curves"]["loss"]["x"]) > 500


def test_a_run_with_little_to_show_is_shown_all_the_same(make_run):
    folder = make_run("a", steps=3, validated=False)
    for name in ("manifest.json", "telemetry.json", "config.yaml"):
        (folder / name).unlink()
    (run,) = data_of(render([read_run(folder, "a")], 0))["runs"]
    assert run["summary"][:2] == [["state", "unknown length"], ["steps", "3"]]
    assert (run["loss_by"], run["density"], run["shots"], run["environment"]) == (None, None, [], {})


def test_the_table_of_runs_shows_how_far_and_how_well(make_run):
    rows = dict(summary(read_run(make_run("a", steps=30), "a")))
    assert rows["state"] == "incomplete: still training, stopped or failed" and rows["steps"] == "30 of 40"
    assert rows["lowest validation/loss"] == "0.1 at step 30" and rows["last loss"] == "0.066667"
    assert dict(summary(read_run(make_run("b"), "b")))["state"] == "complete"


def test_what_was_measured_is_beside_the_forecast(make_run):
    folder = make_run("a")
    written = json.loads((folder / "manifest.json").read_text())
    forecast = {"peak_of_tensors": 3 * 2**29, "step_seconds": 0.2, "needs": []}
    for device, memory in (("cuda", "1.5 GiB"), ("cpu", "1.5 GiB of tensors; measured is the whole process")):
        more = {"forecast": forecast, "devices": {"device": device}}
        (folder / "manifest.json").write_text(json.dumps(written | more))
        rows = dict(summary(read_run(folder, "a")))
        assert (rows["peak memory per rank"], rows["peak memory per rank, forecast"]) == ("1 GiB", memory)
        assert (rows["seconds a step, median"], rows["seconds a step, forecast"]) == ("0.25", "0.2")
    states = {"peak_of_tensors": 0, "step_seconds": 0, "needs": []}  # known alone
    (folder / "manifest.json").write_text(json.dumps(written | {"forecast": states}))
    assert not any("forecast" in name for name in dict(summary(read_run(folder, "a"))))


def test_a_last_loss_that_is_not_finite_is_reported(make_run):
    folder = make_run("a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "loss": "NaN", "validation/loss": "NaN"}\n')
    rows = dict(summary(read_run(folder, "a")))
    assert rows["last loss"] == "nan" and rows["lowest validation/loss"] == "0.075 at step 40"


def test_configs_are_compared_by_key(make_run):
    runs = read_runs([make_run("a"), make_run("b", lr=5e-4)])
    assert differing(runs) == ["run.name", "optimizer.lr"]
    assert data_of(render(runs, 0))["config_diff"] == ["run.name", "optimizer.lr"]


def test_the_environment_names_versions_and_sizes(make_run):
    found = environment(read_run(make_run("a"), "a"))
    assert found == {
        "devices.device": "cpu",
        "world": "1",
        "plan.global_batch_size": "8",
        "plan.steps": "40",
        "plugins.mm-core": "0.1.0",
    }


def test_a_manifest_of_another_form_is_no_fault(make_run):
    folder = make_run("a")
    (folder / "manifest.json").write_text(
        '{"plan": [], "plugins": 3, "config": [1], "world": null, "forecast": []}'
    )
    assert environment(read_run(folder, "a")) == {"world": "null"}
    render([read_run(folder, "a")], 0)


def test_the_newest_and_evenly_spaced_clips_come_first():
    assert spread(0) == [] and spread(1) == [0] and spread(2) == [1, 0]
    assert spread(9)[:5] == [8, 0, 4, 2, 6] and sorted(spread(9)) == list(range(9))


def test_clips_keep_to_their_budget(make_run):
    run = read_run(make_run("a", sampled=tuple(range(10, 100, 10))), "a")
    one = sum(encoded_size(path) for _, path in run.shots[0].clips)
    shots, used = embed(run, 0)
    assert used == 0 and all(clip["src"] is None for shot in shots for clip in shot["clips"])
    shots, used = embed(run, int(3.5 * one))
    carried = [shot["step"] for shot in shots if shot["clips"][0]["src"]]
    assert carried == [10, 50, 90] and used <= 3.5 * one
    shots, used = embed(run, 10**8)
    assert all(clip["src"] for shot in shots for clip in shot["clips"])
    assert used == sum(len(clip["src"].partition(",")[2]) for shot in shots for clip in shot["clips"])


def test_a_contact_sheet_stands_in_for_clips_that_are_too_large(make_run):
    folder = make_run("a", sampled=(10,))
    for path in (folder / "samples/step_00000010").glob("*.mp4"):
        path.write_bytes(path.read_bytes() + bytes(10**5))
    ((shot,), _) = embed(read_run(folder, "a"), 10**5)
    assert shot["sheet"].startswith("data:image/png;base64,") and shot["clips"][0]["src"] is None
    assert shot["clips"][0]["file"] == "step_00000010/000-a-red-circle-moves-left.mp4"


def test_clips_that_go_while_the_page_is_made_are_remarked_upon(make_run):
    run = read_run(make_run("a", sampled=(10, 20)), "a")
    run.shots[0].clips[0][1].unlink()
    shots, _ = embed(run, 10**7)
    assert [bool(clip["src"]) for shot in shots for clip in shot["clips"]] == [False, False, True, True]
    assert shots[0]["sheet"].startswith("data:image/png;base64,")
    assert run.remarks == ["samples of step 10: No such file or directory"]


def test_the_command_writes_the_page_and_prints_where(make_run, tmp_path, monkeypatch, capsys):
    a, b = make_run("a"), make_run("b")
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(a)]) == 0
    size = (a / "report.html").stat().st_size / 1000
    assert capsys.readouterr().out == f"{a / 'report.html'} ({size:.1f} kB)\n"
    assert main(["report", str(a), str(b)]) == 0
    assert [run["label"] for run in data_of((tmp_path / "report.html").read_text())["runs"]] == ["a", "b"]
    assert main(["report", str(a), "--out", "x.html", "--max-mb", "0.5"]) == 0 and Path("x.html").is_file()


def test_what_the_command_cannot_do_is_a_readable_error(make_run, tmp_path, capsys):
    a = make_run("a")
    assert main(["report", str(a), "--out", str(tmp_path / "no/such/x.html")]) == 1
    assert "the file cannot be written: No such file or directory" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "b")]) == 1
    assert "there is no such run" in capsys.readouterr().err
    for bad in ("-1", "nan", "ten"):
        assert main(["report", str(a), "--max-mb", bad]) == 2
        assert f"{bad} is not a number between 0 and 2000" in capsys.readouterr().err
    assert main(["report", str(a), "--out", "."]) == 1
    assert "this is a folder" in capsys.readouterr().err


def test_the_command_loads_no_torch(make_run):
    code = (
        "import sys; from mm_core.cli.main import main; main(sys.argv[1:]);"
        " sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, "report", str(make_run("a"))], capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["charts.js", "page.js", "page.css"])
def test_the_parts_of_the_page_are_read_whole(name, make_run):
    part = (Path(__file__).parents[2] / "mm_core/report" / name).read_text()
    assert part.strip() in render([read_run(make_run("a"), "a")], 0)
    assert len(part.splitlines()) < 400
