"""TrainingArguments of Transformers, which LLaMA-Factory's YAML has too."""

from __future__ import annotations

from typing import Any

from mm_core.interchange import Drop, Key
from mm_trainers.rows import EXPORT, FASTER, LOGGING, OFF, RATE, SEED, Rows, drops, off, takes
from mm_trainers.values import OPTIMIZERS, TRANSFORMERS, always, norm, one_of, recompute, times, trackers

_AGAIN = "checkpointing=recompute_modules"
_EVAL = "held-out data are data.validation, and validation"


def _steps(value: Any) -> int:
    if value < 1:
        raise ValueError("a share of the run: write steps")
    return int(value)


_BATCH = {"per_device_train_batch_size": 8}
_RATE = {"learning_rate": 5e-05}
ARGUMENTS: Rows = (
    Key("output_dir", note="run.dir and run.name"),
    Drop("run_name", LOGGING),
    Key("per_device_train_batch_size", "train.micro_batch_size", absent=8),
    Key("gradient_accumulation_steps", "train.global_batch_size", times, "of one rank", absent=1, of=_BATCH),
    Key("num_train_epochs", "train.epochs", float, absent=3.0),
    Drop("max_steps", "epochs count", only=(-1, 0)),
    Key("max_steps", "train.steps"),
    Key("learning_rate", "optimizer.lr", float, absent=5e-05),
    Key("weight_decay", "optimizer.weight_decay", float, "ours is 0.01", absent=0.0),
    Key("adam_beta1", "optimizer.betas.0", float, absent=0.9),
    Key("adam_beta2", "optimizer.betas.1", float, absent=0.999),
    Key("adam_epsilon", "optimizer.eps", float),
    Key("optim", "optimizer.type", one_of(OPTIMIZERS, "adamw"), absent="adamw"),
    *off("", "arguments of another optimizer", "optim_args optim_target_modules"),
    Key("lr_scheduler_type", "lr_schedule.type", one_of(TRANSFORMERS, "constant"), absent="linear"),
    Key("lr_scheduler_kwargs.min_lr", "lr_schedule.min_lr", float),
    Drop("lr_scheduler_kwargs.min_lr_rate", OFF, only=(0,)),
    Key("lr_scheduler_kwargs.min_lr_rate", "lr_schedule.min_lr", times, "a share", of=_RATE),
    Drop("lr_scheduler_kwargs.num_cycles", OFF, only=(1, 0.5)),
    Drop("lr_scheduler_kwargs", OFF, only=(None, {})),
    Drop("warmup_*", "a constant rate has no warm-up there", given="lr_scheduler_type=constant"),
    Drop("warmup_ratio", OFF, only=(0,)),
    Key("warmup_ratio", "lr_schedule.warmup_fraction", float),
    Key("warmup_steps", note="lr_schedule.warmup_steps; below 1: warmup_fraction"),
    Key("max_grad_norm", "train.clip_grad_norm", norm, RATE, absent=1.0),
    Key("seed", "run.seed", note=SEED, absent=42),
    Drop("data_seed", "one seed for all"),
    *takes("", "", "full_determinism=run.deterministic save_total_limit=checkpoint.keep"),
    *(Key(kind, "engine.param_dtype", always(kind), only=(True,)) for kind in ("fp16", "bf16")),
    *drops("", "bf16 fp16", OFF),
    Key("tf32", "run.float32_matmul", lambda value: "high" if value else None),
    *takes("", "engine.", f"gradient_{_AGAIN} activation_{_AGAIN}", recompute),
    Drop("*_checkpointing_kwargs", FASTER),
    Key("deepspeed", note="engine: {type: deepspeed, config: FILE}"),
    Drop("fsdp*", "the engine fsdp2 spreads the model: engine.preset, offload_to_cpu"),
    Key("torch_compile", "engine.compile.modules", lambda value: "auto" if value else False),
    Key("save_steps", "checkpoint.every", _steps, absent=500),
    Drop("save_strategy", "checkpoints are by steps: checkpoint.every"),
    Key("logging_steps", "log.every", _steps, absent=500),
    Key("report_to", "log.trackers", trackers),
    *takes("dataloader_", "data.loader.", "num_workers=workers pin_memory"),
    Key("dataloader_drop_last", "data.loader.drop_last", note="ours is true", absent=False),
    Key("dataloader_prefetch_factor", "data.loader.prefetch", lambda value: value or 2),
    Key("group_by_length", "data.loader.group_by_length"),
    Drop("train_sampling_strategy", "random, as here", only=("random",)),
    Key("train_sampling_strategy", "data.loader.group_by_length", one_of({"group_by_length": True})),
    Key("eval_steps", note="validation.every"),
    *drops("", "eval_* per_device_eval_batch_size load_best_model_at_end metric_* batch_eval_*", _EVAL),
    *drops("", "greater_is_better prediction_loss_only include_for_metrics", _EVAL),
    *off("", "embeddings get no noise", "neftune_noise_alpha"),
    *off("", "the model's own loss", "label_smoothing_factor"),
    *off("", "a step's loss is the mean over all of its tokens", average_tokens_across_devices=True),
    *off("", "write train.micro_batch_size", "auto_find_batch_size parallelism_config"),
    *drops("", "do_train do_eval do_predict resume_from_checkpoint overwrite_output_dir", "as the command"),
    *drops("", "ignore_data_skip restore_callback_* save_only_model save_on_each_node", "a resume is exact"),
    *drops("", "logging_* log_* disable_tqdm project trackio_* include_* debug skip_memory_metrics", LOGGING),
    *drops("", "*_rank plot_loss", LOGGING),
    *drops("", "hub_* push_to_hub* enable_jit_checkpoint save_safetensors", EXPORT),
    *drops("", "ddp_* torch_* use_liger_kernel liger_kernel_config use_cache use_cpu", FASTER),
    *drops("", "dataloader_* accelerator_config bf16_full_eval fp16_full_eval", FASTER),
    *drops("", "remove_unused_columns label_names length_column_name", "rows are read by data.train"),
)
