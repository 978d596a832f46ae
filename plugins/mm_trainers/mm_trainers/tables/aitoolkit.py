"""ai-toolkit's YAML: the keys of a job, and of a process that trains."""

from __future__ import annotations

from operator import not_

from mm_core.interchange import Differs, Drop, Instead, Key
from mm_trainers import rows
from mm_trainers.rows import CACHE, EXPORT, FASTER, LOGGING, OFF, SAMPLING, Rows, drops, off, reads, takes
from mm_trainers.values import DTYPE, OPTIMIZERS, SCHEDULES, always, model_name, norm, one_of, recompute

_ON = (True,)
_CACHE = "data.cache.dir"
_TAGS = {"shuffle_tokens": "shuffle", "token_dropout_rate": "drop", "keep_tokens": "keep"}
SHIFTED = ("shift", "flux_shift", "lumina2_shift")
_DENSITIES = {"sigmoid": "logit_normal", "linear": "uniform", **dict.fromkeys(SHIFTED, "uniform")}
_ADAPTERS = {"lora": "lora", "locon": "lora", "lokr": "lokr"}
_FORMS = {
    **dict.fromkeys(("qfloat8", "float8"), "fp8"),
    **dict.fromkeys(("qint8", "int8", "uint8", "convrot8"), "int8"),
    **dict.fromkeys(("qint4", "int4", "uint4", "nf4"), "nf4"),
}
_LOSS = "another loss, noise, density or regularisation than those of flow matching here"
_PROMPT = "captions that change in a way that sources have no key for"
_PAIRS = "a table names such files by row: columns.fields of a source"
_ADAPTER = "adapters beside LoRA, LoKr and LoHa are predictors of a plugin"
_CROP = "data.train.transform has the ways to resize, crop and flip"
_REGULAR = "pictures of regularisation count as others: all sources have one loss"
_BLOCKS = "adapters are in the linear layers of repeated blocks: write train.adapters targets"
_BOUNDS = "write task.scheduler.min_timestep_boundary, max_timestep_boundary, of Wan"
_FILES = "of convolutions, of speed, or of the files that are written"
_PARTS = "set from_pretrained of the part"


def _form(qtype: str) -> str:
    form, _, recovery = qtype.partition("|")
    if recovery and form in _FORMS:
        raise Instead(_FORMS[form], "the adapter behind `|` is not applied")
    return str(one_of(_FORMS, "nf4")(form))


def _batch(count: int, size: int, legacy: int) -> int:
    return size * (legacy if legacy > 1 else count)


def _steps(steps: int, legacy: int) -> int:
    return steps // max(legacy, 1)


JOB: Rows = (
    Key("config.name", "run.name", str),
    *reads("", "job config.process", "each process that trains becomes a config, by the table below"),
    Drop("meta*", EXPORT),
)

_START = "train.adapters.0."
_NETWORK: Rows = (
    Key("network.type", f"{_START}kind", one_of(_ADAPTERS, "lora"), absent="lora", given="network"),
    Key("network.linear", f"{_START}rank", absent=4, given="network network.rank=none"),
    Key("network.linear_alpha", f"{_START}alpha", float, absent=1.0, given="network network.alpha=none"),
    *takes("network.", _START, "rank linear=rank"),
    *takes("network.", _START, "alpha linear_alpha=alpha dropout", float),
    Drop("network.lokr_factor", OFF, only=(-1, 0)),
    Key("network.lokr_factor", f"{_START}decompose_factor", given="network.type=lokr"),
    Key("network.lokr_full_rank", note="train.adapters: a rank that no matrix has"),
    *reads("network.network_kwargs.", "only_if_contains ignore_if_contains", "targets, exclude"),
    Key("network.pretrained_lora_path", f"{_START}from", model_name, "it sets targets and rank"),
    *drops("network.", "conv* split_multistage_loras layer_offloading lokr_factor old_lokr_format", _FILES),
    *off("network.", _BLOCKS, "all_layers", transformer_only=True),
)

_SOURCE = "data.train.sources.*."
_DATASETS: Rows = (
    *takes("datasets.*.", _SOURCE, "folder_path=annotations dataset_path=annotations", str),
    Key("datasets.*.num_repeats", f"{_SOURCE}weight", float),
    *off("datasets.*.", "captions are .txt files beside, or columns of a table", caption_ext=("txt", ".txt")),
    Key("datasets.*.default_caption", f"{_SOURCE}caption", str),
    *reads("datasets.*.", "trigger_word caption_dropout_rate", "caption_prefix; task.caption_dropout of all"),
    Key("datasets.*.resolution", note="max_height and max_width of buckets: the area, as theirs"),
    *off("datasets.*.", "one size for all: write height and width of data.train", buckets=True),
    Drop("datasets.*.bucket_tolerance", "sizes of buckets are multiples of what the model takes"),
    *reads("datasets.*.", "num_frames shrink_video_to_frames fps", "data.train: num_frames, the most; fps"),
    Differs("datasets.*.auto_frame_count", "clips go to buckets of num_frames, its half, its quarter"),
    Key("datasets.*.do_i2v", note="task.frames: [first]"),
    *(Drop(f"datasets.*.{name}", OFF, only=(0,)) for name in _TAGS),
    *(Key(f"datasets.*.{name}", f"{_SOURCE}tags.{ours}") for name, ours in _TAGS.items()),
    *takes(
        "datasets.*.", "", f"cache_latents={_CACHE} cache_text_embeddings={_CACHE}", always("cache"), only=_ON
    ),
    Key("datasets.*.cache_latents_to_disk", _CACHE, always("cache"), only=_ON),
    *drops("datasets.*.", "cache_* load_image_when_caching_latents", CACHE),
    *drops("datasets.*.", "debug fast_image_size type full_size_control_images", FASTER),
    *takes("datasets.*.", "data.loader.", "num_workers=workers prefetch_factor=prefetch"),
    *off("datasets.*.", _REGULAR, "is_reg prior_reg", network_weight=1.0, loss_multiplier=1.0),
    *off("datasets.*.", _PROMPT, "random_triggers use_short_captions replacements"),
    *off("datasets.*.", _CROP, "random_crop random_scale square_crop augments augmentations", scale=1.0),
    *off("datasets.*.", _CROP, "flip_x flip_y standardize_images extra_values"),
    *off("datasets.*.", _PAIRS, "control_path* inpaint_path unconditional_path clip_image_path controls"),
    *off("datasets.*.", _PAIRS, "control_from_same_folder"),
    *off("datasets.*.", "the loss has no masks", "mask_path alpha_mask invert_mask mask_min_value"),
    *off("datasets.*.", "all sources share train.micro_batch_size", batch_size=None),
    *off("datasets.*.", "clips are read without sound", "do_audio audio_normalize"),
)

_LEGACY = {"train.gradient_accumulation_steps": 1}  # their steps count micro-batches
_BATCH = {"train.batch_size": 1, **_LEGACY}
_WARM, _WARMUP = "train.lr_scheduler_params.num_warmup_steps", "lr_schedule.warmup_steps"
_OPTIMIZER, _SCHEDULE = one_of(OPTIMIZERS, "adamw"), one_of(SCHEDULES, "constant")
_DENSITY = one_of(_DENSITIES, "uniform")
_TRAIN: Rows = (
    Key("train.batch_size", "train.micro_batch_size", note="smaller buckets have more samples", absent=1),
    Key("train.steps", "train.steps", _steps, absent=1000, of=_LEGACY),
    Key("train.gradient_accumulation", "train.global_batch_size", _batch, "of one rank", absent=1, of=_BATCH),
    Key("train.gradient_accumulation_steps", note="the same; their steps count micro-batches"),
    Key("train.lr", "optimizer.lr", float, absent=1e-6, given="train.unet_lr=none"),
    Key("train.unet_lr", "optimizer.lr", float),
    *drops("train.", "lr *_lr", "of parts that are not trained"),
    Key("train.optimizer", "optimizer.type", _OPTIMIZER, absent="adamw"),
    Key("train.optimizer_params.weight_decay", "optimizer.weight_decay", float, absent=0.01),
    Key("train.optimizer_params.betas", "optimizer.betas"),
    Key("train.optimizer_params.eps", "optimizer.eps", float, "ours is 1e-8", absent=1e-6),
    Key("train.lr_scheduler", "lr_schedule.type", _SCHEDULE, absent="constant"),
    Key(_WARM, _WARMUP, absent=1000, given="train.lr_scheduler=constant_with_warmup"),
    Key(_WARM, _WARMUP),
    Key("train.lr_scheduler_params.eta_min", "lr_schedule.min_lr", float),
    Key("train.max_grad_norm", "train.clip_grad_norm", norm, rows.RATE, absent=1.0),
    Key("train.ema_config.use_ema", "ema.ramp", always(False), "their average has no ramp", only=_ON),
    Key("train.ema_config.ema_decay", "ema.decay", float, absent=0.999, given="train.ema_config.use_ema"),
    *drops("train.ema_config.", "use_ema ema_decay", OFF),
    *off("train.ema_config.", "the average changes no weight", "use_feedback", param_multiplier=1.0),
    Key("train.dtype", "engine.param_dtype", DTYPE, absent="fp32"),
    Key("train.gradient_checkpointing", "engine.recompute_modules", recompute, absent=True),
    *off("train.", "models here are trained by flow matching", noise_scheduler=("flowmatch", "flow_match")),
    Key("train.timestep_type", "task.scheduler.timesteps", _DENSITY, absent="sigmoid"),
    *off("train.", _REGULAR, content_or_style_reg="balanced"),
    *off("train.", _BOUNDS, "min_denoising_steps", max_denoising_steps=(999, 1000)),
    *off("train.", "the transformer is what is trained", "train_text_encoder", train_unet=True),
    Drop("train.train_refiner", OFF),
    Key("train.cache_text_embeddings", _CACHE, always("cache"), only=_ON),
    Drop("train.cache_text_embeddings", OFF),
    *off("train.", "theirs trains on the trigger word alone, without captions", "unload_text_encoder"),
    Key("train.switch_boundary_every", note="here each step trains the expert of the timestep that it draws"),
    Key("train.disable_sampling", note="validation"),
    Key("train.skip_first_sample", "validation.at_start", not_, absent=False),
    *off("train.", _LOSS, loss_type="mse", loss_target="noise", content_or_style="balanced"),
    *off("train.", _LOSS, noise_multiplier=1.0, optimal_noise_pairing_samples=1),
    *off("train.", _LOSS, "*snr* *noise* *_preservation do_* linear_timesteps* max_loss t0_loss_target"),
    *off("train.", _LOSS, "inverted_mask_prior target_norm_std weight_jitter"),
    *drops("train.", "*_preservation_* reg_weight inverted_mask_prior_*", OFF),
    *off("train.", _PROMPT, "prompt_dropout_prob short_and_long_captions"),
    *off("train.", "write task.train_guidance", "bypass_guidance_embedding", cfg_scale=1.0),
    *off("train.", "a run begins at 0, or resumes", "start_step merge_network_on_save"),
    *drops("train.", "xformers sdp attention_backend force_first_sample max_loss_debug", FASTER),
)

_MODEL: Rows = (
    *reads("model.", "name_or_path arch is_*", "which model: task.pipeline, or the parts of Wan"),
    Differs("model.quantize", "all weights are trained: none is quantised", only=_ON, given="network=none"),
    Key("model.quantize", note="train.base_dtype"),
    Key("model.qtype", "train.base_dtype", _form, absent="qfloat8", given="network model.quantize"),
    Drop("model.qtype", OFF),
    *drops("model.", "quantize_te qtype_te", "text encoders are in bf16, and run once with data.cache"),
    *takes("model.", "engine.base.", "layer_offloading=stream auto_memory=stream", only=_ON, given="network"),
    *drops("model.", "low_vram layer_offloading* auto_memory dtype vae_dtype te_dtype attn_masking", FASTER),
    *drops("model.", "compile* block_compile cache_size_limit split_model_* *_device", FASTER),
    *reads("model.model_kwargs.", "train_high_noise train_low_noise", "task.predictor.train"),
    *off("model.", "an adapter of training alone, not of sampling", "assistant_lora_path"),
    *off("model.", "add it to train.adapters as {from: FILE, train: false}", "lora_path"),
    *drops("model.", "inference_lora_path refiner_*", SAMPLING),
    *off("model.", _PARTS, "vae_path unet_path te_name_or_path extras_name_or_path"),
    *off("model.", "write train.freeze", "only_if_contains ignore_if_contains"),
    *off("model.", "an adapter that takes quantisation back", "accuracy_recovery_adapter"),
    Drop("model.use_flux_cfg", OFF, only=(False,)),
)

_SAMPLE: Rows = (
    Key("sample.sample_every", "validation.every", absent=100),
    *reads("sample.", "prompts samples", "validation.samples: prompts, images"),
    Drop("sample.neg", OFF, only=("",)),
    Key("sample.neg", "validation.samples.negative_prompt", str),
    Key("sample.guidance_scale", "validation.samples.guidance", float, absent=7.0),
    Key("sample.sample_steps", "validation.samples.steps", absent=20),
    Key("sample.seed", "validation.samples.seed"),
    *takes("sample.", "task.sample.", "width height", absent=512),
    Key("sample.num_frames", "task.sample.num_frames"),
    Key("sample.fps", "task.sample.fps", float),
    *drops("", "sample.* first_sample*", SAMPLING),
)

PROCESS: Rows = (
    Key("type", note="sd_trainer, ui_trainer, diffusion_trainer: trainings"),
    *takes("", "run.", "name training_folder=dir", str),
    Key("training_seed", "run.seed", note=rows.SEED),
    Key("trigger_word", note="caption_prefix of the sources: theirs adds it only where a caption lacks it"),
    Drop("device", "one rank, or those of `mm-train --nproc`"),
    *drops("", "performance_log_every torch_profiler sqlite_db_path log_dir", LOGGING),
    *_NETWORK,
    Key("save.save_every", "checkpoint.every", absent=1000),
    Key("save.max_step_saves_to_keep", "checkpoint.keep", absent=5),
    Drop("save.*", EXPORT),
    Key("logging.log_every", "log.every"),
    Key("logging.use_wandb", "log.trackers", always(["wandb"]), only=_ON),
    Drop("logging.*", LOGGING),
    *_DATASETS,
    *_TRAIN,
    *_MODEL,
    *_SAMPLE,
    *off("", _ADAPTER, "adapter embedding decorator slider guidance do_lorm"),
)
