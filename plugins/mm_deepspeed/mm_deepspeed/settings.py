"""What a DeepSpeed JSON file sets, completed from the run and compared with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mm_core.contracts import TrainingFacts
from mm_core.errors import ConfigError
from mm_deepspeed.json_file import place_of, placed
from mm_deepspeed.keys import AUTO, checked, is_on, read, section

Device = Literal["cpu"]

_HIDDEN_SIZE = {
    "reduce_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
}
"""Keys that the Trainer fills from the model's hidden size -> DeepSpeed's defaults."""
_MOMENTUM = "a cycle of the momentum in lr_schedule"
_RATE, _INIT, _TYPE = "optimizer.lr", "lr_schedule.warmup_init", "lr_schedule.warmup_type"
_WARMUP: dict[str, tuple[str, ...]] = {
    "warmup_min_lr": (_INIT,),
    "warmup_max_lr": (_RATE,),
    "warmup_type": (_TYPE,),
}
_SCHEDULES: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "warmuplr": (("core/constant",), _WARMUP),
    "warmupdecaylr": (  # its line ends at the rate at which the warm-up begins
        ("core/warmup_decay", "core/linear"),
        {**_WARMUP, "warmup_min_lr": (_INIT, "lr_schedule.min_lr")},
    ),
    "warmupcosinelr": (("core/cosine",), {"warmup_type": (_TYPE,)}),
    "onecycle": (
        ("core/one_cycle",),
        {
            "cycle_min_lr": ("lr_schedule.min_lr",),
            "cycle_max_lr": (_RATE,),
            "cycle_momentum": (_MOMENTUM,),
        },
    ),
    "lrrangetest": (("core/lr_range_test",), {"lr_range_test_min_lr": (_RATE,)}),
}
"""DeepSpeed's schedule -> schedules of the run that match, and its parameters that keys of the run repeat."""
_DEFAULTS = {"warmup_type": "log", "cycle_momentum": True}
"""What DeepSpeed computes without a key, where schedules of the run are different."""
_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
"""DeepSpeed's defaults of Adam and AdamW."""
_RATIOS = {"warmup_min_ratio": "warmup_init", "cos_min_ratio": "min_lr"}


@dataclass(frozen=True)
class Settings:
    """What the engine reads from the keys of a DeepSpeed JSON file.

    Attributes:
        stage: stage of ZeRO, 0 to 3.
        dtype: of the parameters in forward and backward.
        offload_optimizer: where the optimizer's states are kept; None on the device.
        offload_param: where the parameters are kept; None on the device.
        grad_accum: dtype in which gradients are accumulated, None as DeepSpeed chooses.
        notes: sentences for the user: what is ignored, and what `auto` became.
    """

    stage: int
    dtype: Literal["fp32", "bf16", "fp16"]
    offload_optimizer: Device | None
    offload_param: Device | None
    grad_accum: str | None
    notes: tuple[str, ...]

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Settings:
        """Reads the settings; a ConfigError holds one fault for each key that is wrong."""
        kept, faults, notes = checked(settings)
        if faults:
            raise ConfigError([ConfigError(placed(settings, fault)) for fault in faults])
        zero = section(kept, "zero_optimization")
        offloads = [section(zero, key).get("device") for key in ("offload_optimizer", "offload_param")]
        dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
        if is_on(kept, "bf16"):
            dtype = "bf16"
        elif is_on(kept, "fp16"):
            dtype = "fp16"
        for name in ("bf16", "fp16"):
            if section(kept, name).get("enabled") == AUTO:
                notes.append(f"{name}.enabled is auto: {str(dtype == name).lower()} here")
        for key, value in _HIDDEN_SIZE.items():
            if zero.get(key) == AUTO:
                what = "DeepSpeed's default, as the engine knows no hidden size"
                notes.append(f"zero_optimization.{key} is auto: {value}, {what}")
        accum = section(kept, "data_types").get("grad_accum_dtype")
        if accum in (None, AUTO):
            accum = "fp32" if dtype == "bf16" else None
        optimizer, param = (None if d in (None, "none") else d for d in offloads)
        return cls(zero.get("stage", 0), dtype, optimizer, param, accum, tuple(notes))


def completed(settings: Mapping[str, Any], facts: TrainingFacts) -> dict[str, Any]:
    """The config that DeepSpeed gets: `auto` and absent keys from the run, without optimizer and schedule.

    Raises:
        ConfigError: settings that contradict the run, with both places named.
    """
    read_settings = Settings.of(settings)
    kept = checked(settings)[0]
    against = _Comparison(settings)
    micro, accumulation = facts.micro_batch_size, facts.accumulation
    product = micro * accumulation * facts.shares
    shares = (
        f"train.micro_batch_size {micro} x accumulation {accumulation} x {facts.shares} shares of the data"
    )
    of_run = {
        "train_batch_size": (product, f"{shares} is {product}"),
        "train_micro_batch_size_per_gpu": (micro, f"train.micro_batch_size is {micro}"),
        "gradient_accumulation_steps": (
            accumulation,
            f"train.global_batch_size makes {accumulation} micro-batches per step",
        ),
        "gradient_clipping": (
            facts.clip_grad_norm or 0.0,
            f"train.clip_grad_norm is {_spelt(facts.clip_grad_norm)}",
        ),
    }
    for key, (value, place) in of_run.items():
        against.compare(key, kept.get(key), value, place)
    _compare_optimizer(against, section(kept, "optimizer"), facts)
    _compare_schedule(against, section(kept, "scheduler"), facts)
    if against.faults:
        raise ConfigError([ConfigError(fault) for fault in against.faults])
    result = {k: v for k, v in kept.items() if k not in ("optimizer", "scheduler", "bf16", "fp16")}
    result = _without_auto(result)
    result.update({key: value for key, (value, _) in of_run.items()})
    zero = section(result, "zero_optimization")
    for key, default in _HIDDEN_SIZE.items():
        if section(kept, "zero_optimization").get(key) == AUTO:
            zero[key] = default
    result["zero_optimization"] = {**zero, "stage": read_settings.stage, "memory_efficient_linear": False}
    for dtype in ("bf16", "fp16"):
        if dtype in kept or read_settings.dtype == dtype:
            part = _without_auto(section(kept, dtype))
            result[dtype] = {**part, "enabled": read_settings.dtype == dtype}
    if read_settings.grad_accum:
        result["data_types"] = {**section(result, "data_types"), "grad_accum_dtype": read_settings.grad_accum}
    return {**result, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


class _Comparison:
    """Collects settings that are different from what the run's YAML fixes."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.faults: list[str] = []

    def fault(self, key: str, what: str) -> None:
        """Records a fault of a setting, with its place."""
        where = place_of(self.settings, key)
        self.faults.append(f"{where}: {key} {what}" if where else f"engine.settings.{key} {what}")

    def compare(self, key: str, found: Any, run: Any, place: str, note: str = "") -> None:
        """Records a fault unless the setting is absent, `auto` or equal to the run's value."""
        if found is None or found == AUTO or _same(found, run):
            return
        self.fault(key, f"is {_spelt(found)}{note}, but {place}; make them equal or write auto")


def _compare_optimizer(against: _Comparison, part: dict[str, Any], facts: TrainingFacts) -> None:
    kind, ours, params = part.get("type"), facts.optimizer, section(part, "params")
    if kind not in (None, AUTO):
        decoupled = kind.lower() == "adamw" or params.get("adam_w_mode", True) is not False
        meant = "core/adamw" if decoupled else "core/adam"
        name = kind if kind.lower() == "adamw" else f"{kind} with adam_w_mode {str(decoupled).lower()}"
        if ours.type != meant:
            against.fault(
                "optimizer.type",
                f"is {name}, which is {meant}, but optimizer.type is {ours.type}; "
                "make them equal or remove the section",
            )
            return
    for key in ("lr", "betas", "eps", "weight_decay"):
        value, found, note = ours.options.get(key), params.get(key), ""
        if params and key not in params:
            found, note = _ADAM.get(key), " by DeepSpeed's default"
            if key == "weight_decay" and params.get("torch_adam") is True and str(kind).lower() == "adamw":
                found = 0.01
        against.compare(f"optimizer.params.{key}", found, value, f"optimizer.{key} is {_spelt(value)}", note)
    for key, fixed in (("bias_correction", True), ("amsgrad", False)):
        against.compare(
            f"optimizer.params.{key}", params.get(key), fixed, f"the run computes with {_spelt(fixed)}"
        )
    place = f"train.clip_grad_norm is {_spelt(facts.clip_grad_norm)}"
    key, clip = "max_grad_norm", facts.clip_grad_norm or 0.0
    against.compare(f"optimizer.params.{key}", params.get(key), clip, place)


def _compare_schedule(against: _Comparison, part: dict[str, Any], facts: TrainingFacts) -> None:
    kind, ours, params = part.get("type"), facts.lr_schedule, section(part, "params")
    types, repeated = _SCHEDULES.get(str(kind).lower(), ((ours.type,), {}))
    if ours.type not in types:
        against.fault(
            "scheduler.type",
            f"is {kind}, which is {' or '.join(types)}, but lr_schedule.type is {ours.type}; "
            "make them equal or remove the section",
        )
        return
    options, lr = ours.options, facts.optimizer.options.get("lr")
    run = {_RATE: lr, _MOMENTUM: False, **{f"lr_schedule.{name}": value for name, value in options.items()}}
    for what in ("step_size", "stair_count"):  # null: as many as in the first half
        first, second = (f"lr_schedule.cycle_{half}_{what}" for half in ("first", "second"))
        if second in run and run[second] is None:
            run[second] = run[first]
    # DeepSpeed's names are also those of options that a schedule of ours takes over as they are.
    keys = {**{p: (f"lr_schedule.{p}",) for p in params}, **repeated}
    values = [(p, run[key], key) for p, own in keys.items() for key in own if key in run]
    fraction, warmup = options.get("warmup_fraction"), options.get("warmup_steps", 0)
    length = warmup if fraction is None else round(fraction * facts.steps)
    place = "lr_schedule.warmup_steps" if fraction is None else "the warm-up of lr_schedule.warmup_fraction"
    values.append(("warmup_num_steps", length, place))
    values.append(("total_num_steps", facts.steps, "the number of steps of the run"))
    for ratio, option in _RATIOS.items():
        if lr and option in options:
            values.append((ratio, options[option] / lr, f"lr_schedule.{option} / optimizer.lr"))
    for key, value, place in values:
        found, note = params.get(key), ""
        if key in repeated and key not in params and (key != "warmup_type" or length):
            found, note = _DEFAULTS.get(key), " by DeepSpeed's default"
        against.compare(f"scheduler.params.{key}", found, value, f"{place} is {_spelt(value)}", note)


def _without_auto(values: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping without `auto` and null: DeepSpeed's defaults hold."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value is not None and value != AUTO
    }


def _same(found: Any, run: Any) -> bool:
    if isinstance(found, (list, tuple)):
        whole = isinstance(run, (list, tuple)) and len(found) == len(run)
        return whole and all(map(_same, found, run))
    if isinstance(run, (bool, str)) or run is None:
        return bool(found == run)
    number = read(found, float)
    return number is not None and math.isclose(number, run, rel_tol=1e-6, abs_tol=0.0)


def _spelt(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
