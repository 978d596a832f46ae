"""model.json of diffusion models: Wan 2.1 and 2.2, HunyuanVideo 1.5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mm_core.interchange import Default, Differs, Drop, Key, Row
from mm_mindspeed.tables.converts import FASTER, always, drops, dtype, notes, one_of, path, same, under

_PRESET = "with the sizes: task.predictor.preset, where there is one of these sizes"
_HERE = "Wan's own, and the only one here too"
_OWN = (
    "no predictor of this name is here, and Wan's transformer stands in its place: make a plugin of your"
    " class with `mm plugins new NAME --from-class FILE:CLASS`"
)
_FOLDER = "HunyuanVideo-1.5-Diffusers-720p_{}"
_SAME = "the pipeline of Diffusers, with the same weights"
_PIPELINE = "as in the pipeline's folder"
_PATCH = "code of theirs that replaces Megatron's"
_DENSITIES = {"lognorm": "logit_normal", "uniform": "uniform"}

_TILE = "task.autoencoder.tiling_param.tile_sample_"
_LOOKS = "predictor.model_type=i2v|flf2v"
_FRAMES: dict[str, list[str]] = {"t2v": [], "i2v": ["first"], "ti2v": ["first"], "flf2v": ["first", "last"]}
"""Task -> the frames of a clip that are given."""


def _pixels(side: str) -> str:
    return f"{_TILE}{side}_height {_TILE}{side}_width"


def _eight(latents: Any) -> list[int]:
    return [8 * int(each) for each in latents]


def _typed(convert: Callable[[Any], Any], name: str = "schedule") -> Callable[[Any], list[Any]]:
    """A conversion to a value and the component that has it."""
    return lambda value: [convert(value), f"diffusers/{name}"]


_DIFFUSION = under(
    "diffusion.",
    *same("sigma_max min_timestep_boundary max_timestep_boundary", "task.scheduler"),
    Key("num_train_timesteps", "task.scheduler.num_train_timesteps", absent=1000),
    Key("shift", "task.scheduler.shift", note="our default is 5", absent=3.0),
    Key("sigma_min", "task.scheduler.sigma_min", note="our default is 0", absent=0.003 / 1.002),
    Key("extra_one_step", "task.scheduler.extra_one_step", note="our default is true", absent=False),
    Default("draw_per", "task.scheduler.draw_per", "micro_batch", "ours is one timestep for each sample"),
    Default("loss_weighting", "task.scheduler.loss_weighting", "gaussian"),
    Key("model_id", "task.scheduler.type", one_of({"wan_flow_match_scheduler": "wan/flow_match"})),
    Drop("inverse_timesteps", "off here too", only=(False,)),
    Drop("reverse_sigmas", "off here too", only=(False,)),
    Drop("guidance_scale", "of sampling alone: task.sample.guidance"),
)
_PREDICTOR = under(
    "predictor.",
    Key("model_id", note="task.predictor.type: wan/transformer, or wan/two_expert of A14B", only=("wandit",)),
    Differs("model_id", _OWN),
    Key("model_type", "task.image_encoder.type", always("wan/clip_vision"), only=("i2v", "flf2v")),
    Key("model_type", note=_PRESET),
    *same("patch_size text_dim freq_dim ffn_dim num_layers cross_attn_norm eps", "task.predictor"),
    Key("in_dim", "task.predictor.in_channels"),
    Key("out_dim", "task.predictor.out_channels task.autoencoder.latent_channels", lambda n: [n, n]),
    Default("out_dim", "task.autoencoder.latent_channels", 16),
    Key("num_heads", "task.predictor.num_attention_heads"),
    Key("hidden_size", note="by num_heads: task.predictor.attention_head_dim"),
    Key("max_seq_len", "task.predictor.rope_max_seq_len"),
    Key("img_dim", "task.predictor.image_dim", given="predictor.model_type=i2v"),
    Key("img_dim", note="of models that look at an image alone"),
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
    Key("tiling_param.tile_size", _pixels("min"), _eight, "pixels, 8 to a latent"),
    Key("tiling_param.tile_stride", _pixels("stride"), _eight, "pixels, 8 to a latent"),
    Key("tiling_param.*", "task.autoencoder.tiling_param.*"),
    Key("i2v_processor.image_encoder", "task.image_encoder.from_pretrained", path, given=_LOOKS),
    Drop("i2v_processor.image_encoder", "the predictor looks at no image"),
    Drop("i2v_processor.i2v_vae_encod*_tiling", "the autoencoder's own tiling decides"),
    Drop("i2v_processor.processor_id", "the predictor's sizes decide how frames are given"),
)

VIDEO: tuple[Row, ...] = (
    Key("task", "task.frames", one_of(_FRAMES), absent="t2v", given="predictor.in_dim!=16"),
    Key("task", note="nothing: the predictor takes no frame"),
    *_PREDICTOR,
    *_DIFFUSION,
    *_AUTOENCODER,
    Key("text_encoder.model_id", "task.text_encoder.type", one_of({"UMT5": "wan/umt5"})),
    Key("text_encoder.from_pretrained", "task.text_encoder.from_pretrained", path),
    Key("text_encoder.dtype", "task.text_encoder.dtype", dtype),
    Drop("text_encoder.hub_backend", "folders are read, or names with hub:"),
    *notes("load_video_features load_text_features", "data.cache: each clip is encoded once, no .pt is read"),
    Drop("encoder_offload_interval", "frozen encoders in host memory: engine.frozen"),
    Key("patch.muon_optimizer", "optimizer.type", lambda _: "muon", only=(True,)),
    Drop("patch.*", _PATCH),
    Differs("dpo.*", "there is no preference training here"),
    Differs("reward.*", "there is no reward training here"),
)
"""Keys of Wan's model.json."""

HUNYUAN: tuple[Row, ...] = (
    Key("task", "task.pipeline", _FOLDER.format, _SAME, absent="t2v"),
    Drop("predictor.dtype", "engine.param_dtype decides"),
    Key("ae.dtype", "task.autoencoder.dtype task.autoencoder.type", _typed(dtype, "vae")),
    *drops("predictor.* ae.* text_encoder.* image_encoder.*", _PIPELINE),
    Key("diffusion.train_timestep_shift", "task.scheduler.shift task.scheduler.type", _typed(float)),
    Key("diffusion.snr", "task.scheduler.timesteps task.scheduler.type", _typed(one_of(_DENSITIES))),
    Drop("diffusion.model_id", "flow matching, as here"),
    Drop("diffusion.num_train_timesteps", "noise levels are continuous here", only=(1000,)),
    Drop("diffusion.reverse", _PIPELINE, only=(True,)),
    Drop("diffusion.sp_size", "engine.context_parallel", only=(1,)),
    Drop("diffusion.dp_replicate", "engine.sharding_size", only=(1,)),
    *drops("diffusion.shift diffusion.solver", "of sampling alone: as in the pipeline's folder"),
    *(Drop(f"load_{each}_features", "encoded here too", only=(False,)) for each in ("video", "text")),
    Drop("patch.*", _PATCH),
)
"""Keys of HunyuanVideo 1.5's model.json."""
