"""The keys of a DeepSpeed JSON file: accepted, ignored with a note, or refused with the reason.

DeepSpeed accepts an unknown key at the top level and many useless combinations silently;
here each is an error.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mm_core.errors import did_you_mean

AUTO = "auto"


@dataclass(frozen=True)
class Ignored:
    """A key that changes nothing here; `note` is shown once."""

    note: str


@dataclass(frozen=True)
class Refused:
    """A key that is an error unless it is switched off: false, null, `enabled: false` or a value of `off`."""

    why: str
    off: tuple[object, ...] = ()


@dataclass(frozen=True)
class Free:
    """A section whose keys are not checked here."""


@dataclass(frozen=True)
class Alias:
    """Another name that DeepSpeed has for the key `of` of the same section."""

    of: str


Rule = type | tuple[str, ...] | Ignored | Refused | Free | Alias | dict[str, Any]


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_TRACKERS = Refused("is not taken over; use `trackers:` of the YAML")
_MICS = Refused("is not taken over: MiCS is not tested with this engine; use stage 3", (-1,))
_ZEROPP = Refused("is not taken over: ZeRO++ is not tested with this engine; remove it", (1,))
_CURRICULUM = Refused("is not taken over: the YAML's `data:` decides which samples a step gets")
_OLD_OFFLOAD = Refused("is an old key; use the sections offload_optimizer and offload_param")
_PARALLEL = Refused("is not taken over: this engine shards data-parallel states only; use a ZeRO stage")
_MASTERS = Refused(
    "is not taken over: checkpoints need float32 masters; use offload_optimizer to save memory"
)

_REMOVED = Refused("is not taken over: DeepSpeed has no such code any more; remove it")
_DTYPES = ("fp32", "fp16", "bf16")
_SPELT = {
    **dict.fromkeys(("float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bfloat16", "torch.bfloat16"), "bf16"),
}
"""Other spellings of dtypes that DeepSpeed accepts."""

_NVME = "it serves NVMe, which is not taken over"
_OFFLOAD = {
    "device": ("none", "cpu", "nvme"),
    "nvme_path": Ignored(_NVME),
    "buffer_count": int,
    "pin_memory": bool,
}
_ZERO: dict[str, Rule] = {
    "round_robin_gradients": Ignored(
        "is off: with it, DeepSpeed mixes up which part of a parameter a rank holds"
    ),
    "stage": int,
    **_each(
        "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions "
        "overlap_comm stage3_use_all_reduce_for_fetch_params "
        "stage3_allgather_sequential ignore_unused_parameters log_trace_cache_warnings enable_sanity_checks",
        bool,
    ),
    **_each(
        "reduce_bucket_size allgather_bucket_size sub_group_size stage3_prefetch_bucket_size "
        "stage3_param_persistence_threshold stage3_model_persistence_threshold "
        "stage3_max_live_parameters stage3_max_reuse_distance",
        int,
    ),
    "stage3_module_granularity_threshold": Refused(
        "is not taken over: DeepSpeed fails in some models with it; remove it", (0,)
    ),
    "offload_param": {**_OFFLOAD, "buffer_size": int, "max_in_cpu": int},
    "offload_optimizer": {
        **_OFFLOAD,
        **_each("pipeline_read pipeline_write", Ignored(_NVME)),
        "fast_init": bool,
        "ratio": Refused("is not taken over: it needs DeepSpeed's own Adam; remove it", (1,)),
        "cpuadam_cores_perc": Ignored("the optimizer is the run's own"),
        "super_offload": Refused("is not taken over: SuperOffload is not tested with this engine"),
    },
    "memory_efficient_linear": Refused(
        "is not taken over: it replaces torch.nn.functional.linear for the whole process; remove it"
    ),
    **_each(
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint",
        Ignored("checkpoints are in mm_core's format"),
    ),
    **_each("cpu_offload cpu_offload_param cpu_offload_use_pin_memory", _OLD_OFFLOAD),
    **_each("mics_shard_size mics_hierarchical_params_gather", _MICS),
    **_each(
        "zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights "
        "zero_quantized_gradients zeropp_loco_param",
        _ZEROPP,
    ),
    "zenflow": Refused("is not taken over: ZenFlow delays updates, so steps are different from the run's"),
    "legacy_stage1": _REMOVED,
    "leaf_module": Refused("is not taken over: it serves mixtures of experts; remove it"),
    "compute_grad_norm": Ignored("the run logs the norm of gradients, so it is always computed"),
    "parameter_alignment": Ignored("parts of parameters are not padded"),
    "override_module_apply": Ignored("the run initialises the model"),
    "save_muon_momentum_buffer_in_memory": Ignored(_NVME),
}
_ZERO |= {key.removeprefix("stage3_"): Alias(key) for key in _ZERO if key.startswith("stage3_")}
del _ZERO["gather_fp16_weights_on_model_save"]  # DeepSpeed has it with the prefix only
KEYS: dict[str, Rule] = {
    **_each("train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps", int),
    **_each("gradient_clipping gradient_predivide_factor", float),
    **_each("prescale_gradients disable_allgather", bool),
    "optimizer": {"type": str, "params": Free(), "legacy_fusion": bool},
    "scheduler": {"type": str, "params": Free()},
    "zero_optimization": _ZERO,
    "bf16": {
        **_each("enabled immediate_grad_update check_grad_overflow", bool),
        **_each("bf16_master_weights_and_grads bf16_optimizer_states", _MASTERS),
    },
    "fp16": {
        "enabled": bool,
        "auto_cast": Refused("is not taken over: batches have the model's dtype; remove it"),
        "loss_scale": float,
        "consecutive_hysteresis": bool,
        **_each("initial_scale_power loss_scale_window hysteresis min_loss_scale", int),
        "fp16_master_weights_and_grads": _MASTERS,
        "opt_level": Refused("is a key of apex; remove it"),
    },
    "data_types": {
        "grad_accum_dtype": _DTYPES,
        **_each("param_dtype buffer_dtype keep_in_fp32_modules", Refused("is not taken over; use bf16")),
    },
    "communication_data_type": _DTYPES,
    "seq_parallel_communication_data_type": Ignored("it serves sequence parallelism"),
    "gradient_allreduce_op": Refused("is not taken over: gradients are averaged; remove it", ("mean",)),
    "managed_gradient_accumulation": Ignored("the run decides when a step ends"),
    "disable_python_gc": Ignored("Python's garbage collector stays as it is"),
    "vocabulary_size": Ignored("DeepSpeed only warns by it"),
    "zero_allow_untested_optimizer": Ignored("it is always on"),
    "zero_force_ds_cpu_optimizer": Ignored("the optimizer is the run's own, so it is always off"),
    "aio": Ignored(_NVME),
    "activation_checkpointing": _each(
        "partition_activations number_checkpoints contiguous_memory_optimization profile "
        "synchronize_checkpoint_boundary cpu_checkpointing",
        Ignored("the model's plan decides what is recomputed"),
    ),
    "checkpoint": {
        "load_universal": Refused("is not taken over: read such a folder with `mm import`"),
        **dict.fromkeys(
            [
                "tag_validation",
                "use_node_local_storage",
                "parallel_write",
                "checkpoint_serialization",
                "writer",
            ],
            Ignored("checkpoints are in mm_core's format"),
        ),
    },
    **_each(
        "steps_per_print wall_clock_breakdown memory_breakdown dump_state log_dist log_level timers",
        Ignored("the run logs its own steps"),
    ),
    "dataloader_drop_last": Ignored("`data.loader.drop_last` of the YAML decides"),
    "bfloat16": Refused("is the old name of bf16; rename the section"),
    "amp": Refused("is apex, which is not taken over; use bf16"),
    "torch_autocast": Refused("is not taken over; use bf16"),
    "sparse_attention": Refused("is not taken over: the model's own attention computes; remove it"),
    **_each(
        "pipeline tensor_parallel autotp expert_parallel sequence_parallel_size "
        "use_data_before_expert_parallelism",
        _PARALLEL,
    ),
    **_each("quantize_training sparse_gradients graph_harvesting", _REMOVED),
    "elasticity": Refused("is not taken over: resume at another world size with `--resume last`"),
    "eigenvalue": Refused("is not taken over: it serves DeepSpeed's quantisation only"),
    "progressive_layer_drop": Refused("is not taken over: the model's own forward decides"),
    "compression_training": Refused("is not taken over: the model is trained as it is"),
    "weight_quantization": Refused("is not taken over: it serves inference only"),
    **_each("curriculum_learning data_efficiency", _CURRICULUM),
    **_each("tensorboard wandb csv_monitor comet monitor_config", _TRACKERS),
    "flops_profiler": Refused("is not taken over: `--dry-run` prints the FLOPs of a step"),
    "comms_logger": Refused("is not taken over; use torch's profiler"),
    "autotuning": Refused("is not taken over: `--dry-run` prints the model states of each stage"),
    "hybrid_engine": Refused("is not taken over: it serves generation in DeepSpeed-Chat"),
    "compile": Refused("is not taken over: DeepCompile is not tested with this engine"),
    **_each("nebula datastates_ckpt", Refused("is not taken over: checkpoints are in mm_core's format")),
}

_ADAM = (
    "lr betas eps weight_decay torch_adam adam_w_mode bias_correction amsgrad "
    "fp32_optimizer_states max_grad_norm"
)
_WARMUP = "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration"
PARAMS: dict[str, dict[str, str]] = {
    "optimizer": {"Adam": _ADAM, "AdamW": _ADAM},
    "scheduler": {
        "WarmupLR": _WARMUP,
        "WarmupDecayLR": f"{_WARMUP} total_num_steps",
        "WarmupCosineLR": "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type "
        "last_batch_iteration",
        "OneCycle": "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
        "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom "
        "cycle_max_mom decay_mom_rate last_batch_iteration",
        "LRRangeTest": "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate "
        "lr_range_test_staircase last_batch_iteration",
    },
}
"""Section -> type -> the names of its `params`."""
_AT_LEAST_ONE = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.allgather_bucket_size",
    "fp16.loss_scale_window",
    "fp16.min_loss_scale",
)


def checked(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Reads the keys of a DeepSpeed JSON file.

    Returns:
        the settings that DeepSpeed gets, with numbers that are written as text (`5e8` in YAML) as numbers and
        without what is ignored or switched off; the faults; the notes. Faults and notes start with their key.
    """
    faults: list[str] = []
    notes: dict[str, list[str]] = {}
    kept = _section(settings, KEYS, "", faults, notes, _unused(settings))
    if not any(fault.startswith(("zero_optimization ", "zero_optimization.stage ")) for fault in faults):
        faults += _combinations(kept)
    faults += _params(kept)
    shown = [
        f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} ignored: {n}" for n, keys in notes.items()
    ]
    return kept, faults, shown


def section(settings: Mapping[str, Any], *path: str) -> dict[str, Any]:
    """The section at `path`, empty if it is absent or no section."""
    found: Any = settings
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}


def is_on(settings: Mapping[str, Any], dtype: str) -> bool:
    """Whether `bf16` or `fp16` is enabled; `auto` enables bf16 at stages 1 to 3 without fp16."""
    enabled = section(settings, dtype).get("enabled", False)
    if enabled == AUTO:
        stage = section(settings, "zero_optimization").get("stage", 0)
        return dtype == "bf16" and read(stage, int) in (1, 2, 3) and not is_on(settings, "fp16")
    return enabled is True


def _unused(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Sections that are switched off, each as the beginning of its keys: nothing in them is refused."""
    halves = [f"{dtype}." for dtype in ("bf16", "fp16") if not is_on(settings, dtype)]
    parts = (("zero_optimization", name) for name in ("offload_optimizer", "offload_param"))
    still = [part for part in parts if section(settings, *part).get("device") in (None, "none")]
    return (*halves, *(f"{'.'.join(part)}." for part in still))


def _section(
    values: Mapping[str, Any],
    rules: Mapping[str, Any],
    path: str,
    faults: list[str],
    notes: dict[str, list[str]],
    unused: Collection[str],
) -> dict[str, Any]:
    kept = {}
    for key, value in values.items():
        rule, name = rules.get(key), f"{path}{key}"
        if isinstance(rule, Alias):
            if rule.of in values:
                faults.append(f"{name} is another name of {rule.of}, and both are set; remove one")
                continue
            key, rule = rule.of, rules[rule.of]
        if rule is None:
            hint = did_you_mean(str(key), [k for k, r in rules.items() if not isinstance(r, Refused)])
            faults.append(f"{name} is not a key of DeepSpeed{f'; {hint}' if hint else ''}")
        elif isinstance(rule, Ignored):
            notes.setdefault(rule.note, []).append(name)
        elif isinstance(rule, Refused):
            if path not in unused and not _is_off(value, rule):
                faults.append(f"{name} {rule.why}")
        elif isinstance(rule, (dict, Free)):
            if isinstance(value, Mapping) and isinstance(rule, dict):
                kept[key] = _section(value, rule, f"{name}.", faults, notes, unused)
            elif isinstance(value, Mapping):
                kept[key] = dict(value)
            elif value is not None and not (isinstance(rule, Free) and value == AUTO):
                hint = '; write {"stage": 1}, 2 or 3' if key == "zero_optimization" else ""
                faults.append(f"{name} is {value!r}, not a section with keys{hint}")
        elif value == AUTO or value is None:
            kept[key] = value
        else:
            found = read(value, rule)
            if found is not None:
                kept[key] = found
            else:
                faults.append(f"{name} is {value!r}, not {_described(rule)}")
    return kept


def _is_off(value: Any, rule: Refused) -> bool:
    if isinstance(value, Mapping):
        return not value or value.get("enabled", True) is False
    return value is None or value is False or value == AUTO or (value is not True and value in rule.off)


def read(value: Any, rule: Any) -> Any:
    """The value as the rule's type, or None: numbers may be text, and whole numbers may be written 5e8."""
    if isinstance(rule, tuple):
        value = _SPELT.get(value, value) if isinstance(value, str) else value
        return value if value in rule else None
    if rule in (str, bool):
        return value if isinstance(value, rule) else None
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if not math.isfinite(number) or number < 0 or (rule is int and not number.is_integer()):
        return None
    return int(number) if rule is int else number


def _described(rule: Any) -> str:
    if isinstance(rule, tuple):
        return f"one of {', '.join(rule)}"
    return {str: "text", bool: "true or false", int: "a whole number from 0", float: "a number from 0"}[rule]


def _combinations(settings: Mapping[str, Any]) -> list[str]:
    """What DeepSpeed accepts, but what does nothing or computes something wrong."""
    zero, faults = section(settings, "zero_optimization"), []
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        return [f"zero_optimization.stage is {stage!r}, not one of 0, 1, 2, 3"]
    halves = [dtype for dtype in ("bf16", "fp16") if is_on(settings, dtype)]
    if len(halves) == 2:
        faults.append("fp16.enabled and bf16.enabled are both true; choose one, bf16 where the device has it")
    elif halves and stage == 0:
        reason = "DeepSpeed's half precision at stage 0 takes a false first step and scales wrongly"
        faults.append(f"{halves[0]}.enabled is true at stage 0: {reason}; use zero_optimization.stage 1")
    for key, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
        part, name = section(zero, key), f"zero_optimization.{key}"
        device = part.get("device") or "none"
        if device == AUTO:
            faults.append(f"{name}.device is auto: write none or cpu")
        elif device == "nvme":
            faults.append(
                f"{name}.device nvme is not taken over: checkpoints read states from memory; use cpu"
            )
        elif device != "none" and stage < lowest:
            faults.append(f"{name} does nothing at stage {stage}; it needs stage {lowest} or higher")
    for path in _AT_LEAST_ONE:
        *above, key = path.split(".")
        if section(settings, *above).get(key) == 0:
            faults.append(f"{path} is 0, but DeepSpeed needs 1 or more")
    factor = settings.get("gradient_predivide_factor")
    divided = settings.get("prescale_gradients") is True or factor not in (None, AUTO, 1)
    if divided and stage >= 2 and zero.get("reduce_scatter") is not False:
        name = "prescale_gradients" if factor in (None, AUTO, 1) else "gradient_predivide_factor"
        faults.append(f"{name} fails at stage {stage} unless zero_optimization.reduce_scatter is false")
    if stage == 0 and section(settings, "data_types").get("grad_accum_dtype") not in (None, AUTO, "fp32"):
        faults.append("data_types.grad_accum_dtype has no effect at stage 0; remove it or use stage 1")
    return faults


def _params(settings: Mapping[str, Any]) -> list[str]:
    """Types and parameters of an optimizer or schedule that the run cannot compare with its own."""
    faults = []
    for name, types in PARAMS.items():
        part = section(settings, name)
        kind, key = part.get("type"), "lr_schedule" if name == "scheduler" else name
        known = {known.lower(): params.split() for known, params in types.items()}
        if not part or kind == AUTO:
            continue
        if kind is None:
            faults.append(f"{name}.type is missing, one of {', '.join(types)}")
        elif kind.lower() not in known:
            use = f"the run's `{key}:` of the YAML computes: choose there and remove this section"
            faults.append(f"{name}.type {kind} is not taken over (only {', '.join(types)}); {use}")
        else:
            names = known[kind.lower()]
            for param in [p for p in section(part, "params") if p not in names]:
                hint = did_you_mean(str(param), names)
                faults.append(
                    f"{name}.params.{param} is not a parameter of {kind}{f'; {hint}' if hint else ''}"
                )
    return faults
