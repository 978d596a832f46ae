"""model.json and data.json of vision-language models."""

from __future__ import annotations

from mm_core.interchange import Default, Differs, Drop, Key, Row
from mm_mindspeed.tables.converts import one_of, path

CHECK = "Megatron checks it; the model comes from its own folder"
_FASTER = "it changes speed or memory, not what is computed"
_TEMPLATE = "the chat template of the model's folder decides"
_CACHE = "rows are read and tokenized as they are trained on"
TOKENS = (
    "theirs is the mean over the tokens of a micro-batch; here each token of the global batch counts the same"
)
_PIXELS = (
    "set the limits in the model's preprocessor_config.json: they are resized by the processor alone here"
)
_VIDEO = "videos are shown as `frames` pictures, evenly spread"

LOSS: tuple[Row, ...] = (
    Drop(
        "loss_cfg.loss_type",
        "as here: each token of the global batch counts the same",
        only=("per_token_loss",),
    ),
    Differs("loss_cfg.loss_type", TOKENS),
    Drop("loss_cfg.router_aux_loss_coef", "the router has no loss of its own here either", only=(0, 0.0)),
    Differs("loss_cfg.router_aux_loss_coef", "the router has no loss of its own here"),
    Key(
        "loss_cfg.compute_mode",
        "task.loss",
        one_of({"default": "auto", "chunk": "chunked", "dynamic_chunk": "chunked"}),
    ),
    Key("loss_cfg.chunk_size", "task.chunk_tokens"),
)

LANGUAGE: tuple[Row, ...] = (
    Key("model_id", note="task.auto_class, and where the vision tower is"),
    Key("init_from_hf_path", "task.from_pretrained", path),
    Key("model_name_or_path", "task.from_pretrained", path),
    Key("image_encoder.vision_encoder.freeze", note="train.freeze"),
    Key("image_encoder.vision_projector.freeze", note="train.freeze"),
    Key("vision_encoder.freeze", note="train.freeze"),
    Key("vision_projector.freeze", note="train.freeze"),
    Key("text_decoder.freeze", note="train.freeze"),
    *(
        Key(f"freeze_{each}", note="train.freeze")
        for each in ("vision_model", "vision_projection", "language_model")
    ),
    *LOSS,
    Drop("image_encoder.vision_encoder.*", CHECK),
    Drop("image_encoder.vision_projector.*", CHECK),
    Drop("image_encoder.*", CHECK),
    Drop("vision_encoder.*", CHECK),
    Drop("text_decoder.*", CHECK),
    Drop("text_encoder", "there is none", only=(None,)),
    Drop("video_encoder", "there is none", only=(None,)),
    Drop("*token_id", "in the model's folder"),
    Drop("image_token_index", "in the model's folder"),
    Drop("patch.*", "code of theirs that replaces Megatron's"),
    Differs("audio_encoder.*", "sound is no input of conversations here"),
)
"""Keys of a vision-language model's model.json; YAML files have them under `model`."""

_ROLES = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
_ROLES |= {"messages": "messages", "images": "images", "videos": "videos"}

_ATTR: tuple[Row, ...] = (
    *(
        Drop(f"dataset_param.attr.{name}", "rows are read so", only=(usual, None))
        for name, usual in _ROLES.items()
    ),
    *(
        Drop(f"dataset_param.attr.{name}", "rows are read so", only=(None, False))
        for name in ("system", "system_tag", "observation_tag", "function_tag", "audios", "packing")
    ),
    Differs(
        "dataset_param.attr.*", "rows have the keys messages, images, videos; role, content; user, assistant"
    ),
)

LANGUAGE_DATA: tuple[Row, ...] = (
    Key(
        "dataset_param.dataset_type",
        "data.train.type",
        one_of({"huggingface": "conversations", "multimodal": "internvl/conversations"}),
    ),
    Key("dataset_param.basic_parameters.dataset", note="the annotations of the source"),
    Key("dataset_param.basic_parameters.dataset_dir", note="the folder of the source"),
    Key("dataset_param.basic_parameters.data_path", note="the annotations of the source"),
    Key("dataset_param.basic_parameters.data_folder", note="the folder of the source"),
    Key("dataset_param.basic_parameters.repeat_time", "data.train.sources.0.weight", float),
    Key("dataset_param.basic_parameters.cutoff_len", "data.train.max_length"),
    Default(
        "dataset_param.basic_parameters.cutoff_len",
        "data.train.max_length",
        1024,
        "they cut longer rows; here they are left out, and counted",
    ),
    Drop("dataset_param.basic_parameters.template", _TEMPLATE),
    Drop("dataset_param.basic_parameters.enable_thinking", _TEMPLATE, only=(False, None)),
    Drop("dataset_param.basic_parameters.train_on_prompt", "only answers are trained on", only=(False,)),
    Differs("dataset_param.basic_parameters.train_on_prompt", "only answers are trained on here"),
    Drop("dataset_param.basic_parameters.mask_history", "all answers are trained on", only=(False,)),
    Differs(
        "dataset_param.basic_parameters.mask_history", "all answers of a conversation are trained on here"
    ),
    Drop("dataset_param.basic_parameters.max_samples", "all rows", only=(None,)),
    Differs("dataset_param.basic_parameters.max_samples", "all rows are used: shorten the table"),
    Drop("dataset_param.basic_parameters.tool_format", "no tools", only=(None,)),
    *(
        Drop(f"dataset_param.basic_parameters.{name}", _CACHE)
        for name in ("cache_dir", "overwrite_cache", "preprocessing_*", "preprocess_on_fly", "use_pmcc_data")
    ),
    *_ATTR,
    Key("dataset_param.preprocess_parameters.model_name_or_path", "data.train.processor", path),
    Differs("dataset_param.preprocess_parameters.image_max_pixels", _PIXELS),
    Differs("dataset_param.preprocess_parameters.image_min_pixels", _PIXELS),
    Key("dataset_param.preprocess_parameters.video_maxlen", "data.train.frames", note=_VIDEO),
    Drop("dataset_param.preprocess_parameters.video_*", _VIDEO),
    Drop("dataset_param.preprocess_parameters.use_fast_tokenizer", "as in the model's folder"),
    Drop("dataset_param.preprocess_parameters.fix_mistral_regex", "as in the model's folder"),
    Drop("dataset_param.preprocess_parameters.split_special_tokens", "off here too", only=(False,)),
    Key(
        "dataset_param.preprocess_parameters.trust_remote_code", "data.train.trust_remote_code", only=(True,)
    ),
    Drop("dataset_param.preprocess_parameters.trust_remote_code", "off here too", only=(False,)),
    Drop("dataset_param.preprocess_parameters.use_audio_in_video", "off here too", only=(False,)),
    Drop("dataset_param.preprocess_parameters.image_reader_type", "how their reader works"),
    Drop("dataset_param.preprocess_parameters.train_pipeline.*", "as the model's processor does it"),
    Drop("dataset_param.preprocess_parameters", "none", only=(None,)),
    Key("dataset_param.tokenizer_config.from_pretrained", "data.train.processor", path),
    Drop("dataset_param.tokenizer_config.*", "as in the model's folder"),
    Drop("dataset_param.use_text_processer", "always"),
    Drop("dataset_param.template_name", _TEMPLATE),
    *(
        Drop(f"dataset_param.{name}", "as in the model's folder")
        for name in ("patch_size", "image_size", "down_sample_ratio", "use_thumbnail", "dynamic_image_size")
    ),
    Key("dataset_param.min_dynamic_patch", "data.train.min_tiles"),
    Key("dataset_param.max_dynamic_patch", "data.train.max_tiles"),
    Key("dataset_param.max_num_frame", "data.train.frames", note="evenly spread"),
    Drop("dataset_param.min_num_frame", "short videos have fewer frames"),
    Differs("dataset_param.sampling_method", "frames are evenly spread here, not at random"),
    Key("dataset_param.group_by_length", "data.loader.group_by_length"),
    Key("dataloader_param.sampler_type", note="with shuffle: data.loader.sampler"),
    Key("dataloader_param.shuffle", note="with sampler_type: data.loader.sampler"),
    Drop("dataloader_param.dataloader_mode", "batches as the sampler makes them", only=("sampler",)),
    Key("dataloader_param.drop_last", "data.loader.drop_last"),
    Key("dataloader_param.pin_memory", "data.loader.pin_memory"),
    Key("dataloader_param.num_workers", "data.loader.workers"),
    Key("dataloader_param.prefetch_factor", "data.loader.prefetch"),
    Drop("dataloader_param.enable_preload", _FASTER),
    Drop("val_dataset_param*", "held-out rows do not train: set data.validation and validation.every"),
    Drop("dataloader_param.collate_param.*", "rows are padded as the model needs it"),
)
"""Keys of a vision-language model's data.json; YAML files have them under `data`."""
