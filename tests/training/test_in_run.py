"""A run begins with its forecast: it is refused where it cannot fit, and compared with what is measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from mm_core.config.load import load_config
from mm_core.device import free_memory_bytes, measurement
from mm_core.device.machines import GIB, machine_of
from mm_core.errors import PlanError
from mm_core.runtime.ranks import Ranks
from mm_core.telemetry.trackers.local import read_metrics
from mm_core.training import assembly
from mm_core.training.forecast import in_run
from mm_core.training.forecast import study as forecasts
from mm_core.training.forecast.calibration import Factors, keep
from mm_core.training.forecast.forecast import Forecast, Need
from mm_core.training.forecast.in_run import Foreseen, PeakCheck, checked, foresee
from mm_core.training.run import train
from support.ranks import run_ranks

ALONE = Ranks(0, 1, alone=True)


@pytest.fixture
def small_models_too(monkeypatch, tmp_path):
    monkeypatch.setattr(in_run, "SMALL", 0.0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def as_if_on_an_accelerator(monkeypatch):
    """A mock: what decides about the forecast takes the CPU for an accelerator."""
    monkeypatch.setattr(in_run, "device_type", lambda: "cuda")


def foreseen(machine: str, **gib: float) -> Foreseen:
    """A forecast with the needs of phases in GiB."""
    needs = tuple(
        Need(phase, round(size * GIB), 0, {}, round((size - 1) * GIB)) for phase, size in gib.items()
    )
    on = machine_of(machine)
    return Foreseen(Forecast(on.title, on.device.memory, needs, {}, 8, 12, ()), None, on, ("first",))


# -- runs --------------------------------------------------------------------------------------------


def run_of(tiny: Path, folder: Path, *more: str, **options: bool) -> list[tuple[float, float]]:
    """Losses and norms of three steps."""
    train(load_config(tiny, [f"run.dir={folder}", "train.steps=3", "log.every=1", *more]), **options)
    return [(row["loss"], row["grad_norm"]) for row in read_metrics(folder / "tiny") if "loss" in row]


@pytest.mark.slow
def test_a_run_begins_with_its_forecast_which_changes_no_bit_and_is_in_the_report(
    tiny, tmp_path, mm, capsys, small_models_too
):
    without = run_of(tiny, tmp_path / "without", forecast=False)
    assert "forecast" not in capsys.readouterr().err
    assert "forecast" not in json.loads((tmp_path / "without/tiny/manifest.json").read_text())
    keep("cpu", Factors(1e-5, {"mm float32": (1e-5, 1.0)}))
    assert run_of(tiny, tmp_path) == without
    said = next(line for line in capsys.readouterr().err.splitlines() if "forecast" in line)
    known = (
        r"forecast: [\d.]+ MiB of [\d.]+ GiB at the peak \(step\), about [\d.]+ s a step; 3 steps take .* s"
    )
    assert re.fullmatch(known, said.strip()), said
    written = json.loads((tmp_path / "tiny/manifest.json").read_text())["forecast"]
    assert written["fits"] and [need["phase"] for need in written["needs"]] == ["load", "step"]
    assert mm("report", tmp_path / "tiny", "--out", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    (run,) = json.loads(text)["runs"]
    rows = dict(run["summary"])
    assert float(rows["seconds a step, forecast"]) == pytest.approx(written["step_seconds"], rel=1e-3)
    assert float(rows["seconds a step, median"]) > 0
    assert rows["peak memory per rank, forecast"].endswith("GiB of tensors; measured is the whole process")
    assert not any(key.startswith("forecast") for key in run["environment"])


@pytest.mark.slow
def test_the_first_of_two_ranks_forecasts_for_both(tiny, tmp_path):
    script = Path(__file__).with_name("forecast_ranks.py")
    first, second = run_ranks(script, 2, tiny, f"run.dir={tmp_path}", "train.steps=2")
    assert first.count("forecast: ") == 1 and "forecast" not in second
    assert json.loads((tmp_path / "tiny/manifest.json").read_text())["forecast"]["machine"] == "2 x cpu"


@pytest.mark.slow
def test_phases_are_compared_once_they_have_run_and_one_note_says_which_was_wrong(
    tiny, tmp_path, monkeypatch, capsys, as_if_on_an_accelerator
):
    asked = []

    def memory_of_a_device_that_holds_twice_the_forecast() -> int:
        manifest = json.loads((tmp_path / "tiny/manifest.json").read_text())
        asked.append(len(read_metrics(tmp_path / "tiny")))
        return 2 * max(need["allocated"] for need in manifest["forecast"]["needs"])

    fake = memory_of_a_device_that_holds_twice_the_forecast
    monkeypatch.setattr(assembly, "PeakCheck", partial(PeakCheck, measured=fake))
    run_of(tiny, tmp_path)
    said = capsys.readouterr().err
    assert asked == [1] and said.count("the forecast was wrong in step") == 1


@pytest.mark.slow
def test_evaluations_and_samples_are_phases_too(tiny, tmp_path, monkeypatch, small_models_too):
    ran = []
    monkeypatch.setattr(assembly, "PeakCheck", lambda *_: ran.append)
    held_out = {f"data.validation.{key}": f"${{data.train.{key}}}" for key in
                ("type", "annotations", "num_frames", "height", "width")}  # fmt: skip
    words = [f"{key}={value}" for key, value in held_out.items()]
    run_of(
        tiny, tmp_path, *words, "validation={every: 2, clips: 2, samples: {prompts: [a circle], steps: 1}}"
    )
    assert ran == ["step", "evaluation", "sample", "evaluation", "sample", "end"]


@pytest.mark.slow
def test_a_run_that_cannot_fit_is_refused_before_weights_are_read(
    tiny, tmp_path, monkeypatch, as_if_on_an_accelerator
):
    def a_device_with_one_mebibyte_free() -> int:
        return 2**20

    monkeypatch.setattr(assembly, "checked", partial(checked, free=a_device_with_one_mebibyte_free))
    monkeypatch.setattr(assembly, "build_parts", lambda *_: pytest.fail("the run goes on"))
    with pytest.raises(PlanError, match=r"1\.0 MiB are free") as refused:
        run_of(tiny, tmp_path)
    assert refused.value.where == "rank 0, memory of the device" and "--no-forecast" in refused.value.hint
    monkeypatch.undo()
    assert run_of(tiny, tmp_path, forecast=False)


_WAITS = """
import sys, time
from mm_core.cli.main import main
from mm_core.training.forecast import in_run

in_run._foreseen = lambda config: print("begun", flush=True) or time.sleep(60)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_signal_ends_a_run_that_is_forecast(tiny, tmp_path):
    words = [sys.executable, "-c", _WAITS, "train", "--config", str(tiny), f"run.dir={tmp_path}"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.terminate()
    assert "stopped while forecasting the run; nothing was lost" in process.communicate(timeout=30)[1]
    assert process.returncode == 75


# -- who forecasts -----------------------------------------------------------------------------------


def test_a_small_model_on_cpus_has_no_forecast_and_other_ranks_have_none(tiny, monkeypatch):
    monkeypatch.setattr(forecasts, "Study", lambda *_: pytest.fail("it was computed"))
    assert foresee(load_config(tiny)) == Foreseen()
    monkeypatch.setattr(in_run, "SMALL", 0.0)
    absent = load_config(tiny, ["data.train.annotations=absent.json"])
    assert foresee(absent) == Foreseen()  # the run ends with the missing file
    monkeypatch.setenv("RANK", "1")
    assert foresee(load_config(tiny)) == Foreseen()


def test_a_forecast_that_fails_is_a_note(tiny, monkeypatch, small_models_too):
    def no_numbers(*_):
        raise RuntimeError("a model needs numbers\nand more")

    monkeypatch.setattr(forecasts, "Study", no_numbers)
    assert foresee(load_config(tiny)).notes == ("there is no forecast: a model needs numbers",)


def test_a_forecast_of_the_states_alone_says_why(tiny, monkeypatch, small_models_too):
    def no_numbers(*_):
        raise RuntimeError("it needs numbers")

    monkeypatch.setattr(forecasts, "counted", no_numbers)
    line, why = foresee(load_config(tiny)).notes
    assert line.endswith("at the peak (states)") and why.endswith("predictor stopped (it needs numbers)")


# -- memory that is free -----------------------------------------------------------------------------


def test_free_memory_is_compared_with_what_the_process_has_yet_to_take(as_if_on_an_accelerator):
    found = foreseen("1xH100", load=9, step=50.7)  # 0.7 GiB are the driver's, and taken
    assert checked(found, ALONE, free=lambda: 50 * GIB).notes == ("first",)
    (_, warning) = checked(found, ALONE, free=lambda: 44 * GIB).notes
    assert warning.startswith(
        "warning: the run needs about 50.0 GiB at the peak (step), but 44.0 GiB are free;"
    )
    with pytest.raises(PlanError) as refused:
        checked(found, ALONE, free=lambda: 43 * GIB)
    fault = refused.value
    assert fault.where == "rank 0, memory of the device"
    assert fault.what == "the run needs about 50.0 GiB at the peak (step), but 43.0 GiB are free"
    assert fault.accepted == "a forecast of at most 49.4 GiB"
    assert "--dry-run --on 1x43.0GB --fit" in fault.hint and "--no-forecast" in fault.hint
    assert checked(Foreseen(), ALONE, free=lambda: 0) == Foreseen()


def test_host_memory_that_all_ranks_of_a_host_need_is_compared_too(as_if_on_an_accelerator, monkeypatch):
    found = foreseen("4xH100", step=10)
    held = [replace(need, host_bytes=20 * GIB) for need in found.forecast.needs]
    found = replace(found, forecast=replace(found.forecast, needs=tuple(held)))
    for free, count in ((80, 1), (79, 2)):
        monkeypatch.setattr("mm_core.training.forecast.in_run.free_host_bytes", lambda free=free: free * GIB)
        assert len(checked(found, ALONE, free=lambda: 50 * GIB).notes) == count


def test_all_ranks_of_a_host_share_its_memory_and_are_only_warned():
    found = foreseen("4xcpu", step=10)
    assert checked(found, ALONE, free=lambda: 40 * GIB).notes == ("first",)
    (_, warning) = checked(found, ALONE, free=lambda: GIB).notes
    assert warning.startswith(
        "warning: the ranks of a host need about 40.0 GiB at the peak (step), but 1.0 GiB"
    )
    assert checked(found, ALONE, free=lambda: None).notes == ("first",)


def test_the_limit_of_a_container_is_what_its_processes_can_take(tmp_path, monkeypatch):
    monkeypatch.setattr(measurement, "_CGROUP", tmp_path)
    of_host = free_memory_bytes()
    assert of_host is not None and of_host > 2**20
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(f"{2**19}\n")
    assert free_memory_bytes() > 2**20
    (tmp_path / "memory.max").write_text(f"{2**20}\n")
    assert free_memory_bytes() == 2**19


# -- measured beside predicted -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "phase"), [(49, None), (44.2, None), (43.9, "step"), (54.1, "step"), (53.8, None)]
)
def test_a_peak_that_differs_by_more_than_a_tenth_is_noted(as_if_on_an_accelerator, measured, phase):
    notes: list[str] = []
    check = PeakCheck(
        foreseen("1xH100", load=9, step=50).forecast, notes.append, lambda: round(measured * GIB)
    )
    for ran in ("step", "step", "evaluation"):
        check(ran)
    assert len(notes) == (measured > 54)  # what is less may still come: a larger bucket, another expert
    check("end")
    check("end")
    assert [f"wrong in {phase}: tensors took {round(measured * GIB):,} bytes" in note for note in notes] == [
        True
    ] * bool(phase)


def test_an_evaluation_is_compared_once_a_step_has_run(as_if_on_an_accelerator):
    notes: list[str] = []
    sizes = iter((50, 70, 70))
    found = foreseen("1xH100", load=9, step=51, evaluation=20, sample=81).forecast
    check = PeakCheck(found, notes.append, lambda: next(sizes) * GIB)
    check("evaluation")  # at the start of the run
    check("step")
    assert not notes
    check("sample")
    assert not notes
    check("end")
    assert (
        len(notes) == 1
        and f"wrong in sample: tensors took {70 * GIB:,} bytes" in notes[0]
        and f"{80 * GIB:,}" in notes[0]
    )


def test_a_process_on_the_cpu_is_not_compared():
    check = PeakCheck(foreseen("1xcpu", load=1, step=2).forecast, pytest.fail, lambda: 1)
    check("step")


def test_no_forecast_is_for_a_run_that_starts(tiny, mm):
    refused = mm("train", "--config", tiny, "--dry-run", "--no-forecast")
    assert refused.code == 1 and "--no-forecast is for a run that starts" in refused.err
