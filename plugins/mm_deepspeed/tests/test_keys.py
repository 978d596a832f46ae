"""The plugin's own table of DeepSpeed's keys."""

import copy
from collections.abc import Iterator, Mapping
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
        ({"wandb": HALF}, "use `log.trackers`"),
        ({"checkpoint": {"load_universal": True}}, "`mm import`"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op is not taken over: gradients are averaged"),
        (
            {"sparse_gradients": True},
            "sparse_gradients is not taken over: DeepSpeed has no such code any more",
        ),
        ({"data_types": {"param_dtype": "fp16"}}, "data_types.param_dtype is not taken over"),
        (_zero(stage=3, module_granularity_threshold=9), "DeepSpeed fails in some models"),
        (
            _zero(stage=3, max_live_parameters=1, stage3_max_live_parameters=2),
            "max_live_parameters is another name of stage3_max_live_parameters, and both are set",
        ),
        (
            {"fp16": {"enabled": True, "auto_cast": True}, **_zero(stage=1)},
            "fp16.auto_cast is not taken over: batches have the model's dtype",
        ),
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


def fields_of(model: Any) -> Iterator[tuple[str, str | None]]:
    """Each field of a pydantic model of DeepSpeed, with its alias."""
    for name, field in model.model_fields.items():
        yield name, field.alias


def test_every_name_that_the_installed_deepspeed_has_for_a_key_is_known(monkeypatch: Any) -> None:
    """Fields and aliases of its own models, so a version with new ones fails here. It reads both as one."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed", reason="its models are asked")
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.zero import config, offload_config

    zero: Any = KEYS["zero_optimization"]
    for rules, model in (
        (zero, config.DeepSpeedZeroConfig),
        (zero["offload_param"], offload_config.DeepSpeedZeroOffloadParamConfig),
        (zero["offload_optimizer"], offload_config.DeepSpeedZeroOffloadOptimizerConfig),
        (KEYS["bf16"], precision_config.DeepSpeedBF16Config),
        (KEYS["fp16"], precision_config.DeepSpeedFP16Config),
    ):
        missing = {name for names in fields_of(model) for name in names if name} - rules.keys()
        assert not missing, f"{model.__name__}: {missing}"
    pairs = [(name, alias) for name, alias in fields_of(config.DeepSpeedZeroConfig) if alias]
    assert len(pairs) >= 9
    for name, alias in pairs:
        value = bool(config.DeepSpeedZeroConfig.model_fields[name].annotation is bool) or 7
        one, two = (checked(_zero(stage=3, **{key: value})) for key in (name, alias))
        assert one[0] == two[0] and len(one[1]) == len(two[1]) and len(one[2]) == len(two[2]), name
        if alias in one[0]["zero_optimization"]:
            assert getattr(config.DeepSpeedZeroConfig(**one[0]["zero_optimization"]), name) == value


class Asked(dict[str, Any]):
    """A config that notes each key that DeepSpeed looks up in it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.keys_asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.keys_asked.add(str(key))
        return super().__contains__(key)

    def __copy__(self) -> "Asked":
        return self


def test_every_key_that_the_installed_deepspeed_looks_up_is_known(monkeypatch: Any) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    deepspeed = pytest.importorskip("deepspeed", reason="it is asked what it looks up")
    for name in ("", "data_types", "checkpoint", "activation_checkpointing"):
        config = {"train_batch_size": 1, "checkpoint": {}, "data_types": {}, "activation_checkpointing": {}}
        asked = Asked(config[name] if name else config)
        deepspeed.DeepSpeedConfig({**config, name: asked} if name else asked)
        rules: Any = KEYS[name] if name else KEYS
        assert len(asked.keys_asked) > 2 and not asked.keys_asked - rules.keys()


@pytest.mark.parametrize("enabled", [False, "auto", None])
@pytest.mark.parametrize("bf16", [{"enabled": True}, {"enabled": "auto"}])
def test_what_a_section_asks_for_that_is_off_is_no_fault(enabled: Any, bf16: Mapping[str, Any]) -> None:
    """As in InternVL's files: `auto_cast` beside bf16, which computes."""
    fp16 = {"enabled": enabled, "auto_cast": True, "fp16_master_weights_and_grads": True, "loss_scale": 0}
    kept, faults, notes = checked({**_zero(stage=1), "fp16": fp16, "bf16": bf16})
    assert (faults, notes) == ([], []) and kept["fp16"] == {"enabled": enabled, "loss_scale": 0}
    settings = _zero(stage=3, offload_optimizer={"device": "none", "ratio": 0.5, "super_offload": True})
    assert checked(settings)[1] == []
    settings["zero_optimization"]["offload_optimizer"]["device"] = "cpu"
    assert len(checked(settings)[1]) == 2
    off = {**_zero(stage=1), "bf16": {"enabled": False, "bf16_master_weights_and_grads": True}}
    assert checked(off)[1] == []
    on = copy.deepcopy(off) | {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
    assert len(checked(on)[1]) == 1


@pytest.mark.parametrize("spelt", ["float32", "torch.float32", "fp32"])
def test_a_dtype_may_be_spelt_as_deepspeed_takes_it(spelt: str) -> None:
    settings = {"data_types": {"grad_accum_dtype": spelt}}
    assert checked(settings) == ({"data_types": {"grad_accum_dtype": "fp32"}}, [], [])


def test_a_section_that_is_none_is_one_fault_wherever_it_is() -> None:
    for key in ("fp16", "bf16", "zero_optimization"):
        (fault,) = checked({key: True})[1]
        assert "not a section with keys" in fault
    (fault,) = checked(_zero(stage=1, offload_optimizer=True))[1]
    assert "zero_optimization.offload_optimizer is True, not a section" in fault
