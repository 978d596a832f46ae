"""A DeepSpeed JSON file as it is: completed from the run, compared with it, accepted by DeepSpeed."""

import copy
import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import yaml
from json_cases import ACCEPTED, CASES, FOLDER, facts_of
from mm_deepspeed.config import DeepSpeedConfig
from mm_deepspeed.settings import Settings, completed

from mm_core.contracts import TrainingFacts
from mm_core.errors import ConfigError
from mm_core.schema.fields import ComponentConfig

WHERE = "engine.settings"


def faults_of(settings: dict[str, Any], name: str = "stage0") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        completed(settings, facts_of(name))
    return [fault.what for fault in caught.value.faults]


@pytest.mark.parametrize("name", CASES)
def test_a_json_file_is_accepted_by_deepspeed_or_refused_with_a_sentence(name: str, monkeypatch: Any) -> None:
    sentence, path = CASES[name], str(FOLDER / f"{name}.json")
    if sentence is not None:
        with pytest.raises(ConfigError) as caught:
            completed(DeepSpeedConfig(config=path).settings, facts_of(name))
        assert sentence in caught.value.render()
        return
    config = DeepSpeedConfig(config=path)
    assert config.config is None and config == DeepSpeedConfig(settings=config.settings)
    assert yaml.safe_load(yaml.safe_dump(config.settings)) == config.settings
    result = completed(config.settings, facts_of(name))
    assert "auto" not in json.dumps(result)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    deepspeed = pytest.importorskip("deepspeed", reason="the real DeepSpeedConfig judges the result")
    real = deepspeed.DeepSpeedConfig(copy.deepcopy(result))
    settings = Settings.of(config.settings)
    assert real.zero_optimization_stage == settings.stage
    assert (real.train_batch_size, real.gradient_accumulation_steps, real.gradient_clipping) == (6, 3, 1.0)
    assert real.bfloat16_config.enabled == (settings.dtype == "bf16")
    assert real.float16_config.enabled == (settings.dtype == "fp16")


def test_at_least_fourteen_of_twenty_files_run() -> None:
    assert sorted(p.stem for p in FOLDER.glob("*.json")) == sorted(CASES)
    assert len(CASES) == 20 and len(ACCEPTED) >= 14


def test_no_settings_are_stage_0_in_float32() -> None:
    found = Settings.of({})
    assert (found.stage, found.dtype, found.offload_optimizer, found.offload_param) == (0, "fp32", None, None)


def test_bf16_accumulates_gradients_in_float32_unless_the_json_decides() -> None:
    settings: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    assert completed(settings, facts_of())["data_types"] == {"grad_accum_dtype": "fp32"}
    settings["data_types"] = {"grad_accum_dtype": "bf16"}
    assert completed(settings, facts_of())["data_types"] == {"grad_accum_dtype": "bf16"}


def test_every_contradiction_is_named_with_both_places() -> None:
    found = faults_of(
        {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_type": "log"}},
        }
    )
    assert len(found) == 8
    assert f"{WHERE}.gradient_clipping is 0.5, but train.clip_grad_norm is 1.0" in found[3]
    assert f"{WHERE}.train_batch_size is 8" in found[0] and "train.micro_batch_size 2" in found[0]
    assert f"{WHERE}.optimizer.params.lr is 0.0003, but optimizer.lr is 0.001" in found[4]
    assert any("warmup_num_steps is 20, but lr_schedule.warmup_steps is 10" in fault for fault in found)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "which is core/adam, but"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}},
            "weight_decay is 0.01 by DeepSpeed's default, but optimizer.weight_decay is 0.0",
        ),
        ({"scheduler": {"type": "WarmupCosineLR", "params": {}}}, "which is core/cosine, but"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "which is core/one_cycle, but"),
    ],
)
def test_another_optimizer_or_schedule_than_the_runs_is_one_fault(
    section: dict[str, Any], expected: str
) -> None:
    (fault,) = faults_of(section)
    assert expected in fault


def of_schedule(kind: str, **options: Any) -> TrainingFacts:
    """A run with lr 1e-3 and this schedule."""
    return dataclasses.replace(
        facts_of(), lr_schedule=ComponentConfig("lr_schedule", f"core/{kind}", options)
    )


WARMUP = {"warmup_steps": 10, "warmup_fraction": None, "warmup_init": 1e-5, "warmup_type": "log"}
CYCLE = {"min_lr": 1e-4, "cycle_first_step_size": 9, "cycle_second_step_size": None, "decay_lr_rate": 0.5}
RISE = {"lr_range_test_step_size": 7, "lr_range_test_staircase": True}
SCHEDULES: dict[str, tuple[TrainingFacts, dict[str, Any], dict[str, tuple[Any, str]]]] = {
    "WarmupLR": (
        of_schedule("constant", **WARMUP),
        {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": 10},
        {
            "warmup_min_lr": (0, "lr_schedule.warmup_init is 1e-05"),
            "warmup_max_lr": (2e-3, "optimizer.lr is 0.001"),
            "warmup_num_steps": (1000, "lr_schedule.warmup_steps is 10"),
            "warmup_type": ("linear", "lr_schedule.warmup_type is log"),
        },
    ),
    "WarmupDecayLR": (
        of_schedule("warmup_decay", **WARMUP, min_lr=1e-5),
        {"warmup_min_lr": 1e-5, "total_num_steps": 100, "warmup_type": "log"},
        {
            "total_num_steps": (500, "the number of steps of the run is 100"),
            "warmup_type": ("linear", "lr_schedule.warmup_type is log"),
        },
    ),
    "OneCycle": (
        of_schedule("one_cycle", **CYCLE),
        {
            **{"cycle_min_lr": "1e-4", "cycle_max_lr": 1e-3, "cycle_momentum": False},
            **{"cycle_first_step_size": 9, "cycle_second_step_size": 9, "decay_lr_rate": 0.5},
        },
        {
            "cycle_min_lr": (1e-3, "lr_schedule.min_lr is 0.0001"),
            "cycle_max_lr": (1e-2, "optimizer.lr is 0.001"),
            "cycle_first_step_size": (2000, "lr_schedule.cycle_first_step_size is 9"),
            "cycle_second_step_size": (11, "lr_schedule.cycle_second_step_size is 9"),
            "decay_lr_rate": (0.0, "lr_schedule.decay_lr_rate is 0.5"),
            "cycle_momentum": (True, "a cycle of the momentum in lr_schedule is false"),
        },
    ),
    "LRRangeTest": (
        of_schedule("lr_range_test", **RISE),
        {"lr_range_test_min_lr": 1e-3, **RISE},
        {
            "lr_range_test_min_lr": (1e-5, "optimizer.lr is 0.001"),
            "lr_range_test_step_size": (2000, "lr_schedule.lr_range_test_step_size is 7"),
            "lr_range_test_staircase": (False, "lr_schedule.lr_range_test_staircase is true"),
        },
    ),
}
"""DeepSpeed's schedule -> a run, parameters that agree, and other values with what they contradict."""


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_section_agrees_with_the_run_or_each_difference_is_one_fault(kind: str) -> None:
    facts, equal, others = SCHEDULES[kind]
    completed({"scheduler": {"type": kind, "params": equal}}, facts)
    for name, (value, place) in others.items():
        with pytest.raises(ConfigError) as caught:
            completed({"scheduler": {"type": kind, "params": {**equal, name: value}}}, facts)
        (fault,) = caught.value.faults
        assert f"{WHERE}.scheduler.params.{name} is " in fault.what and f", but {place};" in fault.what


@pytest.mark.parametrize(
    ("kind", "facts", "sentence"),
    [
        (
            "WarmupLR",
            facts_of(),
            "warmup_type is log by DeepSpeed's default, but lr_schedule.warmup_type is linear",
        ),
        (
            "OneCycle",
            SCHEDULES["OneCycle"][0],
            "cycle_momentum is true by DeepSpeed's default, but a cycle of",
        ),
    ],
)
def test_an_absent_key_has_deepspeeds_default(kind: str, facts: TrainingFacts, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        completed({"scheduler": {"type": kind, "params": {}}}, facts)
    name = sentence.split()[0]
    completed({"scheduler": {"type": kind, "params": {name: "auto"}}}, facts)  # the run's own
    completed({}, facts)


def test_the_shape_of_no_warm_up_is_not_compared() -> None:
    facts = of_schedule("constant", **{**WARMUP, "warmup_steps": 0, "warmup_type": "linear"})
    completed({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}, facts)


def test_the_line_of_warmup_decay_ends_at_its_least_rate() -> None:
    facts = of_schedule("linear", **WARMUP, min_lr=0.0)
    with pytest.raises(ConfigError, match=r"warmup_min_lr is 1e-05, but lr_schedule.min_lr is 0.0"):
        completed({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 1e-5}}}, facts)


def test_adam_without_adam_w_mode_is_adamw() -> None:
    completed({"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}, facts_of())


def test_hidden_size_values_become_deepspeeds_defaults_with_a_note() -> None:
    settings = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    assert completed(settings, facts_of())["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    assert any("reduce_bucket_size is auto: 500000000" in note for note in Settings.of(settings).notes)


def test_a_later_change_of_the_file_changes_no_config(tmp_path: Any) -> None:
    file = tmp_path / "ds.json"
    file.write_text("{zero_optimization: {stage: 2}}")
    config = DeepSpeedConfig(config=str(file))
    file.write_text("{zero_optimization: {stage: 3}}")
    assert config.settings == {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{bf16: {enabled: true}, bf16: {enabled: false}}", "the key 'bf16' appears twice"),
        ("[1]", "it has no keys"),
        ("{bf16: ", "is not a DeepSpeed JSON file"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Any, text: str, expected: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ValueError, match=r"config .*ds\.json") as caught:
        DeepSpeedConfig(config=str(tmp_path / "ds.json"))
    assert expected in str(caught.value)


def test_a_pipe_is_not_waited_for(tmp_path) -> None:
    os.mkfifo(tmp_path / "ds.json")
    with pytest.raises(ValueError, match=r"config .*ds\.json is not a file"):
        DeepSpeedConfig(config=str(tmp_path / "ds.json"))


def test_a_missing_file_and_both_keys_are_refused() -> None:
    with pytest.raises(ValueError, match=r"config none\.json cannot be read"):
        DeepSpeedConfig(config="none.json")
    with pytest.raises(ValueError, match="both set"):
        DeepSpeedConfig(config="ds.json", settings={"bf16": {}})


def test_the_keys_are_judged_without_torch_and_deepspeed() -> None:
    code = (
        "import sys; from mm_deepspeed.config import DeepSpeedConfig; DeepSpeedConfig(settings={}); "
        "print([m for m in ('torch', 'deepspeed', 'hjson') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert result.stdout.strip() == "[]", result.stderr
