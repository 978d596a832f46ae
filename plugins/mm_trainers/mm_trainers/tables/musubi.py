"""musubi-tuner's flags, and its TOML of datasets."""

from __future__ import annotations

import re
from typing import Any

from mm_core.interchange import Differs, Drop, Key
from mm_trainers import rows
from mm_trainers.rows import EXPORT, FASTER, LOGGING, OFF, SAMPLING, Rows, drops, off, reads, takes
from mm_trainers.values import (
    DTYPE,
    OPTIMIZERS,
    TRANSFORMERS,
    always,
    norm,
    one_of,
    recompute,
    times,
    trackers,
)

_SCHEDULES = TRANSFORMERS | {"polynomial": "polynomial"}
_KINDS = {"loha": "loha", "lokr": "lokr"}
_EPOCHS = "checkpoints and samples are by steps: checkpoint.every, validation.every"
_SCHEDULE = "a schedule of its own: lr_schedule has those that are known here"
_CONTROL = "a table names pictures and clips of control by row: columns.fields of a source"
_EXTRACTION = "several clips of one video: cut the videos before, or write a row for each"
_DENSITIES = {
    **{"uniform": "uniform", "sigmoid": "logit_normal", "shift": "logit_normal", "none": "uniform"},
    **{"logit_normal": "logit_normal", "sigma_sqrt": "uniform", "cosmap": "uniform"},
}
_BY_SIZE = dict.fromkeys(("flux_shift", "flux2_shift", "qwen_shift", "krea2_shift"), "logit_normal")
_SIGMA = "--timestep_sampling=none|sigma"


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[\d.]+(?:e-?\d+)?", text)]


def _share(edge: float) -> float:
    return edge / 1000 if edge > 1 else edge


def _kept(last: int, every: int) -> int:
    return int(last) // every + 1


def _kind(module: str) -> str:
    kind = module.rpartition(".")[2]
    return "lora" if kind.startswith("lora") else str(one_of(_KINDS, "lora")(kind))


def _levels(densities: dict[str, str], note: str) -> Rows:
    """Rows for the noise levels of training: their density, and what shifts them towards noise."""

    def density(kind: str, scheme: str) -> Any:
        return one_of(densities, "uniform")(scheme if kind == "sigma" else kind)

    def shift(value: float, kind: str) -> float | str:
        sampling = kind in _BY_SIZE and kind in densities
        return value if kind in ("sigma", "shift") else "sampling" if sampling else 1.0

    schemes, kinds, start = {"--weighting_scheme": "none"}, {"--timestep_sampling": "sigma"}, "task.scheduler"
    return (
        Key("--timestep_sampling", f"{start}.timesteps", density, absent="sigma", of=schemes),
        Key("--discrete_flow_shift", f"{start}.shift", shift, note, absent=1.0, of=kinds),
    )


WAN: Rows = (
    *takes("--", "task.", "vae=autoencoder.from_pretrained t5=text_encoder.from_pretrained", str),
    Key("--mode_scale", "task.scheduler.mode_scale", given=f"--weighting_scheme=mode {_SIGMA}"),
    *_levels(_DENSITIES | {"mode": "mode"}, "ours is 5"),
)
ONE: Rows = (Key("--dit", "task.predictor.from_pretrained", str), *WAN)
TWO: Rows = (Key("--timestep_boundary", "task.predictor.boundary", _share), *WAN)
PIPELINE: Rows = _levels(_DENSITIES | _BY_SIZE, "")

_START = "train.adapters.0."
NETWORK: Rows = (
    Key("--network_module", f"{_START}kind", _kind, absent="lora"),
    Key("--network_dim", f"{_START}rank", absent=4),
    Key("--network_alpha", f"{_START}alpha", float, absent=1.0),
    *takes("--network_", _START, "dropout args.loraplus_lr_ratio=b_lr_scale", float),
    Key("--network_args.factor", f"{_START}decompose_factor", int, given="--network_module=networks.lokr"),
    Differs("--network_args*", "an argument of the adapter without a counterpart"),
    Key("--network_weights", f"{_START}from", str, "its file sets targets and rank"),
    *takes("--fp8_", "train.", "scaled=base_dtype base=base_dtype", always("fp8"), note="scaled by row"),
    Key("--blocks_to_swap", note="engine.base: stream, and keep: the blocks that stay"),
)
WHOLE: Rows = (
    *drops("--", "network_* fp8_scaled fp8_base", "the whole model is trained"),
    *off("--", "only a frozen base is streamed: engine.offload has other ways", "blocks_to_swap"),
)

_SCHEME = ("none", "mode", "logit_normal")
_NORMAL = f"--weighting_scheme=logit_normal {_SIGMA}"
_RATE, _EVERY = {"--learning_rate": 2e-6}, {"--save_every_n_steps": 1}
FLAGS: Rows = (
    Key("--dataset_config", note="the TOML of datasets, below"),
    Differs("--config_file", "write its flags into the command"),
    *reads("--", "task model_version edit edit_plus dit dit_high_noise vae t5 clip", "which model"),
    *reads("--", "text_encoder text_encoder1 text_encoder2 byt5 image_encoder", "which model"),
    Drop("--timestep_boundary", "it is read only where both experts are trained"),
    Key("--learning_rate", "optimizer.lr", float, absent=2e-6),
    Key("--optimizer_type", "optimizer.type", one_of(OPTIMIZERS, "adamw"), absent="adamw"),
    Key("--optimizer_args.weight_decay", "optimizer.weight_decay", float, absent=0.01),
    Key("--optimizer_args.eps", "optimizer.eps", float),
    Key("--optimizer_args.betas", "optimizer.betas", _numbers),
    Differs("--optimizer_args*", "an argument of the optimizer without a counterpart"),
    Key("--lr_scheduler", "lr_schedule.type", one_of(_SCHEDULES, "constant"), absent="constant"),
    Key("--lr_warmup_steps", note="lr_schedule.warmup_steps; below 1: warmup_fraction"),
    Key("--lr_scheduler_power", "lr_schedule.power", float, given="--lr_scheduler=polynomial"),
    Drop("--lr_scheduler_power", "of the schedule polynomial alone"),
    Drop("--lr_scheduler_min_lr_ratio", OFF, only=(0,)),
    Key("--lr_scheduler_min_lr_ratio", "lr_schedule.min_lr", times, "a share of the rate", of=_RATE),
    *off("--lr_", _SCHEDULE, "decay_steps scheduler_type scheduler_timescale scheduler_args"),
    *off("--", _SCHEDULE, lr_scheduler_num_cycles=1),
    Key("--max_train_steps", "train.steps", absent=1600, given="--max_train_epochs=none"),
    Drop("--max_train_steps", "the epochs count"),
    Key("--max_train_epochs", "train.epochs"),
    Key("--gradient_accumulation_steps", note="with batch_size and ranks: train.global_batch_size"),
    Key("--max_grad_norm", "train.clip_grad_norm", norm, rows.RATE, absent=1.0),
    Key("--seed", "run.seed", note=rows.SEED),
    Key("--mixed_precision", "engine.param_dtype", DTYPE),
    Drop("--gradient_checkpointing_cpu_offload", FASTER),
    Key("--gradient_checkpointing", "engine.recompute_modules", recompute),
    Key("--weighting_scheme", only=_SCHEME, note="task.scheduler.timesteps of sigma"),
    Differs("--weighting_scheme", "no weight of the loss by timestep like this one"),
    *takes("--", "task.scheduler.", "logit_mean logit_std", given=_NORMAL),
    Key("--sigmoid_scale", "task.scheduler.logit_std", given="--timestep_sampling=sigmoid|shift"),
    *drops("--", "logit_mean logit_std mode_scale sigmoid_scale", "of another density"),
    *reads("--", "min_timestep max_timestep", "task.scheduler: bounds, which theirs counts from clean"),
    Key("--preserve_distribution_shape", note="the density is cut at the bounds, as here"),
    *off("--", "timesteps of one step are drawn independently here", num_timestep_buckets=(None, 0, 1)),
    *off("--", "distilled guidance is task.train_guidance", guidance_scale=1.0),
    *off("--", "the norm of an adapter is not bounded", "scale_weight_norms"),
    *off("--", "add it to train.adapters as {from: FILE, train: false}", "base_weights"),
    *drops("--", "base_weights_multiplier dim_from_weights", "the file of the adapter decides"),
    *drops("--", "fp8_t5 fp8_vl fp8_llm fp8_text_encoder", "text encoders are in bf16, and run once"),
    *off("--", "engine.param_dtype, and dtype of the autoencoder", "dit_dtype vae_dtype"),
    *off("--", "not trained here", "one_frame remove_first_image_from_target turbo_dit"),
    *off("--", "weights are kept in fp32", "fused_backward_pass full_bf16 full_fp16"),
    *off("--", "the sizes are those of the model's files", "num_layers force_v2_1_time_embedding"),
    *takes("--output_", "run.", "dir name", str),
    Key("--save_every_n_steps", "checkpoint.every"),
    Key("--save_last_n_steps", "checkpoint.keep", _kept, of=_EVERY, given="--save_every_n_steps"),
    Drop("--save_last_n_steps", "it does nothing without save_every_n_steps"),
    *drops("--", "save_every_n_epochs sample_every_n_epochs save_last_n_epochs*", _EPOCHS),
    *drops("--", "save_state* save_last_n_steps_state resume", "the same command resumes by itself"),
    *drops("--", "sample_every_n_steps sample_at_first", SAMPLING),
    Drop("--sample_prompts", f"{SAMPLING}: write its lines as validation.samples.prompts"),
    Key("--max_data_loader_n_workers", "data.loader.workers"),
    Key("--log_with", "log.trackers", trackers),
    *drops("--", "logging_dir log_* wandb_* show_timesteps training_comment", LOGGING),
    *drops("--", "save_precision metadata_* no_metadata huggingface_* async_upload mem_eff_save", EXPORT),
    Drop("--save_merged_model", EXPORT),
    *drops("--", "sdpa flash_attn sage_attn xformers flash3 split_attn compile* dynamo_* cuda_*", FASTER),
    *drops("--", "persistent_data_loader_workers vae_* offload_inactive_dit block_swap_* ddp_*", FASTER),
    *drops("--", "use_pinned_memory_for_block_swap img_in_txt_in_offloading disable_numpy_memmap", FASTER),
    Drop("--use_32bit_attention", FASTER),
)

LAUNCHER: Rows = (
    Key("--num_processes", note="mm-train --nproc"),
    Key("--mixed_precision", "engine.param_dtype", DTYPE),
    Drop("--*", "of accelerate: `mm-train` starts the ranks"),
)

_FILES = "image_directory={0} video_directory={0} image_jsonl_file={0} video_jsonl_file={0}"
DATASETS: Rows = (
    *takes("datasets.*.", "", _FILES.format("data.train.sources.*.annotations"), str),
    Drop("datasets.*.frame_extraction", "clips begin where the video does", only=("head",)),
    Key("datasets.*.frame_extraction", only=("full",), note="buckets of max_frames and less"),
    Differs("datasets.*.frame_extraction", _EXTRACTION),
    *reads("datasets.*.", "target_frames max_frames", "data.train.num_frames"),
    *drops("datasets.*.", "frame_stride frame_sample", "of another frame_extraction"),
    Key("datasets.*.source_fps", note="data.train.fps, the model's: frames are taken at that rate"),
    Drop("datasets.*.cache_directory", rows.CACHE),
    *off("datasets.*.", _CONTROL, "control_directory multiple_target"),
    *drops("datasets.*.", "no_resize_control control_resolution", "of control_directory"),
    Differs("datasets.*.fp_*", "of FramePack, which is not trained here"),
    Key("*resolution", note="width and height: of buckets the area, else data.train.width, height"),
    *reads("*", "enable_bucket bucket_no_upscale", "data.loader: mode variable, upscale"),
    *reads("*", "batch_size num_repeats", "train.micro_batch_size; weight of the sources"),
    *off("*", "captions are .txt files beside pictures, or columns of a table", caption_extension=".txt"),
    Drop("*debug_dataset", OFF, only=(False,)),
)
