"""The plugin's own table of DeepSpeed's keys."""

from typing import Any

import pytest
from mm_deepspeed.keys import KEYS, Refused, checked

HALF: dict[str, Any] = {"enabled": True}


def _zero(**values: Any) -> dict[str, Any]:
    return {"zero_optimization": values}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"bfloat16": HALF}, "bfloat16 is the old name of bf16"),
        ({"zero_optimization": True}, "zero_optimization is True, not a section"),
        (_zero(stage=4), "zero_optimization.stage is 4, not one of 0, 1, 2, 3"),
        ({"fp16": HALF, "bf16": HALF, **_zero(stage=1)}, "are both true; choose one"),
        ({"bf16": HALF}, "use zero_optimization.stage 1"),
        (_zero(offload_optimizer={"device": "cpu"}), "offload_optimizer does nothing at stage 0"),
        (_zero(stage=2, offload_param={"device": "cpu"}), "offload_param does nothing at stage 2"),
        (
            _zero(stage=2, offload_optimizer={"device": "nvme"}),
            "offload_optimizer.device nvme is not taken over",
        ),
        (_zero(stage=3, offload_param={"device": "nvme"}), "offload_param.device nvme is not taken over"),
        (_zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}), "ratio is not taken over"),
        (_zero(stage=2, reduce_bucket_size=0), "reduce_bucket_size is 0, but DeepSpeed needs 1"),
        (_zero(stage=3, stage3_module_granularity_threshold=9), "DeepSpeed fails in some models"),
        ({"communication_data_type": "fp16_scaled"}, "not one of fp32, fp16, bf16"),
        ({"gradient_predivide_factor": 4.0, **_zero(stage=2)}, "reduce_scatter is false"),
        (_zero(stage=3, mics_shard_size=8), "mics_shard_size is not taken over"),
        (_zero(stage=3, zero_quantized_weights=True), "ZeRO++ is not tested"),
        (_zero(stage=1, offload_optimizer={"devise": "cpu"}), "did you mean 'device'?"),
        ({"fp16": {"loss_scal": 1}}, "did you mean 'loss_scale'"),
        ({"optimizer": {"type": "AdamW", "params": {"beta": 1}}}, "did you mean 'betas'?"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}}, "not a parameter of WarmupLR"),
        ({"data_types": {"grad_accum": "fp32"}}, "did you mean 'grad_accum_dtype'?"),
        ({"gradient_clipping": "much"}, "gradient_clipping is 'much', not a number from 0"),
        ({"wandb": HALF}, "use `trackers:`"),
        ({"checkpoint": {"load_universal": True}}, "`mm import`"),
    ],
)
def test_a_key_that_does_nothing_or_harm_is_one_sentence(settings: dict[str, Any], expected: str) -> None:
    (fault,) = checked(settings)[1]
    assert expected in fault


@pytest.mark.parametrize("key", [key for key, rule in KEYS.items() if isinstance(rule, Refused)])
def test_a_refused_section_names_its_reason_and_is_dropped_when_off(key: str) -> None:
    (fault,) = checked({key: {"enabled": True}})[1]
    assert fault.startswith(f"{key} ") and len(fault.split()) > 4
    assert checked({key: {"enabled": False}}) == ({}, [], [])


def test_all_faults_are_found_at_once() -> None:
    faults = checked({"gradient_cliping": 1, "amp": HALF, **_zero(stage=2, overlap=True)})[1]
    assert len(faults) == 3


def test_numbers_as_text_become_numbers() -> None:
    kept, faults, _ = checked(_zero(stage="2", reduce_bucket_size="5e8"))
    assert not faults
    assert kept == _zero(stage=2, reduce_bucket_size=500_000_000)


def test_ignored_keys_share_one_note() -> None:
    kept, faults, notes = checked({"steps_per_print": 10, "wall_clock_breakdown": True})
    assert (kept, faults) == ({}, [])
    assert notes == ["steps_per_print, wall_clock_breakdown are ignored: the run logs its own steps"]
