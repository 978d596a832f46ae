"""The YAML of the newer FSDP2 runs: sections parallel, model, data, features, training, tools."""

from __future__ import annotations

from mm_core.interchange import Default, Differs, Drop, Key, Row
from mm_mindspeed.names import in_model
from mm_mindspeed.tables.converts import dtype, norm, one_of, path, sharding
from mm_mindspeed.tables.language import LOSS

_FASTER = "it changes speed or memory, not what is computed"
_SPREADING = "how tensors are spread over devices: fully_shard spreads them here, with the same numbers"
_PLUGIN = "the task and data below name what they need"
_STATE = "checkpoints always hold everything; weights alone are loaded without the rest"
_BLOCKS = "the model's own blocks are wrapped and recomputed: memory, not numbers"
_FP8 = "there is no training in fp8 here"


def _under(prefix: str, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    return tuple(type(row)(**{**vars(row), "theirs": f"{prefix}.{row.theirs}"}) for row in rows)


_TRAINING: tuple[Row, ...] = (
    Key("training.micro_batch_size", "train.micro_batch_size"),
    Default("training.micro_batch_size", "train.micro_batch_size", 1),
    Key("training.gradient_accumulation_steps", note="with the ranks: train.global_batch_size"),
    Key("training.train_iters", "train.steps"),
    Key("training.train_epochs", "train.epochs", float),
    Key("training.max_epochs", "train.epochs", float),
    Key("training.lr", "optimizer.lr", float),
    Default("training.lr", "optimizer.lr", 5e-5),
    Key("training.weight_decay", "optimizer.weight_decay", float),
    Default("training.weight_decay", "optimizer.weight_decay", 0.0),
    Key("training.adam_beta1", "optimizer.betas.0", float),
    Default("training.adam_beta1", "optimizer.betas.0", 0.9),
    Key("training.adam_beta2", "optimizer.betas.1", float),
    Default("training.adam_beta2", "optimizer.betas.1", 0.999),
    Key("training.adam_eps", "optimizer.eps", float),
    Default("training.adam_eps", "optimizer.eps", 1e-8),
    Key("training.optimizer", "optimizer.type", one_of({"adamw": "adamw", "muon": "muon"})),
    Key("training.muon_momentum", "optimizer.momentum", float),
    Key("training.ns_steps", "optimizer.ns_steps"),
    Drop("training.matched_adamw_rms", "as here", only=(0.2,)),
    Key(
        "training.lr_decay_style",
        "lr_schedule.type",
        one_of({each: each for each in ("constant", "linear", "cosine")}),
    ),
    Default("training.lr_decay_style", "lr_schedule.type", "constant"),
    Key("training.lr_min", "lr_schedule.min_lr", float),
    Key("training.lr_start", "lr_schedule.warmup_init", float),
    Key("training.lr_warmup_ratio", "lr_schedule.warmup_fraction", float),
    Drop("training.lr_decay_ratio", "a schedule ends with the run", only=(1, 1.0)),
    Key("training.clip_grad", "train.clip_grad_norm", norm, "0 is off, which is null here"),
    Default("training.clip_grad", "train.clip_grad_norm", 1.0),
    Drop("training.clip_norm_type", "the L2 norm", only=(2, 2.0)),
    Key("training.seed", "run.seed", note="other random numbers than theirs"),
    Default("training.seed", "run.seed", 42),
    Key("training.use_deter_comp", "run.deterministic"),
    Key("training.enable_full_determinism", "run.deterministic"),
    Drop("training.save", "the run's folder: run.dir", only=(None,)),
    Key("training.save", "run.dir", path),
    Key("training.save_interval", "checkpoint.every"),
    Key("training.log_interval", "log.every"),
    Key("training.save_async", "checkpoint.async_"),
    Drop("training.load", "the model's folder", only=(None,)),
    Key("training.load", note="the weights to begin with: those of task.from_pretrained"),
    Drop("training.val_interval", "no validation", only=(0, None)),
    Drop("training.val_micro_batch_size", "evaluations use train.micro_batch_size"),
    Drop("training.lora.enable", "see the other keys of lora"),
    Key("training.lora.rank", "train.adapters.0.rank"),
    Key("training.lora.alpha", "train.adapters.0.alpha", float),
    Key("training.lora.dropout", "train.adapters.0.dropout", float),
    Key("training.lora.target_modules", "train.adapters.0.targets"),
    Key(
        "training.lora.init_lora_weights",
        "train.adapters.0.init",
        one_of({True: "kaiming", "true": "kaiming", "gaussian": "gaussian", "pissa": "pissa"}),
    ),
    Key("training.lora.pretrained_lora_path", "train.adapters.0.from", path),
    Differs("training.no_decay_modules", "weight decay by module: write train.parameter_groups"),
    Differs("training.no_decay_params", "weight decay by parameter: write train.parameter_groups"),
    Differs("training.lr_scaling_plan", "rates by module: write train.parameter_groups with lr_scale"),
    Differs("training.quantization_plan*", _FP8),
    *(Drop(f"training.no_{name}", _STATE) for name in ("load_optim", "load_rng", "save_optim", "save_rng")),
    Drop("training.plugin", _PLUGIN),
    *(
        Drop(f"training.{name}", _FASTER)
        for name in (
            *("init_model_with_meta_device", "load_rank0_and_broadcast", "adam_fused", "clip_grad_foreach"),
            *("manual_gc*", "allow_hf32", "load_format", "save_format", "load_strict", "ckpt_manager"),
        )
    ),
)

_PARALLEL: tuple[Row, ...] = (
    Key("parallel.fully_shard_parallel_size", "engine.sharding_size", sharding),
    Drop("parallel.fsdp_plan.apply_modules", _BLOCKS),
    Drop("parallel.fsdp_plan.ignored_modules", _BLOCKS),
    Key("parallel.fsdp_plan.param_dtype", "engine.param_dtype", dtype),
    Key("parallel.fsdp_plan.reduce_dtype", "engine.reduce_dtype", dtype),
    Default(
        "parallel.fsdp_plan.reduce_dtype", "engine.reduce_dtype", None, "param_dtype, as fully_shard does"
    ),
    Key("parallel.fsdp_plan.output_dtype", "engine.output_dtype", dtype),
    Key("parallel.fsdp_plan.cast_forward_inputs", "engine.cast_forward_inputs"),
    Key("parallel.fsdp_plan.reshard_after_forward", "engine.reshard_after_forward"),
    Key("parallel.fsdp_plan.num_to_forward_prefetch", "engine.num_to_forward_prefetch"),
    Key("parallel.fsdp_plan.num_to_backward_prefetch", "engine.num_to_backward_prefetch"),
    Key("parallel.fsdp_plan.cpu_offload", "engine.offload_to_cpu"),
    Drop("parallel.*pregather", _FASTER),
    Drop("parallel.fsdp_plan.hook_modules", _FASTER),
    Drop("parallel.context_parallel_size", "no code of theirs reads it"),
    Drop("parallel.ulysses_parallel_size", "each rank has its own samples", only=(1,)),
    Key("parallel.ulysses_parallel_size", "engine.context_parallel.size"),
    Drop("parallel.ring_attention_size", "each rank has its own samples", only=(1,)),
    Differs("parallel.ring_attention_size", "models of Transformers attend on one rank here"),
    *(
        Drop(f"parallel.{name}", _SPREADING)
        for name in (
            "tensor_parallel_size",
            "expert_*_size",
            "tp_plan*",
            "ep_plan*",
            "pipeline_parallel_size",
        )
    ),
    Drop("parallel.recompute*", _BLOCKS),
)

_MODEL: tuple[Row, ...] = (
    Key("model.model_id", note="task.auto_class"),
    Key("model.model_name_or_path", "task.from_pretrained", path),
    Key("model.trust_remote_code", "task.trust_remote_code"),
    Key("model.freeze", "train.freeze", in_model),
    Drop("model.attn_implementation", "a kernel: set task.attn_implementation where it is installed"),
    *(
        Drop(f"model.{name}", _FASTER)
        for name in (
            *("gdn_implementation", "kda_implementation", "causal_conv1d_implementation", "skip_*_recompute"),
            *("use_grouped_expert_matmul", "enable_gradient_checkpointing", "recompute*"),
            "activation_offload_plan*",
        )
    ),
    Key("model.enable_chunk_loss", "task.loss", one_of({True: "chunked", False: "auto"})),
    Drop("model.chunkloss_plan.*", "task.chunk_tokens"),
    *_under("model", LOSS),
)

_FEATURES: tuple[Row, ...] = (
    Drop("features.recompute*", _BLOCKS),
    Key("features.enable_chunk_loss", "task.loss", one_of({True: "chunked", False: "auto"})),
    Key("features.chunkloss_plan.chunk_size", "task.chunk_tokens"),
    Drop("features.chunkloss_plan.apply_module", "the model's own head"),
    Drop("features.loss_cfg.loss_type", "as the model computes it; see model.loss_cfg", only=("custom",)),
    *_under("features", LOSS),
    Drop("features.enable_activation_offload", "off here too", only=(False,)),
    Key("features.enable_activation_offload", "engine.offload.activations", one_of({True: "cpu"})),
    Drop("features.activation_offload_plan*", "of the wrapped blocks"),
    Drop("features.*chunk*mbs*", _FASTER),
    Drop("features.*ep_balance*", _FASTER),
)

ONE_FILE: tuple[Row, ...] = (
    *_PARALLEL,
    *_MODEL,
    *_FEATURES,
    *_TRAINING,
    Drop("tools.*", "profiling: set `profile` where it is wanted"),
    Key("data.*", note="as data.json of conversations"),
)
"""Keys of the YAML of FSDP2 runs."""
