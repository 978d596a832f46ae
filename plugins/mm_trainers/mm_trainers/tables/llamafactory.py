"""LLaMA-Factory's YAML, beside the keys of TrainingArguments."""

from __future__ import annotations

from mm_core.interchange import Differs, Drop, Key
from mm_trainers.rows import EXPORT, FASTER, LOGGING, OFF, Rows, drops, off, reads
from mm_trainers.tables.arguments import ARGUMENTS, MODEL
from mm_trainers.values import model_name, one_of, words

_OTHERS = "of another stage than sft, or of something that is off"
_LOSS = "another loss than that of the model"
_VOCABULARY = "the tokenizer stays as the model has it"
_VIDEO = "videos are shown as data.train.frames images; it does nothing where there is none"
_ATTENTION = {"auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}
_PREFERENCES = "preferences are of another stage"
_NAMES = {
    **{"columns.messages": ("conversations", "messages"), "columns.images": ("images", "image")},
    **{"columns.videos": ("videos", "video"), "columns.system": ("system",), "columns.tools": ("tools",)},
    **{"tags.role_tag": ("from", "role"), "tags.content_tag": ("value", "content")},
    **{"tags.user_tag": ("human", "user"), "tags.assistant_tag": ("gpt", "assistant")},
    **{"tags.observation_tag": ("observation", "tool"), "tags.function_tag": ("function_call", "tool_call")},
    "tags.system_tag": ("system",),
}
ROWS = "rows of instruction, input and output: write them as messages, or as query and response"

DATA_SET: Rows = (
    Key("*.file_name", note="annotations of a source"),
    Drop("*.formatting", "rows of messages, as here", only=("sharegpt", "openai")),
    Differs("*.formatting", ROWS),
    *(Drop(f"*.{key}", "rows are read by this name here too", only=names) for key, names in _NAMES.items()),
    *(Differs(f"*.columns.{name}", _PREFERENCES) for name in ("chosen", "rejected", "kto_tag")),
    *(Differs(f"*.{name}.*", "write the rows with the usual names") for name in ("columns", "tags")),
    *off("*.", _PREFERENCES, "ranking"),
    Differs("*.num_samples", "all rows are used: shorten the file, or set weight of the source"),
    Differs("*_url", "theirs reads it in the place of file_name: fetch it, and name its file"),
    *(Differs(f"*.{name}", "of a data set on the hub") for name in ("subset", "split", "folder")),
)

_START = "train.adapters.0"


def _alpha(alpha: float | None, rank: int) -> float:
    return 2.0 * rank if alpha is None else float(alpha)


def _targets(value: str | list[str]) -> str | list[str]:
    return "auto" if value == "all" else words(value)


LORA: Rows = (
    Key("lora_rank", f"{_START}.rank", absent=8),
    Key(
        "lora_alpha",
        f"{_START}.alpha",
        _alpha,
        "absent, twice the rank; ours is the rank",
        absent=None,
        of={"lora_rank": 8},
    ),
    Key("lora_dropout", f"{_START}.dropout", float),
    Key("lora_target", f"{_START}.targets", _targets, "by finetuning_type", absent="all"),
    Key("loraplus_lr_ratio", f"{_START}.b_lr_scale", float),
    Key("use_rslora", f"{_START}.rslora"),
    Key("use_dora", f"{_START}.dora"),
    Key("pissa_init", note="train.adapters: init, by pissa_iter"),
    Key(
        "pissa_iter",
        f"{_START}.init",
        one_of({16: "pissa_niter_16", -1: "pissa"}, "pissa_niter_16"),
        absent=16,
        given="pissa_init",
    ),
    Drop("pissa_iter", OFF),
    Key("adapter_name_or_path", f"{_START}.from", model_name, "its files set targets and rank"),
    *off("", "write train.also_train", "additional_target"),
    *off("", "write two adapters: {from: FILE, train: false} and a new one", "create_new_adapter"),
)
WHOLE: Rows = (
    Differs("finetuning_type", "known: lora, full; full is written in its place", only=("freeze", "oft")),
    *drops(
        "",
        "lora_* loraplus_* use_rslora use_dora pissa_* adapter_* additional_target",
        "the whole model is trained",
    ),
    Drop("create_new_adapter", "the whole model is trained"),
)

LLAMA_FACTORY: Rows = (
    *MODEL,
    *off("", "write it behind the name: hub:org/name@REVISION", model_revision="main"),
    Key("flash_attn", "task.attn_implementation", one_of(_ATTENTION)),
    Key("stage", note="sft; other stages are refused"),
    Key("finetuning_type", note="lora, full"),
    Drop("loraplus_lr_embedding", "embeddings are not trained"),
    Drop("pissa_convert", "a file of the adapter is converted always"),
    Key("quantization_bit", "train.base_dtype", one_of({4: "nf4", 8: "int8"}), "rounded by rows, or by 64"),
    *off("", "base_dtype has its own", quantization_method=("bnb", "bitsandbytes"), quantization_type="nf4"),
    Drop("double_quantization", FASTER),
    *reads(
        "freeze_",
        "vision_tower multi_modal_projector language_model",
        "train.freeze, or exclude of the adapter",
    ),
    *off("", "write train.freeze", freeze_trainable_layers=2, freeze_trainable_modules="all"),
    *reads(
        "",
        "dataset eval_dataset dataset_dir",
        "data.train.sources, data.validation.sources, by dataset_info.json",
    ),
    Key("media_dir", note="folder of the sources"),
    Key("template", note="here the chat template of the model's own folder"),
    Key("default_system", "data.train.system"),
    Key(
        "cutoff_len",
        "data.train.max_length",
        note="theirs cuts each turn by its share, here the end of the row",
        absent=2048,
    ),
    Key("packing", "data.train.packing", note="each conversation attends to itself"),
    Key("neat_packing", "data.train.packing", note="each conversation attends to itself"),
    *off("", "all rows are used: shorten the files, or set weight of the sources", "max_samples"),
    *off("", "answers are learnt: rows have `weight`", "train_on_prompt mask_history"),
    *off("", "as the model's template has it", "preserve_thinking tool_format", enable_thinking=True),
    *off("", "weight of the sources", "interleave_probs", mix_strategy="concat"),
    *off("", "held-out rows are files of their own: data.validation", "val_size"),
    *off("", "data.loader.sampler: sequential", "disable_shuffling"),
    Key("image_max_pixels", note="the model's own processor decides"),
    Drop("image_min_pixels", "the model's own processor decides"),
    *off("", "the model's own processor decides", "image_do_pan_and_scan crop_to_patches"),
    *(Differs(f"video_{name}", _VIDEO) for name in ("max_pixels", "min_pixels", "fps", "maxlen")),
    Differs("*audio*", "there is no sound"),
    Key(
        "disable_gradient_checkpointing",
        "engine.recompute_modules",
        lambda off: None if off else "auto",
        absent=False,
    ),
    *off("", "weights that are trained are float32", "pure_bf16"),
    *off("", "engine.param_dtype is of all", "upcast_layernorm upcast_lmhead_output"),
    *off("", "an optimizer that is not here", "use_galore use_apollo use_badam use_adam_mini"),
    *off("", "write optimizer: {type: muon}", "use_muon"),
    *off("", "the model stays as it is", "use_llama_pro mixture_of_depths shift_attn"),
    *off("", "write task.overrides, task.weights", "rope_scaling train_from_scratch"),
    *off("", _LOSS, "use_dft_loss use_eaft_loss use_asft_loss moe_aux_loss_coef"),
    *off(
        "",
        _VOCABULARY,
        "resize_vocab add_tokens add_special_tokens new_special_tokens_config split_special_tokens",
    ),
    *off("", "not here", "use_kt use_mca fp8 early_stopping_steps"),
    *drops("", "galore_* apollo_* badam_* asft_alpha eaft_alpha", _OTHERS),
    *drops("", "pref_* dpo_* kto_* ref_* reward_* ppo_* simpo_*", _OTHERS),
    *drops("", "streaming buffer_size overwrite_cache preprocessing_* tokenized_path", FASTER),
    *drops("", "data_shared_file_system cache_dir low_cpu_mem_usage use_unsloth*", FASTER),
    *drops("", "enable_liger_kernel use_reentrant_gc use_fast_tokenizer ray_*", FASTER),
    *drops("", "use_swanlab swanlab_* print_param_status compute_accuracy placement_strategy", LOGGING),
    *drops("", "export_* infer_* vllm_* sglang_* resources_per_worker", EXPORT),
    *drops("", "ignore_pad_token_for_loss predict_with_generate max_new_tokens", OFF),
    *ARGUMENTS,
)
