"""Converts config.json of OpenGVLab's `InternVLChatModel` to Transformers' `InternVLConfig`, and back.

Sources for the meaning of the keys: OpenGVLab's configuration_internvl_chat.py, configuration_intern_vit.py
and modeling_internvl_chat.py (https://github.com/OpenGVLab/InternVL, internvl_chat/internvl/model), and the
conversion behind the published Transformers folders (Transformers' source tree,
src/transformers/models/internvl/convert_internvl_weights_to_hf.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mm_core.errors import ContractError
from mm_core.weights import read_mapping

MODEL_TYPE, CLASS = "internvl_chat", "InternVLChatModel"

LANGUAGE_MODELS = MappingProxyType(
    {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
)
"""Language models with the same tensor names in both layouts: type -> class."""

IMAGE_TOKEN = "<IMG_CONTEXT>"
_PUBLISHED_IDS = {"qwen2": 151667, "qwen3": 151671, "qwen3_moe": 151671}
"""Ids of IMAGE_TOKEN in the published tokenizers, for folders without a tokenizer."""

_VISION = {
    "attention_bias": "qkv_bias",
    "attention_dropout": "attention_dropout",
    "hidden_act": "hidden_act",
    "hidden_dropout_prob": "dropout",
    "hidden_size": "hidden_size",
    "image_size": "image_size",
    "initializer_range": "initializer_range",
    "intermediate_size": "intermediate_size",
    "layer_norm_eps": "layer_norm_eps",
    "layer_scale_init_value": "initializer_factor",
    "norm_type": "norm_type",
    "num_attention_heads": "num_attention_heads",
    "num_channels": "num_channels",
    "num_hidden_layers": "num_hidden_layers",
    "patch_size": "patch_size",
    "use_qk_norm": "qk_normalization",
}
"""Keys of `InternVLVisionConfig` -> keys of `InternVisionConfig`."""

_VISION_DEFAULTS = {"qkv_bias": False, "qk_normalization": True, "norm_type": "rms_norm", "dropout": 0.0}
"""Defaults of `InternVisionConfig` that differ from those of `InternVLVisionConfig`."""

_CHAT_DEFAULTS = {
    "dynamic_image_size": True,
    "max_dynamic_patch": 12,
    "min_dynamic_patch": 1,
    "pad2square": False,
    "ps_version": "v2",
    "template": "internvl2_5",
    "use_backbone_lora": 0,
    "use_llm_lora": 0,
    "use_thumbnail": True,
}
"""Usage settings in InternVL 3.5's config.json. Transformers stores them in the processor's files."""

_TILES = ("dynamic_image_size", "max_dynamic_patch", "min_dynamic_patch", "use_thumbnail")
"""Those settings that define how images are cut. Transformers has keys for some, and keeps unknown keys."""

_LEGACY = """
    add_cross_attention bad_words_ids begin_suppress_tokens chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id id2label is_decoder is_encoder_decoder label2id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_scores prefix problem_type pruned_heads remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torchscript typical_p
    use_bfloat16
"""
"""Keys in every config of older versions of Transformers, mostly for generation."""

_NOT_OF_MODELS = {
    *_LEGACY.split(),
    *("architectures", "attn_implementation", "auto_map", "dtype", "torch_dtype", "transformers_version"),
}
"""Keys of `llm_config` that do not describe the model."""


def is_original(folder: Path) -> bool:
    """Whether an InternVL folder has OpenGVLab's layout: its config.json is that of an
    `InternVLChatModel`."""
    return read_mapping(folder / "config.json").get("model_type") == MODEL_TYPE


def from_original(given: Mapping[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """Converts OpenGVLab's config.json of InternVL to that of Transformers'
    `InternVLForConditionalGeneration`.

    Args:
        given: config.json of `InternVLChatModel`.
        folder: folder of the file; its tokenizer contains the id of the image token.

    Raises:
        ContractError: Transformers' class does not support the language model or the pixel shuffle, or the
            tokenizer has no image token.
    """
    where = None if folder is None else str(folder)
    language, seen = _mapping(given, "llm_config", where), _mapping(given, "vision_config", where)
    kind = _language_model(language, where)
    if given.get("ps_version", "v1") != "v2":
        raise ContractError(
            f"this InternVL has another pixel shuffle: ps_version {given.get('ps_version', 'v1')!r}",
            where=where,
            accepted="ps_version v2, as in InternVL 1.5 to 3.5",
        )
    text = {key: value for key, value in language.items() if _of_model(key)}
    tied = bool(language.get("tie_word_embeddings", False))
    seen = {**_VISION_DEFAULTS, **seen}
    vision: dict[str, Any] = {ours: seen[theirs] for ours, theirs in _VISION.items() if theirs in seen}
    for key in ("image_size", "patch_size"):
        vision[key] = _pair(vision.get(key, {"image_size": 448, "patch_size": 14}[key]))
    ratio = given.get("downsample_ratio", 0.5)
    side = given.get("force_image_size") or vision["image_size"][0]
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "text_config": {**text, "model_type": kind, "tie_word_embeddings": tied},
        "vision_config": {**vision, "model_type": "internvl_vision"},
        "image_token_id": _image_token(folder, kind),
        "image_seq_length": int((side // vision["patch_size"][0] * ratio) ** 2),
        "downsample_ratio": ratio,
        "vision_feature_layer": given.get("select_layer", -1),
        "tie_word_embeddings": tied,
        **{key: given[key] for key in _TILES if given.get(key, _CHAT_DEFAULTS[key]) != _CHAT_DEFAULTS[key]},
    }


def to_original(given: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Converts Transformers' config.json of InternVL to that of OpenGVLab's `InternVLChatModel`.

    Args:
        given: config.json of `InternVLForConditionalGeneration`.
        base: config.json, or a part of it, of the `InternVLChatModel` that training started from. Its usage
            settings (template, tiles, code) are kept.

    Raises:
        ContractError: InternVLChatModel does not support the language model or options of the vision tower.
    """
    text, seen = dict(given["text_config"]), given["vision_config"]
    kind = _language_model(text, None)
    _check_vision(given, seen)
    base = base or {}
    ropes = dict(text.pop("rope_parameters", None) or {})
    if ropes:
        text["rope_theta"] = ropes.pop("rope_theta", 10000.0)
        text["rope_scaling"] = None if ropes.get("rope_type", "default") == "default" else ropes
    if "num_local_experts" in text:  # Transformers' newer name, which OpenGVLab's code does not read
        text["num_experts"] = text.pop("num_local_experts")
    tied = bool(given.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    text |= {"architectures": [LANGUAGE_MODELS[kind]], "tie_word_embeddings": tied}
    vision = {theirs: seen[ours] for ours, theirs in _VISION.items() if ours in seen}
    vision |= {key: _pair(vision[key])[0] for key in ("image_size", "patch_size") if key in vision}
    vision |= {"architectures": ["InternVisionModel"], "model_type": "intern_vit_6b", "drop_path_rate": 0.0}
    made = {
        "architectures": [CLASS],
        "downsample_ratio": given["downsample_ratio"],
        "force_image_size": vision["image_size"],
        "llm_config": {**_kept(base, "llm_config"), **text},
        "model_type": MODEL_TYPE,
        "select_layer": given["vision_feature_layer"],
        "tie_word_embeddings": tied,
        "vision_config": {**_kept(base, "vision_config"), **vision},
    }
    stays = {key: value for key, value in base.items() if key not in ("torch_dtype", "dtype")}
    return {**_CHAT_DEFAULTS, **{key: given[key] for key in _TILES if key in given}, **stays, **made}


def _kept(base: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The entry `auto_map` in a part of the original config.json, which names its code files."""
    found = base.get(key)
    return {"auto_map": found["auto_map"]} if isinstance(found, Mapping) and "auto_map" in found else {}


def _of_model(key: str) -> bool:
    return not key.startswith("_") and key not in _NOT_OF_MODELS


def _mapping(given: Mapping[str, Any], key: str, where: str | None) -> Mapping[str, Any]:
    found = given.get(key)
    if not isinstance(found, Mapping):
        raise ContractError(
            f"config.json has the model_type of {CLASS}, but no {key}",
            where=where,
            accepted="config.json of an InternVL, with llm_config and vision_config",
        )
    return found


def _language_model(text: Mapping[str, Any], where: str | None) -> str:
    kind = text.get("model_type")
    if kind not in LANGUAGE_MODELS:
        listed = text.get("architectures") or [kind]
        raise ContractError(
            f"this InternVL's language model is {listed[0]}, which cannot be converted",
            where=where,
            accepted=", ".join(LANGUAGE_MODELS.values()),
            hint="use a model of InternVL 3 or 3.5 without GPT-OSS",
        )
    return str(kind)


def _check_vision(given: Mapping[str, Any], seen: Mapping[str, Any]) -> None:
    """Raises ContractError for options that InternVisionModel does not support."""
    wanted: dict[str, tuple[object, object]] = {
        "vision_config.use_mask_token": (seen.get("use_mask_token", False), False),
        "vision_config.use_mean_pooling": (seen.get("use_mean_pooling", True), True),
        "vision_config.use_absolute_position_embeddings": (
            seen.get("use_absolute_position_embeddings", True),
            True,
        ),
        "vision_feature_select_strategy": (given.get("vision_feature_select_strategy", "default"), "default"),
        "projector_hidden_act": (given.get("projector_hidden_act", "gelu"), "gelu"),
    }
    for key, (found, accepted) in wanted.items():
        if found != accepted:
            raise ContractError(
                f"{CLASS} does not support {key} {found!r}",
                accepted=str(accepted),
                hint="export with --to core/transformers, which supports any such model of Transformers",
            )


def _pair(size: Any) -> list[int]:
    return [int(one) for one in size] if isinstance(size, list | tuple) else [int(size), int(size)]


def _image_token(folder: Path | None, kind: str) -> int:
    """Id of `IMAGE_TOKEN`: from the folder's tokenizer; without one, from the published tokenizers."""
    if folder is None:
        return _PUBLISHED_IDS[kind]
    whole, settings = read_mapping(folder / "tokenizer.json"), read_mapping(folder / "tokenizer_config.json")
    added: dict[str, Any] = dict(read_mapping(folder / "added_tokens.json"))
    added |= {one["content"]: one["id"] for one in whole.get("added_tokens", ())}
    added |= {one["content"]: int(key) for key, one in settings.get("added_tokens_decoder", {}).items()}
    if IMAGE_TOKEN in added:
        return int(added[IMAGE_TOKEN])
    if added or settings:
        raise ContractError(
            f"the tokenizer has no {IMAGE_TOKEN}, the token for images",
            where=str(folder),
            accepted="the tokenizer files of the same InternVL",
        )
    return _PUBLISHED_IDS[kind]
