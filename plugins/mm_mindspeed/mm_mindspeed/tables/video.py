"""model.json of diffusion models: Wan 2.1 and 2.2, HunyuanVideo 1.5."""

from __future__ import annotations

from mm_core.interchange import Default, Differs, Drop, Key, Row
from mm_mindspeed.tables.converts import drops, dtype, one_of, path, same, under
from mm_mindspeed.tables.engine import FASTER

_PRESET = "with the other sizes: task.predictor.preset, or the sizes where no preset has them"
_HERE = "Wan's own, and the only one here too"
_PIPELINE = "as in the pipeline's folder"
_PATCH = "code of theirs that replaces Megatron's"
_DENSITIES = {"lognorm": "logit_normal", "uniform": "uniform"}

SIZES = {
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

_DIFFUSION = under(
    "diffusion.",
    *same("num_train_timesteps shift sigma_min sigma_max extra_one_step", "task.scheduler"),
    *same("min_timestep_boundary max_timestep_boundary", "task.scheduler"),
    Default("num_train_timesteps", "task.scheduler.num_train_timesteps", 1000),
    Default("shift", "task.scheduler.shift", 3.0, "ours is 5"),
    Default("sigma_min", "task.scheduler.sigma_min", 0.003 / 1.002, "ours is 0"),
    Default("extra_one_step", "task.scheduler.extra_one_step", False, "ours is true"),
    Default("draw_per", "task.scheduler.draw_per", "micro_batch", "ours is one timestep for each sample"),
    Default("loss_weighting", "task.scheduler.loss_weighting", "gaussian"),
    Key("model_id", "task.scheduler.type", one_of({"wan_flow_match_scheduler": "wan/flow_match"})),
    Drop("inverse_timesteps", "off here too", only=(False,)),
    Drop("reverse_sigmas", "off here too", only=(False,)),
    Drop("guidance_scale", "of sampling alone: task.sample.guidance"),
)
_PREDICTOR = under(
    "predictor.",
    Key("model_id", note="task.predictor.type: wan/transformer, or wan/two_expert of Wan 2.2 A14B"),
    Key("model_type", note=_PRESET),
    *(Key(name, note=_PRESET) for name in SIZES),
    Key("from_pretrained", note="task.predictor.from_pretrained"),
    Drop("dtype", "engine.param_dtype decides"),
    Drop("qk_norm", _HERE, only=(True,)),
    Drop("qk_norm_type", _HERE, only=("rmsnorm",)),
    Drop("text_len", _HERE, only=(512,)),
    Drop("seperated_timestep", "the sizes of TI2V 5B imply it"),
    Drop("clip_token_len", "the image encoder decides"),
    Drop("pipeline_num_layers", "there are no pipeline stages here"),
    Drop("fp32_calculate", "norms and modulation are in float32 here too"),
    *drops("attention_async_offload use_fused_rmsnorm FPDT*", FASTER),
    Differs("vace_dit", "there is no branch for VACE's control clips here"),
)
_AUTOENCODER = under(
    "ae.",
    Key("model_id", "task.autoencoder.type", one_of({"wan_video_vae": "wan/vae"})),
    Key("from_pretrained", "task.autoencoder.from_pretrained", path),
    Key("dtype", "task.autoencoder.dtype", dtype),
    *same("norm_latents norm_mode do_sample", "task.autoencoder"),
    Key("enable_tiling", "task.autoencoder.tiling"),
    Key("tiling_param.tile_size", note="in latents; tiling_param in pixels is 8 times as large"),
    Key("tiling_param.tile_stride", note="in latents; tiling_param in pixels is 8 times as large"),
    Key("tiling_param.*", "task.autoencoder.tiling_param.*"),
    Key("i2v_processor.image_encoder", "task.image_encoder.from_pretrained", path),
    Drop("i2v_processor.i2v_vae_encod*_tiling", "the autoencoder's own tiling decides"),
    Drop("i2v_processor.processor_id", "the predictor's sizes decide how frames are given"),
)

VIDEO: tuple[Row, ...] = (
    Key("task", note="task.frames: none for t2v, [first] for i2v, [first, last] for flf2v"),
    *_PREDICTOR,
    *_DIFFUSION,
    *_AUTOENCODER,
    Key("text_encoder.model_id", "task.text_encoder.type", one_of({"UMT5": "wan/umt5"})),
    Key("text_encoder.from_pretrained", "task.text_encoder.from_pretrained", path),
    Key("text_encoder.dtype", "task.text_encoder.dtype", dtype),
    Drop("text_encoder.hub_backend", "folders are read, or names with hub:"),
    Key("load_video_features", note="data.cache: their .pt files are not read, each clip is encoded once"),
    Key("load_text_features", note="data.cache: their .pt files are not read, each caption is encoded once"),
    Drop("encoder_offload_interval", "frozen encoders in host memory: engine.frozen"),
    Key("patch.muon_optimizer", "optimizer.type", lambda _: "muon", only=(True,)),
    Drop("patch.*", _PATCH),
    Differs("dpo.*", "there is no preference training here"),
    Differs("reward.*", "there is no reward training here"),
)
"""Keys of Wan's model.json."""

HUNYUAN: tuple[Row, ...] = (
    Key("task", note="task.pipeline: that of text, or of a first frame, to video"),
    Drop("predictor.dtype", "engine.param_dtype decides"),
    Key("ae.dtype", "task.autoencoder.dtype", dtype),
    *drops("predictor.* ae.* text_encoder.* image_encoder.*", _PIPELINE),
    Key("diffusion.train_timestep_shift", "task.scheduler.shift", float),
    Key("diffusion.snr", "task.scheduler.timesteps", one_of(_DENSITIES)),
    Drop("diffusion.model_id", "flow matching, as here"),
    Drop("diffusion.num_train_timesteps", "noise levels are continuous here", only=(1000,)),
    Drop("diffusion.reverse", _PIPELINE, only=(True,)),
    Drop("diffusion.sp_size", "engine.context_parallel", only=(1,)),
    Drop("diffusion.dp_replicate", "engine.sharding_size", only=(1,)),
    *drops("diffusion.shift diffusion.solver", "of sampling alone: as in the pipeline's folder"),
    Drop("load_video_features", "clips are encoded here too", only=(False,)),
    Drop("load_text_features", "captions are encoded here too", only=(False,)),
    Drop("patch.*", _PATCH),
)
"""Keys of HunyuanVideo 1.5's model.json."""
