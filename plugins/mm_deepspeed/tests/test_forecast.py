"""The forecast of a run with DeepSpeed: its own states and buffers, with the activations of a stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from mm_deepspeed.engine import DeepSpeedEngine

from mm_core.config.load import load_config
from mm_core.device.machines import machine_of
from mm_core.plan import build_task, plan_shown
from mm_core.training.forecast.forecast import Forecast
from mm_core.training.forecast.study import Study
from support.runs import DIT, VIDEO
from support.scripts import script

ZERO = "engine.settings.zero_optimization."
GIB = 2**30


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML of a run on rendered clips."""
    document = {
        "run": {"name": "run"},
        "task": {**VIDEO, "predictor": {"type": "custom_dit", **DIT, "num_layers": 2}},
        "data": {
            "train": {"type": "shapes", "num_frames": 8, "height": 16, "width": 16, "clips": 32},
            "loader": {"workers": 0},
        },
        "optimizer": {"type": "adamw", "lr": 2e-3},
        "lr_schedule": {"type": "constant"},
        "train": {"steps": 18, "micro_batch_size": 2},
    }
    path = tmp_path_factory.mktemp("configs") / "run.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def forecast_of(path: Path, *overrides: str, engine: str = "deepspeed") -> Forecast:
    config = load_config(path, [f"engine.type={engine}", *overrides])
    on = machine_of("2xH100")
    plan, samples = plan_shown(config, on.world, build_task(config, {}))
    return Study(config, plan, on, samples, {}).forecast()


def buffers(stage: int, **keys: Any) -> dict[str, dict[str, int]]:
    from mm_core.testing.training.engines.task import task_on_meta

    settings = {"zero_optimization": {"stage": stage, **keys}}
    engine = DeepSpeedEngine(settings=settings)
    return engine.buffers(engine.plan(task_on_meta(), 2, 2.0))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_has_the_stages_states_and_the_activations_of_fsdp2(tiny: Path, stage: int) -> None:
    found = forecast_of(tiny, f"{ZERO}stage={stage}")
    other = forecast_of(tiny, engine="fsdp2")
    assert [need.phase for need in found.needs] == ["load", "step"]
    parts, same = found.needs[1].parts, other.needs[1].parts
    blocks = "activations of predictor.blocks.*"
    assert parts[blocks] == pytest.approx(same[blocks], rel=0.01)
    shards = 2 if stage else 1
    task = build_task(load_config(tiny), {})
    trained = sum(p.numel() for p in task.get_submodule("predictor").parameters())
    assert parts["optimizer"] == pytest.approx(8 * trained / shards, rel=0.05)
    masters = 4 * trained / 2 if stage else 0
    assert parts["parameters"] == pytest.approx(masters + 4 * trained / (2 if stage == 3 else 1), rel=0.05)
    assert found.seconds and found.scale.sent


def test_a_bucket_of_deepspeeds_size_is_counted(tiny: Path) -> None:
    usual = forecast_of(tiny, f"{ZERO}stage=2").needs[1]
    small = forecast_of(tiny, f"{ZERO}stage=2", f"{ZERO}reduce_bucket_size=1000").needs[1]
    assert usual.parts["bucket"] == 4 * 500_000_000 and small.parts["bucket"] == 4000
    assert usual.device_bytes - small.device_bytes == pytest.approx(1.03 * (4 * 500_000_000 - 4000))


def test_buffers_are_those_of_the_keys() -> None:
    one = buffers(2, reduce_bucket_size=1000)["backward"]["bucket"]
    assert buffers(2, reduce_bucket_size=1000, overlap_comm=True)["backward"]["bucket"] == 2 * one == 8000
    gathered = buffers(3, stage3_max_live_parameters=10)["backward"]["gathered weights"]
    assert gathered == 40 < buffers(3)["backward"]["gathered weights"]
    assert "flat gradients" in buffers(1)["update"]
    offloaded = buffers(2, offload_optimizer={"device": "cpu"})
    assert "flat gradients" not in offloaded["update"]


def test_states_on_the_host_are_not_on_the_device(tiny: Path) -> None:
    stage = (f"{ZERO}stage=2", f"{ZERO}reduce_bucket_size=1000")
    device, host = (
        forecast_of(tiny, *stage, *more).needs[1] for more in ((), (f"{ZERO}offload_optimizer.device=cpu",))
    )
    assert host.host_bytes > device.host_bytes == 0
    assert host.device_bytes < device.device_bytes and "optimizer" not in host.parts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dit, ZeRO 2, 2 ranks", "wan, ZeRO 3 in bf16, 2 ranks"])
def test_the_predicted_peak_is_what_the_ranks_allocate(tmp_path: Path, name: str) -> None:
    benchmark = script("benchmarks/plan.py")
    benchmark.prepare(tmp_path)
    case = next(each for each in benchmark.OTHERS if each.name == name)
    expected, measured = benchmark.predicted(case, tmp_path), benchmark.allocated(case, tmp_path)
    assert abs(expected["training"] / measured["training"] - 1) <= benchmark.BAR_OF_OTHERS
