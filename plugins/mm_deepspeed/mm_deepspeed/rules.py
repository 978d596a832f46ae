"""The keys of a DeepSpeed JSON file as a table: read, ignored with a note, or refused with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


_TRACKERS = Refused("is not taken over; use `log.trackers` of the YAML")
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
SPELT = {
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
    "round_robin_gradients": Ignored("with it, DeepSpeed mixes up which part of a parameter a rank holds"),
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
