"""ai-toolkit's YAML: the keys of a job, and of a process that trains."""

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
    model_name,
    norm,
    off,
    one_of,
    recompute,
)

_LOSS = "another loss than the squared error of the velocity"
_NOISE = "another noise than that of flow matching"
_PROMPT = "captions that change in a way that sources have no key for"
_PAIRS = "a table names such files by row: columns.fields of a source"
_ADAPTER = "adapters beside LoRA, LoKr and LoHa are predictors of a plugin"
_TRICK = "there is no such regularisation"
_MASKS = "the loss has no masks"

OPTIMIZERS = {
    **{"adam": "adam", "adamw": "adamw", "adamw8bit": "adamw_8bit", "adamw8": "adamw_8bit"},
}
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"}
SCHEDULES |= {"cosine_with_restarts": "cosine"}  # theirs restarts after the whole run


JOB: tuple[Row, ...] = (
    Key("job", note="extension, train: trainings"),
    Key("config.name", "run.name", str),
    Key("config.process", note="each process that trains becomes a config, by the table below"),
    Drop("meta*", EXPORT),
)

_NETWORK: tuple[Row, ...] = (
    Key("network.type", note="train.adapters: kind lora, or lokr"),
    Key("network.linear", "train.adapters.0.rank"),
    Key("network.rank", "train.adapters.0.rank"),
    Key("network.linear_alpha", "train.adapters.0.alpha", float),
    Key("network.alpha", "train.adapters.0.alpha", float),
    Key("network.dropout", "train.adapters.0.dropout", float),
    Key("network.lokr_factor", note="train.adapters: decompose_factor; -1 is null"),
    Key("network.lokr_full_rank", note="train.adapters: a rank that no matrix has"),
    Drop("network.conv*", "the blocks have no convolutions"),
    Key("network.network_kwargs.only_if_contains", note="train.adapters: targets"),
    Key("network.network_kwargs.ignore_if_contains", note="train.adapters: exclude"),
    Key(
        "network.pretrained_lora_path", "train.adapters.0.from", model_name, "its file sets targets and rank"
    ),
    Drop("network.split_multistage_loras", "`mm export` writes a file for each expert"),
    Drop("network.layer_offloading", FASTER),
    Drop("network.old_lokr_format", EXPORT),
    *off("network.", "adapters are of linear layers", all_layers=False),
    Drop("network.transformer_only", "adapters are in the repeated blocks", only=(True,)),
    Differs("network.transformer_only", "adapters are in the repeated blocks: write train.adapters targets"),
)

_DATASETS: tuple[Row, ...] = (
    Key("datasets.*.folder_path", "data.train.sources.*.annotations", str),
    Key("datasets.*.dataset_path", "data.train.sources.*.annotations", str),
    Key("datasets.*.num_repeats", "data.train.sources.*.weight", float),
    Key("datasets.*.trigger_word", "data.train.sources.*.caption_prefix", note="see trigger_word"),
    Drop("datasets.*.caption_ext", "a .txt file beside each", only=("txt", ".txt")),
    Differs("datasets.*.caption_ext", "captions are .txt files beside pictures, or columns of a table"),
    Differs("datasets.*.default_caption", "a file without a caption is left out, and counted"),
    Key("datasets.*.caption_dropout_rate", note="task.caption_dropout: of the task here, for all datasets"),
    Key("datasets.*.resolution", note="max_height and max_width of buckets: the area, as theirs"),
    Drop("datasets.*.buckets", "buckets keep the aspect", only=(True,)),
    Differs(
        "datasets.*.buckets", "one size for all: write height and width in place of max_height, max_width"
    ),
    Drop("datasets.*.bucket_tolerance", "sizes of buckets are multiples of what the model takes"),
    Key("datasets.*.num_frames", note="data.train.num_frames: the most of all datasets"),
    Key("datasets.*.shrink_video_to_frames", note="see num_frames"),
    Key("datasets.*.fps", note="data.train.fps, where shrink_video_to_frames is off"),
    Differs("datasets.*.auto_frame_count", "clips go to buckets of num_frames, its half, its quarter"),
    Key("datasets.*.do_i2v", note="task.frames: [first]"),
    Drop("datasets.*.shuffle_tokens", OFF, only=(False,)),
    Key("datasets.*.shuffle_tokens", "data.train.sources.*.tags.shuffle"),
    Drop("datasets.*.token_dropout_rate", OFF, only=(0,)),
    Key("datasets.*.token_dropout_rate", "data.train.sources.*.tags.drop", float),
    Drop("datasets.*.keep_tokens", OFF, only=(0,)),
    Key("datasets.*.keep_tokens", "data.train.sources.*.tags.keep"),
    *(
        Drop(f"datasets.*.{name}", CACHE if name.startswith("cache") else FASTER)
        for name in (
            *("cache_latents", "cache_latents_to_disk", "cache_text_embeddings", "cache_clip_vision_to_disk"),
            *("cache_tensors_to_disk", "cache_latents_num_workers", "load_image_when_caching_latents"),
            *("debug", "fast_image_size", "type", "full_size_control_images"),
        )
    ),
    Key("datasets.*.num_workers", "data.loader.workers"),
    Key("datasets.*.prefetch_factor", "data.loader.prefetch"),
    *off("datasets.*.", "pictures of regularisation count as others", is_reg=False, prior_reg=False),
    *off("datasets.*.", _PROMPT, random_triggers=[], use_short_captions=False, replacements=[]),
    *off("datasets.*.", "mirrored copies: data.train.transform has flip", flip_x=False, flip_y=False),
    *off(
        "datasets.*.",
        "pictures are resized and cropped at the centre: data.train.transform has what there is",
        **(
            {"random_crop": False, "random_scale": False, "square_crop": False, "scale": 1.0, "augments": []}
            | {"augmentations": None, "standardize_images": False, "extra_values": []}
        ),
    ),
    *off("datasets.*.", _PAIRS, **{f"control_path{end}": None for end in ("", "_1", "_2", "_3")}),
    *off("datasets.*.", _PAIRS, inpaint_path=None, unconditional_path=None, clip_image_path=None),
    *off("datasets.*.", _PAIRS, controls=[], control_from_same_folder=False),
    *off("datasets.*.", _MASKS, mask_path=None, alpha_mask=False, invert_mask=False),
    *off("datasets.*.", _MASKS, mask_min_value=0.0),
    *off("datasets.*.", "all sources have one loss", network_weight=1.0, loss_multiplier=1.0),
    *off("datasets.*.", "all sources share train.micro_batch_size", batch_size=None),
    *off("datasets.*.", "clips are read without sound", do_audio=False, audio_normalize=False),
)

_TRAIN: tuple[Row, ...] = (
    *known(
        "train.batch_size",
        "train.micro_batch_size",
        1,
        note="of full size; smaller buckets have more samples",
    ),
    *known("train.steps", "train.steps", 1000),
    Key("train.gradient_accumulation", note="with batch_size: train.global_batch_size"),
    Key("train.gradient_accumulation_steps", note="the same; their steps count micro-batches"),
    *known("train.lr", "optimizer.lr", 1e-06, float),
    Key("train.unet_lr", "optimizer.lr", float),
    Drop("train.*_lr", "of parts that are not trained"),
    *known("train.optimizer", "optimizer.type", "adamw", one_of(OPTIMIZERS, "adamw")),
    *known("train.optimizer_params.weight_decay", "optimizer.weight_decay", 0.01, float),
    Key("train.optimizer_params.betas", "optimizer.betas"),
    *known("train.optimizer_params.eps", "optimizer.eps", 1e-06, float, absent="ours is 1e-8"),
    *known("train.lr_scheduler", "lr_schedule.type", "constant", one_of(SCHEDULES, "constant")),
    Key("train.lr_scheduler_params.num_warmup_steps", "lr_schedule.warmup_steps"),
    Key("train.lr_scheduler_params.eta_min", "lr_schedule.min_lr", float),
    *known("train.max_grad_norm", "train.clip_grad_norm", 1.0, norm, note="0 is off, which is null here"),
    Key("train.ema_config.use_ema", note="ema"),
    Key("train.ema_config.ema_decay", note="ema.decay; their average has no ramp"),
    *off("train.ema_config.", "the average changes no weight", use_feedback=False, param_multiplier=1.0),
    *known("train.dtype", "engine.param_dtype", "fp32", DTYPE),
    *known("train.gradient_checkpointing", "engine.recompute_modules", "auto", recompute),
    Drop("train.noise_scheduler", "flow matching, as here", only=("flowmatch", "flow_match")),
    Differs("train.noise_scheduler", "models here are trained by flow matching"),
    Key("train.timestep_type", note="task.scheduler: timesteps and shift"),
    *off("train.", "no weights by timestep", linear_timesteps=False, linear_timesteps2=False),
    *off("train.", "another density: task.scheduler has some of its own", content_or_style="balanced"),
    *off("train.", "pictures of regularisation count as others", content_or_style_reg="balanced"),
    *off(
        "train.",
        "bounds are task.scheduler.min_ and max_timestep_boundary of wan/flow_match, from noise as theirs",
        min_denoising_steps=0,
        max_denoising_steps=(999, 1000, None),
    ),
    *off("train.", "the transformer is what is trained", train_unet=True),
    *off("train.", "encoders stay frozen", train_text_encoder=False, train_refiner=(True, False, None)),
    Key("train.cache_text_embeddings", note="data.cache"),
    Differs(
        "train.unload_text_encoder", "theirs trains on the trigger word or no caption alone", only=(True,)
    ),
    Drop("train.unload_text_encoder", CACHE),
    Key("train.switch_boundary_every", note="here each step trains the expert of the timestep that it draws"),
    Key("train.disable_sampling", note="validation"),
    Key("train.skip_first_sample", "validation.at_start", lambda value: not value),
    *off("train.", _LOSS, loss_type="mse", snr_gamma=None, min_snr_gamma=None),
    *off("train.", _LOSS, learnable_snr_gos=False, t0_loss_target=False, do_fft_loss=False),
    *off("train.", _LOSS, do_guidance_loss=False, do_differential_guidance=False, max_loss=None),
    *off("train.", _LOSS, target_norm_std=None, loss_target="noise", do_cfg=False),
    *off("train.", _NOISE, noise_offset=0.0, noise_multiplier=1.0, random_noise_shift=0.0),
    *off("train.", _NOISE, dynamic_noise_offset=False, force_consistent_noise=False),
    *off("train.", _NOISE, optimal_noise_pairing_samples=1, random_noise_multiplier=0.0),
    *off("train.", _TRICK, diff_output_preservation=False, blank_prompt_preservation=False),
    *off("train.", _TRICK, inverted_mask_prior=False, weight_jitter=0.0, do_prior_divergence=False),
    *drops(
        "train.",
        "diff_output_preservation_* blank_prompt_preservation_* reg_weight inverted_mask_prior_*",
        "of a regularisation that is off",
    ),
    *off("train.", _PROMPT, prompt_dropout_prob=0.0, short_and_long_captions=False),
    *off(
        "train.", "distilled guidance is task.train_guidance", bypass_guidance_embedding=False, cfg_scale=1.0
    ),
    *off("train.", "a run begins at 0, or resumes", start_step=None, merge_network_on_save=False),
    *drops("train.", "xformers sdp attention_backend force_first_sample max_loss_debug", FASTER),
)

_MODEL: tuple[Row, ...] = (
    Key("model.name_or_path", note="task.pipeline, or from_pretrained of Wan's parts; a name gets `hub:`"),
    Key("model.arch", note="which model"),
    Key("model.is_*", note="an older way to name the model"),
    Key("model.quantize", note="train.base_dtype"),
    Key("model.qtype", note="train.base_dtype"),
    *drops("model.", "quantize_te qtype_te", "text encoders are in bf16, and run once with data.cache"),
    Key("model.layer_offloading", note="engine.base.stream"),
    Key("model.auto_memory", note="engine.base.stream"),
    *drops("model.", "low_vram layer_offloading_* dtype vae_dtype te_dtype attn_masking", FASTER),
    *drops("model.", "compile* block_compile cache_size_limit split_model_* *_device", FASTER),
    Key("model.model_kwargs.train_high_noise", note="task.predictor.train"),
    Key("model.model_kwargs.train_low_noise", note="task.predictor.train"),
    *off("model.", "an adapter of training alone, not of sampling", assistant_lora_path=None),
    *off("model.", "add it to train.adapters as {from: FILE, train: false}", lora_path=None),
    *drops("model.", "inference_lora_path refiner_*", SAMPLING),
    *off("model.", "set from_pretrained of the part", vae_path=None, unet_path=None, te_name_or_path=None),
    *off("model.", "set from_pretrained of the encoders", extras_name_or_path=None),
    *off("model.", "write train.freeze", only_if_contains=None, ignore_if_contains=None),
    *off("model.", "an adapter that takes quantisation back", accuracy_recovery_adapter=None),
    Drop("model.use_flux_cfg", OFF, only=(False,)),
)

_SAMPLE: tuple[Row, ...] = (
    Key("sample.sample_every", "validation.every"),
    Key("sample.prompts", note="validation.samples.prompts"),
    Key("sample.samples", note="validation.samples.prompts, images"),
    Key("sample.neg", note="validation.samples.negative_prompt"),
    Key("sample.seed", "validation.samples.seed"),
    Key("sample.guidance_scale", "validation.samples.guidance", float),
    Key("sample.sample_steps", "validation.samples.steps"),
    Key("sample.width", "task.sample.width"),
    Key("sample.height", "task.sample.height"),
    Key("sample.num_frames", "task.sample.num_frames"),
    Key("sample.fps", "task.sample.fps", float),
    Drop("sample.*", SAMPLING),
    Drop("first_sample*", SAMPLING),
)

PROCESS: tuple[Row, ...] = (
    Key("type", note="sd_trainer, ui_trainer, diffusion_trainer: trainings"),
    Key("name", "run.name", str),
    Key("training_folder", "run.dir", str),
    Key("training_seed", "run.seed", note="other random numbers than theirs"),
    Key("trigger_word", note="caption_prefix of the sources: theirs adds it only where a caption lacks it"),
    Drop("device", "one rank, or those of `mm-train --nproc`"),
    *drops("", "performance_log_every torch_profiler sqlite_db_path log_dir", LOGGING),
    *_NETWORK,
    *known("save.save_every", "checkpoint.every", 1000),
    *known("save.max_step_saves_to_keep", "checkpoint.keep", 5),
    Drop("save.*", EXPORT),
    Key("logging.log_every", "log.every"),
    Key("logging.use_wandb", note="log.trackers: [wandb]"),
    Drop("logging.*", LOGGING),
    *_DATASETS,
    *_TRAIN,
    *_MODEL,
    *_SAMPLE,
    *off("", _ADAPTER, adapter=None, embedding=None, decorator=None, slider=None),
    *off("", _ADAPTER, guidance=None, do_lorm=False),
)
