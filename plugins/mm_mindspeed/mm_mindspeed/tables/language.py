"""model.json and data.json of vision-language models."""

from __future__ import annotations

from typing import Any

from mm_core.interchange import Default, Differs, Drop, Key, Row
from mm_mindspeed.tables.converts import FASTER, drops, one_of, path, under
from mm_mindspeed.tables.data import LOADER

_CHECK = "Megatron checks it; the model comes from its own folder"
_TEMPLATE = "the chat template of the model's folder decides"
_CACHE = "rows are read and tokenized as they are trained on"
TOKENS = (
    "theirs is the mean over the tokens of a micro-batch; here each token of the global batch counts the same"
)
_PIXELS = (
    "set the limits in the model's preprocessor_config.json: they are resized by the processor alone here"
)
_FOLDER = "as in the model's folder"
_VIDEO = "videos are shown as data.train.frames images; it does nothing where there is none"

_KINDS = {"huggingface": "conversations", "multimodal": "internvl/conversations"}
_COMPUTED = {"default": "auto", "chunk": "chunked", "dynamic_chunk": "chunked"}


def _one(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("several tables: name each in data.train.sources")
    return value


LOSS = under(
    "loss_cfg.",
    Drop("loss_type", "each token of the global batch counts the same here too", only=("per_token_loss",)),
    Differs("loss_type", TOKENS),
    Drop("router_aux_loss_coef", "the router has no loss of its own here either", only=(0, 0.0)),
    Differs("router_aux_loss_coef", "the router has no loss of its own here"),
    Key("compute_mode", "task.loss", one_of(_COMPUTED)),
    Key("chunk_size", "task.chunk_tokens"),
)
FROZEN = {
    "tower": ("image_encoder.vision_encoder.freeze", "vision_encoder.freeze", "freeze_vision_model"),
    "projector": (
        *("image_encoder.vision_projector.freeze", "vision_projector.freeze"),
        "freeze_vision_projection",
    ),
    "language_model": ("text_decoder.freeze", "freeze_language_model"),
}
"""Part of a model -> keys that freeze it."""

LANGUAGE: tuple[Row, ...] = (
    Key("model_id", note="task.auto_class, and where the vision tower is"),
    Key("init_from_hf_path", "task.from_pretrained", path),
    Key("model_name_or_path", "task.from_pretrained", path),
    *(Key(name, note="train.freeze") for names in FROZEN.values() for name in names),
    Default("loss_cfg.loss_type", "", "default", TOKENS),
    *LOSS,
    *drops("image_encoder.* vision_encoder.* text_decoder.*", _CHECK),
    Drop("text_encoder", "there is none", only=(None,)),
    Drop("video_encoder", "there is none", only=(None,)),
    *drops("*token_id image_token_index", "in the model's folder"),
    Drop("patch.*", "code of theirs that replaces Megatron's"),
    Differs("audio_encoder.*", "sound is no input of conversations here"),
)
"""Keys of a vision-language model's model.json; YAML files have them under `model`."""

_USUAL: dict[str, tuple[Any, ...]] = {name: (name, None) for name in ("messages", "images", "videos")}
_USUAL |= {f"{name}_tag": (name, None) for name in ("role", "content", "user", "assistant")}
_USUAL |= dict.fromkeys(("system", "system_tag", "observation_tag", "function_tag"), (None, False))
_USUAL |= dict.fromkeys(("audios", "packing"), (None, False))
"""Keys of rows -> the values that are taken here."""

_BASIC = under(
    "dataset_param.basic_parameters.",
    *(Key(name, "data.train.sources.0.annotations", _one) for name in ("dataset", "data_path")),
    *(Key(name, "data.train.sources.0.folder", _one) for name in ("dataset_dir", "data_folder")),
    Key("repeat_time", "data.train.sources.0.weight", float),
    Key("cutoff_len", "data.train.max_length"),
    Drop("template", _TEMPLATE),
    Drop("enable_thinking", _TEMPLATE, only=(False, None)),
    Drop("train_on_prompt", "only answers are trained on", only=(False,)),
    Differs("train_on_prompt", "only answers are trained on here"),
    Drop("mask_history", "all answers are trained on", only=(False,)),
    Differs("mask_history", "all answers of a conversation are trained on here"),
    Drop("max_samples", "all rows", only=(None,)),
    Differs("max_samples", "all rows are used: shorten the table"),
    Drop("tool_format", "no tools", only=(None,)),
    *drops("cache_dir overwrite_cache preprocessing_* preprocess_on_fly use_pmcc_data", _CACHE),
)
_PREPROCESS = under(
    "dataset_param.preprocess_parameters.",
    Key("model_name_or_path", "data.train.processor", path),
    Differs("image_max_pixels", _PIXELS),
    Differs("image_min_pixels", _PIXELS),
    Key("video_maxlen", "data.train.frames", note="most frames of a video, evenly spread"),
    Differs("video_*", _VIDEO),
    *drops("use_fast_tokenizer fix_mistral_regex", _FOLDER),
    Drop("split_special_tokens", "off here too", only=(False,)),
    Key("trust_remote_code", "data.train.trust_remote_code", only=(True,)),
    Drop("trust_remote_code", "off here too", only=(False,)),
    Drop("use_audio_in_video", "off here too", only=(False,)),
    Drop("image_reader_type", "how their reader works"),
    Drop("train_pipeline.*", "as the model's processor does it"),
)

LANGUAGE_DATA: tuple[Row, ...] = (
    Key("dataset_param.dataset_type", "data.train.type", one_of(_KINDS)),
    *_BASIC,
    *(Drop(f"dataset_param.attr.{name}", "rows are read so", only=usual) for name, usual in _USUAL.items()),
    Differs("dataset_param.attr.*", "rows have messages, images, videos; role, content; user, assistant"),
    *_PREPROCESS,
    Drop("dataset_param.preprocess_parameters", "none", only=(None,)),
    Key("dataset_param.tokenizer_config.from_pretrained", "data.train.processor", path),
    *under(
        "dataset_param.",
        Drop("use_text_processer", "always"),
        Drop("template_name", _TEMPLATE),
        *drops("tokenizer_config.* patch_size image_size down_sample_ratio use_thumbnail", _FOLDER),
        Drop("dynamic_image_size", _FOLDER),
        Key("min_dynamic_patch", "data.train.min_tiles"),
        Key("max_dynamic_patch", "data.train.max_tiles"),
        Key("max_num_frame", "data.train.frames", note="evenly spread"),
        Drop("min_num_frame", "short videos have fewer frames"),
        Differs("sampling_method", "frames are evenly spread here, not at random"),
        Key("group_by_length", "data.loader.group_by_length"),
    ),
    *LOADER,
    Drop("dataloader_param.enable_preload", FASTER),
    Drop("dataloader_param.collate_param.*", "rows are padded as the model needs it"),
    Drop("val_dataset_param*", "held-out rows do not train: set data.validation and validation.every"),
)
"""Keys of a vision-language model's data.json; YAML files have them under `data`."""
