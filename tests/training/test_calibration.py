"""`--calibrate`: operators are measured on this machine, and later forecasts of any run have seconds."""

from __future__ import annotations

import json

import pytest
import torch

from mm_core.config.load import load_config
from mm_core.device.machines import this_machine
from mm_core.errors import MMError
from mm_core.plan import build_task, plan_shown
from mm_core.training.forecast import calibration
from mm_core.training.forecast.calibration import Factors, calibrate, factors_of, keep
from mm_core.training.forecast.meter import Meter, Work
from mm_core.training.forecast.seconds import of_call, roofline
from mm_core.training.forecast.study import Study


@pytest.fixture(autouse=True)
def kept_here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(calibration, "SECONDS", 1.0)


def test_larger_products_are_measured_to_take_longer():
    meter = Meter()
    with meter.phase("step"), meter.counting():
        for size in (32, 512):
            torch.mm(torch.ones(size, size), torch.ones(size, size))
    work = meter.phases["step"]["begin"].work
    found = calibrate(meter.calls, work, lambda one: one.flops / 1e11)
    small, large = sorted((one for one in work if one.name == "mm"), key=lambda one: one.flops)
    assert found.of(small, small.flops / 1e11) < found.of(large, large.flops / 1e11)
    assert "mm float32" in found.operators
    assert found.of(large, 1.0) == found.of(large, 2.0)  # its size was measured
    assert found.call > 0


def test_an_operator_that_was_not_measured_takes_what_the_median_one_takes():
    factors = Factors(
        1e-6, {"add float32": (1e-6, 2.0), "mul float32": (3e-6, 4.0), "mm float32": (2e-6, 3.0)}
    )
    assert factors.of(Work("elementwise", "mul", "float32", 0, 8), 1.0) == pytest.approx(4.0 + 3e-6)
    assert factors.of(Work("elementwise", "sub", "float32", 0, 8), 1.0) == pytest.approx(3.0 + 2e-6)
    assert Factors().of(Work("elementwise", "sub", "float32", 0, 8), 1.0) == 1.0


def test_points_of_several_sizes_give_a_line_and_others_start_at_a_call():
    a, b = calibration._line([(1e-4, 3e-4, 1.0), (1e-3, 2.1e-3, 1.0)])
    assert (a, b) == (pytest.approx(1e-4), pytest.approx(2.0))
    a, b = calibration._line([(1e-4, 3e-4, 1.0)])
    assert a + b * 1e-4 == pytest.approx(3e-4) and 0 < a < 1e-5
    assert calibration._line([(1e-9, 2e-6, 5.0)]) == (2e-6, 1.0)
    assert calibration._line([(1e-4, 3e-4, 1.0), (1e-3, 1e-4, 1.0)])[1] >= 0


def test_what_was_measured_is_kept_by_device_beside_what_was_before():
    assert factors_of("cpu") is None
    keep("cpu", Factors(1e-6, {"add float32": (1e-6, 2.0), "mul float32": (1e-6, 2.0)}))
    file = keep("cpu", Factors(2e-6, {"add float32": (3e-6, 4.0)}))
    assert factors_of("cpu") == Factors(2e-6, {"add float32": (3e-6, 4.0), "mul float32": (1e-6, 2.0)})
    assert factors_of("H100") is None
    keep("cpu", Factors(6e-6), "another model")
    assert factors_of("cpu", "another model").call == 6e-6
    assert factors_of("cpu", "a third").call == pytest.approx(4e-6)  # the median
    file.write_text("{")
    assert factors_of("cpu") is None


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(MMError, match=r"cpu.*cannot be written"):
        keep("cpu", Factors())


def test_a_calibrated_machine_has_seconds_for_later_runs(tiny):
    config = load_config(tiny, ["data.train.annotations=absent.json"])
    machine = this_machine(1, 1)
    plan, _ = plan_shown(config, 1, build_task(config, {}))
    assert Study(config, plan, machine, None, {}).forecast().seconds == {}
    measured = Study(config, plan, machine, None, {}).forecast(measure=True)
    assert measured.seconds["matmul"] > 0 and measured.seconds["host"] > 0
    assert Study(config, plan, machine, None, {}).forecast().seconds == measured.seconds
    twice = load_config(tiny, ["data.train.annotations=absent.json", "train.global_batch_size=16"])
    more, _ = plan_shown(twice, 1, build_task(twice, {}))
    assert sum(Study(twice, more, machine, None, {}).forecast().seconds.values()) > 1.5 * sum(
        measured.seconds.values()
    )


def test_on_a_processor_one_thing_follows_another():
    machine = this_machine(1, 2)
    factors = Factors(1e-5, {"add float32": (0.0, 1.0)})
    add = Work("elementwise", "add", "float32", 0, 10**8)
    gather = Work("communication", "_allgather_base_", "float32", 0, 10**8, group=2, span=2)
    found = roofline({add: 10, gather: 10}, {}, machine, False, factors)
    assert found["host"] == pytest.approx(20e-5)
    assert found["communication not hidden"] == pytest.approx(10 * of_call(gather, machine))


def test_the_command_measures_this_machine_alone(tiny, mm):
    refused = mm("train", "--config", tiny, "--dry-run", "--calibrate", "--on", "8xH100")
    assert refused.code == 1 and "--calibrate measures this machine" in refused.err
    refused = mm("train", "--config", tiny, "--calibrate")
    assert refused.code == 1 and "add --dry-run" in refused.err


@pytest.mark.slow
def test_the_command_keeps_what_it_measures(tiny, mm):
    words = ("train", "--config", tiny, "--dry-run", "--json", "data.train.annotations=absent.json")
    first = json.loads(mm(*words, "--calibrate").out)["forecast"]["step_seconds"]
    assert 0 < first == json.loads(mm(*words).out)["forecast"]["step_seconds"]
