"""musubi-tuner's flags, and its TOML of datasets."""

from __future__ import annotations

from mm_core.interchange import Differs, Drop, Key, Row
from mm_trainers.common import (
    CACHE,
    DTYPE,
    EXPORT,
    FASTER,
    LOGGING,
    OFF,
    SAMPLING,
    drops,
    known,
    norm,
    off,
    one_of,
    recompute,
    words,
)

OPTIMIZERS = {
    **{
        "": "adamw",
        "adamw": "adamw",
        "torch.optim.adamw": "adamw",
        "adam": "adam",
        "torch.optim.adam": "adam",
    },
    **{"adamw8bit": "adamw_8bit", "bitsandbytes.optim.adamw8bit": "adamw_8bit"},
    "bitsandbytes.optim.pagedadamw8bit": "adamw_8bit",
}
SCHEDULES = {
    **{"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"},
    **{"cosine_with_restarts": "cosine", "cosine_with_min_lr": "cosine", "polynomial": "polynomial"},
}
_EPOCHS = "checkpoints and samples are by steps: checkpoint.every, validation.every"
_SCHEDULE = "a schedule of its own: lr_schedule has those that are known here"
_CONTROL = "a table names pictures and clips of control by row: columns.fields of a source"
_FRAMEPACK = "of FramePack, which is not trained here"
_EXTRACTION = "several clips of one video: cut the videos before, or write a row for each"


def _trackers(value: object) -> list[str]:
    return ["tensorboard", "wandb"] if value == "all" else words(value)


_MODEL = "task model_version edit edit_plus dit dit_high_noise vae t5 clip text_encoder"
_FILES = "text_encoder1 text_encoder2 byt5 image_encoder"

FLAGS: tuple[Row, ...] = (
    Key("--dataset_config", note="the TOML of datasets, below"),
    Differs("--config_file", "write its flags into the command"),
    *(Key(f"--{name}", note="which model") for name in (*_MODEL.split(), *_FILES.split())),
    Key("--timestep_boundary", note="task.predictor.boundary, where both experts are trained"),
    *known("--learning_rate", "optimizer.lr", 2e-06, float),
    *known("--optimizer_type", "optimizer.type", "adamw", one_of(OPTIMIZERS, "adamw")),
    Key("--optimizer_args", note="optimizer: weight_decay, betas, eps"),
    *known("--lr_scheduler", "lr_schedule.type", "constant", one_of(SCHEDULES, "constant")),
    Key("--lr_warmup_steps", note="lr_schedule.warmup_steps; below 1: warmup_fraction"),
    Key("--lr_scheduler_power", "lr_schedule.power", float),
    Key("--lr_scheduler_min_lr_ratio", note="lr_schedule.min_lr"),
    *off("--", _SCHEDULE, lr_scheduler_num_cycles=1, lr_decay_steps=0, lr_scheduler_type=""),
    *off("--", _SCHEDULE, lr_scheduler_timescale=None, lr_scheduler_args=None),
    *known("--max_train_steps", "train.steps", 1600),
    Key("--max_train_epochs", note="train.epochs, in the place of steps"),
    Key("--gradient_accumulation_steps", note="with batch_size and ranks: train.global_batch_size"),
    *known("--max_grad_norm", "train.clip_grad_norm", 1.0, norm, note="0 is off, which is null here"),
    Key("--seed", "run.seed", note="other random numbers than theirs"),
    Key("--mixed_precision", "engine.param_dtype", DTYPE),
    Drop("--gradient_checkpointing_cpu_offload", FASTER),
    Key("--gradient_checkpointing", "engine.recompute_modules", recompute),
    Key("--timestep_sampling", note="task.scheduler: timesteps and shift"),
    Key("--weighting_scheme", note="task.scheduler.timesteps, where timestep_sampling is sigma"),
    Key("--discrete_flow_shift", note="task.scheduler.shift"),
    *(Key(f"--{name}", note="task.scheduler") for name in ("sigmoid_scale", "logit_*", "mode_scale")),
    Key("--min_timestep", note="task.scheduler.max_timestep_boundary: theirs counts from clean"),
    Key("--max_timestep", note="task.scheduler.min_timestep_boundary: theirs counts from clean"),
    Key("--preserve_distribution_shape", note="the density is cut at the bounds, as here"),
    *off("--", "timesteps of one step are drawn independently here", num_timestep_buckets=(None, 0, 1)),
    *off("--", "distilled guidance is task.train_guidance", guidance_scale=1.0),
    Key("--network_module", note="train.adapters: kind"),
    Key("--network_dim", "train.adapters.0.rank"),
    Key("--network_alpha", "train.adapters.0.alpha", float),
    Key("--network_dropout", "train.adapters.0.dropout", float),
    Key("--network_args", note="train.adapters: b_lr_scale of loraplus_lr_ratio, decompose_factor of factor"),
    Key("--network_weights", "train.adapters.0.from", str, "its file sets targets and rank"),
    Drop("--dim_from_weights", "the file of the adapter decides"),
    *off("--", "the norm of an adapter is not bounded", scale_weight_norms=None),
    *off("--", "add it to train.adapters as {from: FILE, train: false}", base_weights=None),
    Drop("--base_weights_multiplier", "see base_weights"),
    Key("--fp8_base", note="train.base_dtype: fp8, with a scale for each row"),
    Key("--fp8_scaled", note="train.base_dtype: fp8, with a scale for each row"),
    Key("--blocks_to_swap", note="engine.base: stream, and keep: the blocks that stay"),
    *drops("--", "fp8_t5 fp8_vl fp8_llm fp8_text_encoder", "text encoders are in bf16, and run once"),
    *off("--", "engine.param_dtype, and dtype of the autoencoder", dit_dtype=None, vae_dtype=None),
    *off("--", "one-frame inference is another task", one_frame=False),
    *off("--", "not trained here", remove_first_image_from_target=False, turbo_dit=None),
    *off("--", "weights are kept in fp32", fused_backward_pass=False, full_bf16=False, full_fp16=False),
    *off("--", "the sizes are those of the model's files", num_layers=None, force_v2_1_time_embedding=False),
    Key("--output_dir", "run.dir", str),
    Key("--output_name", "run.name", str),
    Key("--save_every_n_steps", "checkpoint.every"),
    Key("--save_last_n_steps", note="checkpoint.keep: the steps by save_every_n_steps"),
    *drops("--", "save_every_n_epochs sample_every_n_epochs save_last_n_epochs*", _EPOCHS),
    *drops("--", "save_state* save_last_n_steps_state", "checkpoints hold all that a resume needs"),
    Drop("--resume", "the same command resumes by itself"),
    *drops("--", "sample_every_n_steps sample_at_first", SAMPLING),
    Drop("--sample_prompts", f"{SAMPLING}: write its lines as validation.samples.prompts"),
    Key("--max_data_loader_n_workers", "data.loader.workers"),
    Key("--log_with", "log.trackers", _trackers),
    *drops("--", "logging_dir log_* wandb_* show_timesteps training_comment", LOGGING),
    *drops("--", "save_precision metadata_* no_metadata huggingface_* async_upload", EXPORT),
    *drops("--", "save_merged_model mem_eff_save", EXPORT),
    *drops("--", "sdpa flash_attn sage_attn xformers flash3 split_attn", FASTER),
    *drops("--", "compile* dynamo_* cuda_* ddp_* persistent_data_loader_workers", FASTER),
    *drops("--", "vae_* offload_inactive_dit use_pinned_memory_for_block_swap block_swap_*", FASTER),
    *drops("--", "img_in_txt_in_offloading disable_numpy_memmap use_32bit_attention", FASTER),
)

LAUNCHER: tuple[Row, ...] = (
    Key("--num_processes", note="mm-train --nproc"),
    Key("--mixed_precision", "engine.param_dtype", DTYPE),
    Drop("--*", "of accelerate: `mm-train` starts the ranks"),
)

_TWICE: tuple[Row, ...] = (
    Key("*resolution", note="width and height: of buckets the area, else data.train.width, height"),
    Key("*enable_bucket", note="data.loader.mode: variable"),
    Key("*bucket_no_upscale", note="data.loader.upscale"),
    Key("*batch_size", note="train.micro_batch_size"),
    Key("*num_repeats", note="weight of the sources"),
    Drop("*caption_extension", "a .txt file beside each", only=(".txt",)),
    Differs("*caption_extension", "captions are .txt files beside pictures, or columns of a table"),
)

DATASETS: tuple[Row, ...] = (
    Key("datasets.*.image_directory", "data.train.sources.*.annotations", str),
    Key("datasets.*.video_directory", "data.train.sources.*.annotations", str),
    Key("datasets.*.image_jsonl_file", note="annotations of a source, with columns image_path and caption"),
    Key("datasets.*.video_jsonl_file", note="annotations of a source, with columns video_path and caption"),
    Key("datasets.*.target_frames", note="data.train.num_frames"),
    Drop("datasets.*.frame_extraction", "clips begin where the video does", only=("head",)),
    Key("datasets.*.frame_extraction", only=("full",), note="buckets of max_frames and less"),
    Differs("datasets.*.frame_extraction", _EXTRACTION),
    Key("datasets.*.max_frames", note="data.train.num_frames, where frame_extraction is full"),
    *drops("datasets.*.", "frame_stride frame_sample", "of another frame_extraction"),
    Key("datasets.*.source_fps", note="data.train.fps, the model's: frames are taken at that rate"),
    Drop("datasets.*.cache_directory", CACHE),
    *off("datasets.*.", _CONTROL, control_directory=None, multiple_target=False),
    *drops("datasets.*.", "no_resize_control control_resolution", "of control_directory"),
    Differs("datasets.*.fp_*", _FRAMEPACK),
    *_TWICE,
    Drop("*debug_dataset", OFF, only=(False,)),
)
