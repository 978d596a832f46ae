"""The YAML of the newer FSDP2 runs: sections parallel, model, data, features, training, tools."""

from __future__ import annotations

from mm_core.interchange import Default, Differs, Drop, Key, Row
from mm_mindspeed.names import in_model
from mm_mindspeed.tables.converts import FASTER, drops, one_of, path, same, sharding, training, under
from mm_mindspeed.tables.engine import DTYPES, PLAIN
from mm_mindspeed.tables.language import LOSS, TOKENS

_SPREADING = "how tensors are spread over devices: fully_shard spreads them here, with the same numbers"
_NO_LORA = "training.lora.enable=none|false"
_NEW = "training.lora.enable=true training.lora.pretrained_lora_path=none|"
_TARGETS = ["q_proj", "k_proj", "v_proj"]
_BLOCKS = "the model's own blocks are wrapped and recomputed: memory, not numbers"
LENGTH = "dataset_param.basic_parameters.cutoff_len"
_CHUNKED = {True: "chunked", False: "auto"}
_INITS = {True: "kaiming", "true": "kaiming", "gaussian": "gaussian", "pissa": "pissa"}

_TRAINING = under(
    "training.",
    *training(0.0, "constant", 42),
    Default("micro_batch_size", "train.micro_batch_size", 1),
    Default("lr", "optimizer.lr", 5e-5),
    Key("gradient_accumulation_steps", note="with the ranks: train.global_batch_size"),
    Key("train_epochs", "train.epochs", float),
    Key("max_epochs", "train.epochs", float),
    Key("optimizer", "optimizer.type", one_of({"adamw": "adamw", "muon": "muon"})),
    Key("muon_momentum", "optimizer.momentum", float),
    Key("ns_steps", "optimizer.ns_steps"),
    Drop("matched_adamw_rms", "as here", only=(0.2,)),
    Key("lr_min", "lr_schedule.min_lr", float),
    Key("lr_start", "lr_schedule.warmup_init", float),
    Key("lr_warmup_ratio", "lr_schedule.warmup_fraction", float),
    Drop("lr_decay_ratio", "a schedule ends with the run", only=(1, 1.0)),
    Drop("clip_norm_type", "the L2 norm", only=(2, 2.0)),
    Key("use_deter_comp", "run.deterministic"),
    Key("enable_full_determinism", "run.deterministic"),
    Key("save_async", "checkpoint.async"),
    Key("load", note="init_from, or the model's folder, with its name: task.from_pretrained"),
    Drop("val_interval", "no validation", only=(0, None)),
    Drop("val_micro_batch_size", "evaluations use train.micro_batch_size"),
    Key("lora.enable", note="true: train.adapters, with the defaults below"),
    Drop("lora.*", "no adapter is trained: training.lora.enable is not true", given=_NO_LORA),
    Key("lora.rank", "train.adapters.0.rank"),
    Key("lora.alpha", "train.adapters.0.alpha", float),
    Key("lora.dropout", "train.adapters.0.dropout", float),
    Drop("lora.target_modules", "the adapter's files name them", given="training.lora.pretrained_lora_path"),
    Key("lora.target_modules", "train.adapters.0.targets"),
    Default("lora.rank", "train.adapters.0.rank", 8, given=_NEW),
    Default("lora.alpha", "train.adapters.0.alpha", 16.0, given=_NEW),
    Default("lora.target_modules", "train.adapters.0.targets", _TARGETS, given=_NEW),
    Key("lora.init_lora_weights", "train.adapters.0.init", one_of(_INITS)),
    Drop("lora.pretrained_lora_path", "none", only=(None, "")),
    Key("lora.pretrained_lora_path", "train.adapters.0.from", path),
    Differs("no_decay_modules", "weight decay by module: write train.parameter_groups"),
    Differs("no_decay_params", "weight decay by parameter: write train.parameter_groups"),
    Differs("lr_scaling_plan", "rates by module: write train.parameter_groups with lr_scale"),
    Differs("quantization_plan*", "there is no training in fp8 here"),
    Drop("plugin", "the task and data name what they need"),
    *drops("init_model_with_meta_device load_rank0_and_broadcast adam_fused clip_grad_foreach", FASTER),
    *drops("manual_gc* allow_hf32 load_format save_format load_strict ckpt_manager", FASTER),
)
_PARALLEL = under(
    "parallel.",
    Key("fully_shard_parallel_size", "engine.sharding_size", sharding),
    *drops("fsdp_plan.apply_modules fsdp_plan.ignored_modules recompute*", _BLOCKS),
    *under("fsdp_plan.", *DTYPES, *same(PLAIN, "engine")),
    Default("fsdp_plan.reduce_dtype", "engine.reduce_dtype", None, "param_dtype, as fully_shard does"),
    Key("fsdp_plan.cpu_offload", "engine.offload_to_cpu"),
    *drops("*pregather fsdp_plan.hook_modules", FASTER),
    Drop("context_parallel_size", "no code of theirs reads it"),
    Drop("ulysses_parallel_size", "each rank has its own samples", only=(1,)),
    Key("ulysses_parallel_size", "engine.context_parallel.size"),
    Drop("ring_attention_size", "each rank has its own samples", only=(1,)),
    Differs("ring_attention_size", "models of Transformers attend on one rank here"),
    *drops("tensor_parallel_size expert_*_size tp_plan* ep_plan* pipeline_parallel_size", _SPREADING),
)
_MODEL = under(
    "model.",
    Key("model_id", note="task.auto_class"),
    Key("model_name_or_path", "task.from_pretrained", path),
    Key("trust_remote_code", "task.trust_remote_code"),
    Key("freeze", "train.freeze", in_model),
    Drop("attn_implementation", "a kernel: set task.attn_implementation where it is installed"),
    *drops("gdn_implementation kda_implementation causal_conv1d_implementation skip_*_recompute", FASTER),
    *drops("use_grouped_expert_matmul enable_gradient_checkpointing recompute*", FASTER),
    Drop("activation_offload_plan*", FASTER),
    Key("enable_chunk_loss", "task.loss", one_of(_CHUNKED)),
    Drop("chunkloss_plan.*", "task.chunk_tokens"),
    Default("loss_cfg.loss_type", "", "default", TOKENS, given="features.loss_cfg.loss_type=none"),
    *LOSS,
)
_FEATURES = under(
    "features.",
    Drop("recompute*", _BLOCKS),
    Key("enable_chunk_loss", "task.loss", one_of(_CHUNKED)),
    Key("chunkloss_plan.chunk_size", "task.chunk_tokens"),
    Drop("chunkloss_plan.apply_module", "the model's own head"),
    Drop("loss_cfg.loss_type", "as the model computes it; see model.loss_cfg", only=("custom",)),
    *LOSS,
    Drop("enable_activation_offload", "off here too", only=(False,)),
    Key("enable_activation_offload", "engine.offload.activations", one_of({True: "cpu"})),
    Drop("activation_offload_plan*", "of the wrapped blocks"),
    *drops("*chunk*mbs* *ep_balance*", FASTER),
)

ONE_FILE: tuple[Row, ...] = (
    *_PARALLEL,
    *_MODEL,
    *_FEATURES,
    *_TRAINING,
    Drop("tools.*", "profiling: set `profile` where it is wanted"),
    Default(f"data.{LENGTH}", "data.train.max_length", 1024, "longer ones are cut"),
    Key("data.*", note="as data.json of conversations"),
)
"""Keys of the YAML of FSDP2 runs."""
