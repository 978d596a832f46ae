"""LLaMA-Factory's YAML, beside the keys of TrainingArguments."""

from __future__ import annotations

from mm_core.interchange import Differs, Drop, Key
from mm_trainers.rows import EXPORT, FASTER, LOGGING, OFF, Rows, drops, off, reads, takes
from mm_trainers.tables.arguments import ARGUMENTS
from mm_trainers.values import model_name, one_of, words

_OTHERS = "of another stage than sft, or of something that is off"
_VIDEO = "videos are shown as data.train.frames images; it does nothing where there is none"
_ATTENTION = {"auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}
_COLUMNS = ("conversations", "messages", "images", "image", "videos", "video", "system", "tools")
_TAGS: tuple[str, ...] = (
    "from",
    "role",
    "value",
    "content",
    "human",
    "user",
    "gpt",
    "assistant",
    "observation",
    "tool",
)
_TAGS += ("function_call", "tool_call", "system")
_USUAL = "rows are read by this name here too"
_NAMES = "write the rows with the usual names, and without preferences"
_WHOLE = "the whole model is trained"
_ITSELF = "each conversation attends to itself"
_OWN = "an optimizer, a loss, a layer or a vocabulary of its own"
_PROCESSOR = "the model's own processor decides"
_CUT = "theirs cuts each turn by its share, here the end of the row"
_TWICE = "absent, twice the rank; ours is the rank"
_FREEZE, _INFO = (
    "train.freeze, or exclude of the adapter",
    "data.train, data.validation, by dataset_info.json",
)
ROWS = "rows of instruction, input and output: write them as messages, or as query and response"

DATA_SET: Rows = (
    Key("*.file_name", note="annotations of a source"),
    Drop("*.formatting", "rows of messages, as here", only=("sharegpt", "openai")),
    Differs("*.formatting", ROWS),
    Drop("*.columns.*", _USUAL, only=_COLUMNS),
    Drop("*.tags.*", _USUAL, only=_TAGS),
    *(Differs(f"*.{name}.*", _NAMES) for name in ("columns", "tags")),
    *off("*.", _NAMES, "ranking"),
    Differs("*.num_samples", "all rows are used: shorten the file, or set weight of the source"),
    Differs("*_url", "theirs reads it in the place of file_name: fetch it, and name its file"),
    *(Differs(f"*.{name}", "of a data set on the hub") for name in ("subset", "split", "folder")),
)

_START = "train.adapters.0."


def _alpha(alpha: float | None, rank: int) -> float:
    return 2.0 * rank if alpha is None else alpha


def _recompute(off: bool) -> str | None:
    return None if off else "auto"


def _targets(value: str | list[str]) -> str | list[str]:
    return "auto" if value == "all" else words(value)


_PISSA = one_of({16: "pissa_niter_16", -1: "pissa"}, "pissa_niter_16")
LORA: Rows = (
    Key("lora_rank", f"{_START}rank", absent=8),
    Key("lora_alpha", f"{_START}alpha", _alpha, _TWICE, absent=None, of={"lora_rank": 8}),
    Key("lora_target", f"{_START}targets", _targets, "by finetuning_type", absent="all"),
    *takes("", _START, "lora_dropout=dropout loraplus_lr_ratio=b_lr_scale", float),
    *takes("use_", _START, "rslora dora"),
    Key("pissa_init", note="train.adapters: init, by pissa_iter"),
    Key("pissa_iter", f"{_START}init", _PISSA, absent=16, given="pissa_init"),
    Drop("pissa_iter", OFF),
    Key("adapter_name_or_path", f"{_START}from", model_name, "its files set targets and rank"),
    *off("", "write train.also_train", "additional_target"),
    *off("", "write two adapters: {from: FILE, train: false} and a new one", "create_new_adapter"),
)
WHOLE: Rows = (
    Key("finetuning_type", note="the whole model", only=("full",)),
    Differs("finetuning_type", "known: lora, full; full is written in its place"),
    *drops("", "lora_* loraplus_* use_rslora use_dora pissa_* adapter_*", _WHOLE),
    *drops("", "additional_target create_new_adapter", _WHOLE),
)
MODEL: Rows = (
    Key("model_name_or_path", "task.from_pretrained", model_name),
    Key("trust_remote_code", "task.trust_remote_code"),
)

LLAMA_FACTORY: Rows = (
    *MODEL,
    *off("", "write it behind the name: hub:org/name@REVISION", model_revision="main"),
    Key("flash_attn", "task.attn_implementation", one_of(_ATTENTION)),
    *reads("", "stage finetuning_type", "sft, by lora or full"),
    *drops("", "loraplus_lr_embedding pissa_convert double_quantization", OFF),
    Key("quantization_bit", "train.base_dtype", one_of({4: "nf4", 8: "int8"}), "rounded by rows, or by 64"),
    *off("", "base_dtype has its own", quantization_method=("bnb", "bitsandbytes"), quantization_type="nf4"),
    *reads("freeze_", "vision_tower multi_modal_projector language_model", _FREEZE),
    *off("", "write train.freeze", freeze_trainable_layers=2, freeze_trainable_modules="all"),
    *reads("", "dataset eval_dataset dataset_dir media_dir", _INFO),
    Key("template", note="here the chat template of the model's own folder"),
    Key("default_system", "data.train.system"),
    Key("cutoff_len", "data.train.max_length", note=_CUT, absent=2048),
    Key("packing", "data.train.packing", note=_ITSELF, given="neat_packing=none|false"),
    Key("neat_packing", "data.train.packing", note=_ITSELF),
    Key("packing", note="neat_packing counts"),
    *off("", "all rows are used: shorten the files, or set weight of the sources", "max_samples"),
    *off("", "answers are learnt: rows have `weight`", "train_on_prompt mask_history"),
    *off("", "as the model's template has it", "preserve_thinking tool_format", enable_thinking=True),
    *off("", "weight of the sources", "interleave_probs", mix_strategy="concat"),
    *off("", "held-out rows are files of their own: data.validation", "val_size"),
    *off("", "data.loader.sampler: sequential", "disable_shuffling"),
    Key("image_max_pixels", note=_PROCESSOR),
    Drop("image_min_pixels", _PROCESSOR),
    *off("", _PROCESSOR, "image_do_pan_and_scan crop_to_patches"),
    *(Differs(f"video_{name}", _VIDEO) for name in ("max_pixels", "min_pixels", "fps", "maxlen")),
    Differs("*audio*", "there is no sound"),
    Key("disable_gradient_checkpointing", "engine.recompute_modules", _recompute, absent=False),
    *off("", "weights that are trained are float32", "pure_bf16 upcast_layernorm upcast_lmhead_output"),
    *off("", "write optimizer: {type: muon}", "use_muon"),
    *off("", "write task.overrides, task.weights", "rope_scaling train_from_scratch"),
    *off(
        "", _OWN, "use_galore use_apollo use_badam use_adam_mini use_llama_pro mixture_of_depths shift_attn"
    ),
    *off("", _OWN, "use_dft_loss use_eaft_loss use_asft_loss moe_aux_loss_coef resize_vocab add_tokens"),
    *off("", _OWN, "add_special_tokens new_special_tokens_config split_special_tokens use_kt use_mca fp8"),
    *off("", _OWN, "early_stopping_steps"),
    *drops("", "galore_* apollo_* badam_* asft_alpha eaft_alpha pref_* dpo_* kto_* ref_* reward_*", _OTHERS),
    *drops("", "ppo_* simpo_* ignore_pad_token_for_loss predict_with_generate max_new_tokens", _OTHERS),
    *drops("", "streaming buffer_size overwrite_cache preprocessing_* tokenized_path use_unsloth*", FASTER),
    *drops("", "data_shared_file_system cache_dir low_cpu_mem_usage enable_liger_kernel ray_*", FASTER),
    *drops("", "use_reentrant_gc use_fast_tokenizer resources_per_worker", FASTER),
    *drops("", "use_swanlab swanlab_* print_param_status compute_accuracy placement_strategy", LOGGING),
    *drops("", "export_* infer_* vllm_* sglang_*", EXPORT),
    *ARGUMENTS,
)
