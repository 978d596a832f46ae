"""Published vision-language models at small sizes: configs, special tokens and files of the processors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from support.chat_tokenizers import GPT2, LLAMA3, QWEN2, Words

HALF, CLIP = [0.5, 0.5, 0.5], [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
IMAGENET, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
Ids = Mapping[str, int]

LLM: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LLM |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096}
LLM_WITHOUT_HEAD = {key: value for key, value in LLM.items() if key != "head_dim"}
TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TOWER |= {"num_attention_heads": 4, "patch_size": 4}
QWEN_TOWER: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4}
QWEN_TOWER |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32}
LEARNT_PLACES = {"num_position_embeddings": 16, "in_channels": 3}


@dataclass(frozen=True)
class Family:
    """A published vision-language model at a small size.

    Attributes:
        model: class in Transformers.
        config: options of its config, from the ids of the tokenizer and the rows of the embedding.
        words: the tokenizer.
        ends: tokens that end an answer, those of generation_config.json.
        image, video, processor: contents of preprocessor_config.json, video_preprocessor_config.json and
            processor_config.json; {}: no such file, as published.
        template: name of the chat template.
        old_template: whether it is published in chat_template.json.
        published: a start of names that the library writes, and the published one.
    """

    model: str
    config: Callable[[Ids, int], dict[str, Any]]
    words: Words
    ends: tuple[str, ...]
    image: Mapping[str, Any]
    template: str
    video: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    old_template: bool = False
    published: tuple[str, str] | None = None


# -- the Qwen family -----------------------------------------------------------------------------------------

_QWEN_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
_QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")
_QWEN_SETTINGS = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>"}
_QWEN_SETTINGS |= {"pad_token": "<|endoftext|>", "unk_token": None, "add_prefix_space": False}
_TOOLS, _THOUGHTS = (
    ("<tool_call>", "</tool_call>"),
    ("<tool_response>", "</tool_response>", "<think>", "</think>"),
)


def _qwen_image(processor: str, mean: Any, std: Any, **more: Any) -> dict[str, Any]:
    shared = {
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": mean,
        "image_std": std,
    }
    return {**shared, "processor_class": processor, **more}


def _qwen_ids(ids: Ids) -> dict[str, Any]:
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return {key: ids[name] for key, name in names.items()}


def _qwen_text(ids: Ids, rows: int, **more: Any) -> dict[str, Any]:
    ends = {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]}
    return {**LLM, "vocab_size": rows, **ends, "rope_theta": 1e6, **more}


def _qwen2_5_vl(ids: Ids, rows: int) -> dict[str, Any]:
    text = _qwen_text(ids, rows, rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]})
    tower = {**QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1]}  # windows of 2x2 merged patches
    return {"text_config": text, "vision_config": tower, **_qwen_ids(ids)}


_INTERLEAVED = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}


def _qwen3_vl(ids: Ids, rows: int, **more: Any) -> dict[str, Any]:
    text = _qwen_text(ids, rows, rope_scaling=_INTERLEAVED, **more)
    tower = {**QWEN_TOWER, **LEARNT_PLACES, "deepstack_visual_indexes": [0]}
    return {"text_config": text, "vision_config": tower, **_qwen_ids(ids)}


def _qwen3_vl_moe(ids: Ids, rows: int) -> dict[str, Any]:
    sparse = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return _qwen3_vl(ids, rows, **sparse, decoder_sparse_step=1, tie_word_embeddings=False)


def _qwen3_5(ids: Ids, rows: int) -> dict[str, Any]:
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4}
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    layers = ["linear_attention", "full_attention"]  # published: three and one
    ropes = {**_INTERLEAVED, "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    text = _qwen_text(ids, rows, head_dim=32, layer_types=layers, rope_parameters=ropes, **linear)
    return {"text_config": text, "vision_config": {**QWEN_TOWER, **LEARNT_PLACES}, **_qwen_ids(ids)}


_QWEN3_IMAGE = _qwen_image(
    "Qwen3VLProcessor",
    HALF,
    HALF,
    image_processor_type="Qwen2VLImageProcessorFast",
    size={"shortest_edge": 256, "longest_edge": 1024},
)
_QWEN3: dict[str, Any] = {
    "words": Words(QWEN2, _QWEN_SPECIAL, (*_TOOLS, *_THOUGHTS), _QWEN_SETTINGS),
    "ends": _QWEN_ENDS,
    "image": _QWEN3_IMAGE,
    "video": {**_QWEN3_IMAGE, "video_processor_type": "Qwen3VLVideoProcessor"},
}

# -- the others ----------------------------------------------------------------------------------------------


def _gemma3(ids: Ids, rows: int) -> dict[str, Any]:
    layers = ["sliding_attention", "full_attention"]  # published: five and one
    text = {
        **LLM,
        "vocab_size": rows,
        "query_pre_attn_scalar": 8,
        "sliding_window": 16,
        "layer_types": layers,
    }
    tower = {**TOWER, "model_type": "siglip_vision_model", "image_size": 16, "vision_use_head": False}
    names = {"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"}
    names |= {"image_token_index": "<image_soft_token>"}
    known = {key: ids[name] for key, name in names.items()}
    ends = {"eos_token_id": [ids["<eos>"], ids["<end_of_turn>"]]}
    return {"text_config": text, "vision_config": tower, "mm_tokens_per_image": 4, **known, **ends}


_GEMMA_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "[multimodal]", "<start_of_turn>")
_GEMMA_SPECIAL += ("<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>")
_GEMMA_IMAGES = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
_GEMMA_IMAGES |= {"image_token": "<image_soft_token>"}
_GEMMA_SETTINGS = {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>"}
_GEMMA_SETTINGS |= {"pad_token": "<pad>", "unk_token": "<unk>", "add_bos_token": True, "add_eos_token": False}
_GEMMA_SETTINGS |= {**_GEMMA_IMAGES, "extra_special_tokens": _GEMMA_IMAGES}
_NEW_LINES = tuple("\n" * number for number in range(1, 6))  # one token each: published up to 31


def _llava_onevision(ids: Ids, rows: int) -> dict[str, Any]:
    text = {**LLM_WITHOUT_HEAD, "model_type": "qwen2", "vocab_size": rows, "rope_theta": 1e6}
    tower = {**TOWER, "model_type": "siglip_vision_model", "image_size": 8, "vision_use_head": False}
    known = {"image_token_index": ids["<image>"], "video_token_index": ids["<video>"]}
    return {"text_config": text, "vision_config": tower, "image_grid_pinpoints": _PINPOINTS, **known}


_SIGLIP_NAMES = ("vision_tower.", "vision_tower.vision_model.")
_PINPOINTS = [[8 * rows, 8 * columns] for rows in (1, 2) for columns in (1, 2)]  # published: up to 6 x 6
_LLAVA_SIZES = {"size": {"height": 8, "width": 8}, "image_mean": CLIP, "image_std": CLIP_STD}
_LLAVA_SETTINGS = {
    **_QWEN_SETTINGS,
    "extra_special_tokens": {"image_token": "<image>", "video_token": "<video>"},
}


def _idefics(ids: Ids, rows: int, ends: str) -> dict[str, Any]:
    text = {**LLM_WITHOUT_HEAD, "model_type": "llama", "vocab_size": rows, "pad_token_id": ids[ends]}
    tower = {**TOWER, "image_size": 16}
    return {"text_config": text, "vision_config": tower, "scale_factor": 2, "image_token_id": ids["<image>"]}


def _tiles(side: int) -> tuple[str, ...]:
    return tuple(f"<row_{row}_col_{column}>" for row in range(1, side + 1) for column in range(1, side + 1))


def _idefics_image(name: str, longest: int) -> dict[str, Any]:
    sizes = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": 16}}
    steps = {"do_image_splitting": True, "do_pad": True, "image_mean": HALF, "image_std": HALF}
    kinds = {"image_processor_type": f"{name}ImageProcessor", "processor_class": f"{name}Processor"}
    return {**sizes, **steps, **kinds}


_IDEFICS_TOKENS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>")
_SMOLVLM_NAMES = {"fake_image_token": "<fake_token_around_image>", "image_token": "<image>"}
_SMOLVLM_NAMES |= {"end_of_utterance_token": "<end_of_utterance>", "global_image_token": "<global-img>"}
_SMOLVLM_SETTINGS = {
    "tokenizer_class": "GPT2Tokenizer",
    "bos_token": "<|im_start|>",
    "unk_token": "<|endoftext|>",
}
_SMOLVLM_SETTINGS |= {"eos_token": "<end_of_utterance>", "pad_token": "<|im_end|>"}
_SMOLVLM_SETTINGS |= {**_SMOLVLM_NAMES, "extra_special_tokens": _SMOLVLM_NAMES}
_LLAMA_SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>"}
_LLAMA_SETTINGS |= {"eos_token": "<|end_of_text|>", "pad_token": "<|finetune_right_pad_id|>"}
_LLAMA_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|eot_id|>")


def _internvl(ids: Ids, rows: int) -> dict[str, Any]:
    text = {**LLM, "model_type": "qwen3", "vocab_size": rows, "rope_theta": 1e6}
    tower = {**TOWER, "image_size": [16, 16], "patch_size": [4, 4], "attention_bias": True}
    known = {"image_token_id": ids["<IMG_CONTEXT>"], "image_seq_length": 4}
    return {"text_config": text, "vision_config": tower, "tie_word_embeddings": False, **known}


_INTERNVL_NAMES = {"start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>"}
_INTERNVL_NAMES |= {"context_image_token": "<IMG_CONTEXT>"}
_INTERNVL_SIZES = {"size": {"height": 16, "width": 16}, "image_mean": IMAGENET, "image_std": IMAGENET_STD}

FAMILIES: dict[str, Family] = {
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        _qwen2_5_vl,
        Words(QWEN2, _QWEN_SPECIAL, _TOOLS, _QWEN_SETTINGS),
        _QWEN_ENDS,
        _qwen_image(
            "Qwen2_5_VLProcessor",
            CLIP,
            CLIP_STD,
            image_processor_type="Qwen2VLImageProcessor",
            min_pixels=256,
            max_pixels=1024,
        ),
        "qwen2_5_vl",
        old_template=True,
    ),
    "qwen3_vl": Family("Qwen3VLForConditionalGeneration", _qwen3_vl, template="qwen3_vl", **_QWEN3),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoeForConditionalGeneration", _qwen3_vl_moe, template="qwen3_vl", **_QWEN3
    ),
    "gemma3": Family(
        "Gemma3ForConditionalGeneration",
        _gemma3,
        Words("", _GEMMA_SPECIAL, _NEW_LINES, _GEMMA_SETTINGS, starts=True),
        ("<eos>", "<end_of_turn>"),
        {
            **{"image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor"},
            **{"size": {"height": 16, "width": 16}, "image_mean": HALF, "image_std": HALF},
            **{"image_seq_length": 4, "do_pan_and_scan": None, "do_convert_rgb": None},
        },
        "gemma3",
        processor={"image_seq_length": 4, "processor_class": "Gemma3Processor"},
        published=_SIGLIP_NAMES,
    ),
    "llava_onevision": Family(
        "LlavaOnevisionForConditionalGeneration",
        _llava_onevision,
        Words(QWEN2, (*_QWEN_SPECIAL[:3], "<image>", "<video>"), (), _LLAVA_SETTINGS),
        ("<|im_end|>", "<|endoftext|>"),
        {
            **_LLAVA_SIZES,
            "image_grid_pinpoints": _PINPOINTS,
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "processor_class": "LlavaOnevisionProcessor",
        },
        "llava_onevision",
        video={**_LLAVA_SIZES, "video_processor_type": "LlavaOnevisionVideoProcessor"},
        processor={
            **{"num_image_tokens": 4, "vision_feature_select_strategy": "full", "image_token": "<image>"},
            **{"video_token": "<video>", "processor_class": "LlavaOnevisionProcessor"},
        },
        published=_SIGLIP_NAMES,
    ),
    "smolvlm": Family(
        "SmolVLMForConditionalGeneration",
        lambda ids, rows: _idefics(ids, rows, "<|im_end|>"),
        Words(
            GPT2,
            (*_QWEN_SPECIAL[:3], *_IDEFICS_TOKENS, "<global-img>", *_tiles(4)),
            (),
            _SMOLVLM_SETTINGS,
        ),
        ("<end_of_utterance>",),
        _idefics_image("SmolVLM", 32),
        "smolvlm",
        video={"video_processor_type": "SmolVLMVideoProcessor", "size": {"longest_edge": 16}},
        processor={"image_seq_len": 4, "processor_class": "SmolVLMProcessor"},
    ),
    "idefics3": Family(
        "Idefics3ForConditionalGeneration",
        lambda ids, rows: _idefics(ids, rows, "<|finetune_right_pad_id|>"),
        Words(
            LLAMA3,
            (*_LLAMA_SPECIAL, *_IDEFICS_TOKENS, "<global-img>", *_tiles(4)),
            (),
            _LLAMA_SETTINGS,
            starts=True,
        ),
        ("<|end_of_text|>", "<end_of_utterance>"),
        _idefics_image("Idefics3", 48),
        "idefics3",
        processor={"image_seq_len": 4, "processor_class": "Idefics3Processor"},
    ),
    "qwen3_5": Family("Qwen3_5ForConditionalGeneration", _qwen3_5, template="qwen3_5", **_QWEN3),
    "internvl": Family(
        "InternVLForConditionalGeneration",
        _internvl,
        Words(
            QWEN2,
            (*_QWEN_SPECIAL[:3], *_INTERNVL_NAMES.values(), "<quad>", "</quad>", "<box>", "</box>"),
            _TOOLS,
            {**_QWEN_SETTINGS, "extra_special_tokens": _INTERNVL_NAMES},
        ),
        _QWEN_ENDS,
        {
            **_INTERNVL_SIZES,
            **{"crop_to_patches": False, "min_patches": 1, "max_patches": 3},  # published: up to 12
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "processor_class": "InternVLProcessor",
        },
        "internvl",
        video={**_INTERNVL_SIZES, "video_processor_type": "InternVLVideoProcessor"},
        processor={"image_seq_length": 4, "processor_class": "InternVLProcessor"},
    ),
}
