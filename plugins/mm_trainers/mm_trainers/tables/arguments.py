"""TrainingArguments of Transformers, which LLaMA-Factory's YAML has too."""

from __future__ import annotations

from typing import Any

from mm_core.interchange import Drop, Key, Row
from mm_trainers.common import EXPORT, FASTER, LOGGING, OFF, drops, known, norm, off, one_of, recompute, words

OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit", "adamw_torch_npu_fused"), "adamw"),
}
SCHEDULES = {
    **{"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"},
    **{"cosine_with_min_lr": "cosine", "cosine_with_restarts": "cosine"},
}
_EVAL = "held-out data are data.validation, and validation"


def _trackers(value: Any) -> list[str]:
    known = ("tensorboard", "wandb", "mlflow")
    return list(known) if value == "all" else [word for word in words(value) if word in known]


def _steps(value: Any) -> int:
    if value < 1:
        raise ValueError("a share of the run: write steps")
    return int(value)


ARGUMENTS: tuple[Row, ...] = (
    Key("output_dir", note="run.dir and run.name"),
    Drop("run_name", LOGGING),
    *known("per_device_train_batch_size", "train.micro_batch_size", 8),
    Key("gradient_accumulation_steps", note="with the batch size and the ranks: train.global_batch_size"),
    *known("num_train_epochs", "train.epochs", 3.0, float),
    Drop("max_steps", "epochs count", only=(-1, 0)),
    Key("max_steps", "train.steps"),
    *known("learning_rate", "optimizer.lr", 5e-05, float),
    *known("weight_decay", "optimizer.weight_decay", 0.0, float, absent="ours is 0.01"),
    *known("adam_beta1", "optimizer.betas.0", 0.9, float),
    *known("adam_beta2", "optimizer.betas.1", 0.999, float),
    Key("adam_epsilon", "optimizer.eps", float),
    *known("optim", "optimizer.type", "adamw", one_of(OPTIMIZERS, "adamw")),
    *off("", "arguments of another optimizer", optim_args=None, optim_target_modules=None),
    *known("lr_scheduler_type", "lr_schedule.type", "linear", one_of(SCHEDULES, "constant")),
    Key("lr_scheduler_kwargs.min_lr", "lr_schedule.min_lr", float),
    Key("lr_scheduler_kwargs.min_lr_rate", note="lr_schedule.min_lr: the share of the rate"),
    Drop("lr_scheduler_kwargs.num_cycles", OFF, only=(1, 0.5)),
    Drop("lr_scheduler_kwargs", OFF, only=(None, {})),
    Key("warmup_ratio", "lr_schedule.warmup_fraction", float),
    Key("warmup_steps", note="lr_schedule.warmup_steps; below 1: warmup_fraction"),
    *known("max_grad_norm", "train.clip_grad_norm", 1.0, norm, note="0 is off, which is null here"),
    *known("seed", "run.seed", 42, note="other random numbers than theirs"),
    Drop("data_seed", "one seed for all"),
    Key("full_determinism", "run.deterministic"),
    Key("bf16", note="engine.param_dtype"),
    Key("fp16", note="engine.param_dtype"),
    Key("tf32", "run.float32_matmul", lambda value: "high" if value else None),
    Key("gradient_checkpointing", "engine.recompute_modules", recompute),
    Key("activation_checkpointing", "engine.recompute_modules", recompute),
    *drops("", "gradient_checkpointing_kwargs activation_checkpointing_kwargs", FASTER),
    Key("deepspeed", note="engine: {type: deepspeed, config: FILE}"),
    Drop("fsdp*", "the engine fsdp2 spreads the model: engine.preset, offload_to_cpu"),
    Key("torch_compile", "engine.compile.modules", lambda value: "auto" if value else False),
    *known("save_steps", "checkpoint.every", 500, _steps),
    Key("save_total_limit", "checkpoint.keep"),
    Drop("save_strategy", "checkpoints are by steps: checkpoint.every"),
    *known("logging_steps", "log.every", 500, _steps),
    Key("report_to", "log.trackers", _trackers),
    Key("dataloader_num_workers", "data.loader.workers"),
    Key("dataloader_pin_memory", "data.loader.pin_memory"),
    *known("dataloader_drop_last", "data.loader.drop_last", False, absent="ours is true"),
    Key("dataloader_prefetch_factor", "data.loader.prefetch", lambda value: value or 2),
    Key("group_by_length", "data.loader.group_by_length"),
    Drop("train_sampling_strategy", "random, as here", only=("random",)),
    Key("train_sampling_strategy", "data.loader.group_by_length", one_of({"group_by_length": True})),
    Key("eval_steps", note="validation.every"),
    *drops("", "eval_* per_device_eval_batch_size load_best_model_at_end metric_*", _EVAL),
    *drops("", "greater_is_better prediction_loss_only include_for_metrics batch_eval_*", _EVAL),
    *off("", "embeddings get no noise", neftune_noise_alpha=None),
    *off("", "the model's own loss", label_smoothing_factor=0.0),
    *off("", "a step's loss is the mean over all of its tokens", average_tokens_across_devices=True),
    *off("", "write train.micro_batch_size", auto_find_batch_size=False, parallelism_config=None),
    *drops("", "do_train do_eval do_predict resume_from_checkpoint overwrite_output_dir", "as the command"),
    *drops("", "ignore_data_skip restore_callback_* save_only_model save_on_each_node", "a resume is exact"),
    *drops("", "logging_* log_* disable_tqdm project trackio_* include_*", LOGGING),
    *drops("", "debug skip_memory_metrics *_rank plot_loss", LOGGING),
    *drops("", "hub_* push_to_hub* enable_jit_checkpoint save_safetensors", EXPORT),
    *drops("", "ddp_* torch_* use_liger_kernel liger_kernel_config use_cache use_cpu", FASTER),
    *drops("", "dataloader_* accelerator_config bf16_full_eval fp16_full_eval", FASTER),
    *drops("", "remove_unused_columns label_names length_column_name", "rows are read by data.train"),
)
