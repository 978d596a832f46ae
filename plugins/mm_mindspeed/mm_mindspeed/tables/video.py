"""model.json of diffusion models: Wan 2.1 and 2.2, HunyuanVideo 1.5."""

from __future__ import annotations

from mm_core.interchange.migration import Default, Differs, Drop, Key, Row
from mm_mindspeed.tables.converts import dtype, one_of, path

_PRESET = "with the other sizes: task.predictor.preset, or the sizes where no preset has them"
_FASTER = "it changes speed or memory, not what is computed"
_HERE = "Wan's own, and the only one here too"
_PIPELINE = "as in the pipeline's folder"

_SIZES = {
    "patch_size": "patch_size",
    "in_dim": "in_channels",
    "out_dim": "out_channels",
    "text_dim": "text_dim",
    "freq_dim": "freq_dim",
    "ffn_dim": "ffn_dim",
    "num_layers": "num_layers",
    "num_heads": "num_attention_heads",
    "hidden_size": "attention_head_dim",
    "img_dim": "image_dim",
    "cross_attn_norm": "cross_attn_norm",
    "eps": "eps",
    "max_seq_len": "rope_max_seq_len",
}
"""Sizes of Wan's transformer: their names -> ours."""

_DIFFUSION: tuple[Row, ...] = (
    Key("diffusion.num_train_timesteps", "task.scheduler.num_train_timesteps"),
    Default("diffusion.num_train_timesteps", "task.scheduler.num_train_timesteps", 1000),
    Key("diffusion.shift", "task.scheduler.shift", float),
    Default("diffusion.shift", "task.scheduler.shift", 3.0, "ours is 5"),
    Key("diffusion.sigma_min", "task.scheduler.sigma_min", float),
    Default("diffusion.sigma_min", "task.scheduler.sigma_min", 0.003 / 1.002, "ours is 0"),
    Key("diffusion.sigma_max", "task.scheduler.sigma_max", float),
    Key("diffusion.extra_one_step", "task.scheduler.extra_one_step"),
    Default("diffusion.extra_one_step", "task.scheduler.extra_one_step", False, "ours is true"),
    Key("diffusion.min_timestep_boundary", "task.scheduler.min_timestep_boundary", float),
    Key("diffusion.max_timestep_boundary", "task.scheduler.max_timestep_boundary", float),
    Default(
        "diffusion.draw_per",
        "task.scheduler.draw_per",
        "micro_batch",
        "they draw one timestep for a micro-batch; ours is one for each sample",
    ),
    Default("diffusion.loss_weighting", "task.scheduler.loss_weighting", "gaussian"),
    Key("diffusion.model_id", "task.scheduler.type", one_of({"wan_flow_match_scheduler": "wan/flow_match"})),
    Drop("diffusion.inverse_timesteps", "off here too", only=(False,)),
    Drop("diffusion.reverse_sigmas", "off here too", only=(False,)),
    Drop("diffusion.guidance_scale", "of sampling alone: task.sample.guidance"),
)

VIDEO: tuple[Row, ...] = (
    Key("task", note="task.frames: none for t2v, [first] for i2v, [first, last] for flf2v"),
    Key("predictor.model_id", note="task.predictor.type: wan/transformer, or wan/two_expert of Wan 2.2 A14B"),
    Key("predictor.model_type", note=_PRESET),
    *(Key(f"predictor.{name}", note=_PRESET) for name in _SIZES),
    Key("predictor.from_pretrained", note="task.predictor.from_pretrained"),
    Drop("predictor.dtype", "engine.param_dtype decides"),
    Drop("predictor.qk_norm", _HERE, only=(True,)),
    Drop("predictor.qk_norm_type", _HERE, only=("rmsnorm",)),
    Drop("predictor.text_len", _HERE, only=(512,)),
    Drop("predictor.seperated_timestep", "the sizes of TI2V 5B imply it"),
    Drop("predictor.clip_token_len", "the image encoder decides"),
    Drop("predictor.pipeline_num_layers", "there are no pipeline stages here"),
    Drop("predictor.attention_async_offload", _FASTER),
    Drop("predictor.use_fused_rmsnorm", _FASTER),
    Drop("predictor.fp32_calculate", "norms and modulation are in float32 here too"),
    Drop("predictor.FPDT*", _FASTER),
    Differs("predictor.vace_dit", "there is no branch for VACE's control clips here"),
    *_DIFFUSION,
    Key("ae.model_id", "task.autoencoder.type", one_of({"wan_video_vae": "wan/vae"})),
    Key("ae.from_pretrained", "task.autoencoder.from_pretrained", path),
    Key("ae.dtype", "task.autoencoder.dtype", dtype),
    Key("ae.norm_latents", "task.autoencoder.norm_latents"),
    Key("ae.norm_mode", "task.autoencoder.norm_mode"),
    Key("ae.do_sample", "task.autoencoder.do_sample"),
    Key("ae.enable_tiling", "task.autoencoder.tiling"),
    Key("ae.tiling_param.tile_size", note="in latents; tiling_param in pixels is 8 times as large"),
    Key("ae.tiling_param.tile_stride", note="in latents; tiling_param in pixels is 8 times as large"),
    Key("ae.tiling_param.*", "task.autoencoder.tiling_param.*"),
    Key("ae.i2v_processor.image_encoder", "task.image_encoder.from_pretrained", path),
    Drop("ae.i2v_processor.i2v_vae_encod*_tiling", "the autoencoder's own tiling decides"),
    Drop("ae.i2v_processor.processor_id", "the predictor's sizes decide how frames are given"),
    Key("text_encoder.model_id", "task.text_encoder.type", one_of({"UMT5": "wan/umt5"})),
    Key("text_encoder.from_pretrained", "task.text_encoder.from_pretrained", path),
    Key("text_encoder.dtype", "task.text_encoder.dtype", dtype),
    Drop("text_encoder.hub_backend", "folders are read, or names with hub:"),
    Key("load_video_features", note="data.cache: their .pt files are not read, each clip is encoded once"),
    Key("load_text_features", note="data.cache: their .pt files are not read, each caption is encoded once"),
    Drop("encoder_offload_interval", "frozen encoders in host memory: engine.frozen"),
    Key("patch.muon_optimizer", only=(True,), ours="optimizer.type", convert=lambda _: "muon"),
    Drop("patch.*", "code of theirs that replaces Megatron's"),
    Differs("dpo.*", "there is no preference training here"),
    Differs("reward.*", "there is no reward training here"),
)
"""Keys of Wan's model.json."""

HUNYUAN: tuple[Row, ...] = (
    Key("task", note="task.pipeline: that of text, or of a first frame, to video"),
    Drop("predictor.from_pretrained", _PIPELINE),
    Drop("predictor.dtype", "engine.param_dtype decides"),
    Drop("predictor.*", _PIPELINE),
    Key("ae.dtype", "task.autoencoder.dtype", dtype),
    Drop("ae.*", _PIPELINE),
    Drop("text_encoder.*.from_pretrained", _PIPELINE),
    Drop("text_encoder.*", _PIPELINE),
    Drop("image_encoder.*", _PIPELINE),
    Drop("diffusion.model_id", "flow matching, as here"),
    Key("diffusion.train_timestep_shift", "task.scheduler.shift", float),
    Drop("diffusion.shift", "of sampling alone: as in the pipeline's folder"),
    Key(
        "diffusion.snr", "task.scheduler.timesteps", one_of({"lognorm": "logit_normal", "uniform": "uniform"})
    ),
    Drop("diffusion.num_train_timesteps", "noise levels are continuous here", only=(1000,)),
    Drop("diffusion.solver", "of sampling alone: as in the pipeline's folder"),
    Drop("diffusion.reverse", _PIPELINE, only=(True,)),
    Drop("diffusion.sp_size", "engine.context_parallel", only=(1,)),
    Drop("diffusion.dp_replicate", "engine.sharding_size", only=(1,)),
    Drop("load_video_features", "clips are encoded here too", only=(False,)),
    Drop("load_text_features", "captions are encoded here too", only=(False,)),
    Drop("patch.*", "code of theirs that replaces Megatron's"),
)
"""Keys of HunyuanVideo 1.5's model.json."""

SIZES = _SIZES
