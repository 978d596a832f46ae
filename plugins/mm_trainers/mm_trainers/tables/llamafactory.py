"""LLaMA-Factory's YAML, beside the keys of TrainingArguments."""

from __future__ import annotations

from mm_core.interchange import Differs, Drop, Key, Row
from mm_trainers.common import EXPORT, FASTER, LOGGING, OFF, drops, known, model_name, off, one_of
from mm_trainers.tables.arguments import ARGUMENTS

_OPTIMIZER = "an optimizer that is not here"
_LOSS = "another loss than that of the model"
_STAGE = "of another stage than sft"
_VOCABULARY = "the tokenizer stays as the model has it"
_VIDEO = "videos are shown as data.train.frames images; it does nothing where there is none"
ATTENTION = {"auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}
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

DATA_SET: tuple[Row, ...] = (
    Key("*.file_name", note="annotations of a source"),
    Drop("*.formatting", "rows of messages, as here", only=("sharegpt", "openai")),
    Differs("*.formatting", ROWS),
    *(Drop(f"*.{key}", "rows are read by this name here too", only=names) for key, names in _NAMES.items()),
    *(Differs(f"*.columns.{name}", _PREFERENCES) for name in ("chosen", "rejected", "kto_tag")),
    *(Differs(f"*.{name}.*", "write the rows with the usual names") for name in ("columns", "tags")),
    *off("*.", _PREFERENCES, ranking=False),
    Differs("*.num_samples", "all rows are used: shorten the file, or set weight of the source"),
    Differs("*_url", "theirs reads it in the place of file_name: fetch it, and name its file"),
    *(Differs(f"*.{name}", "of a data set on the hub") for name in ("subset", "split", "folder")),
)

LLAMA_FACTORY: tuple[Row, ...] = (
    Key("model_name_or_path", "task.from_pretrained", model_name),
    *off("", "write it behind the name: hub:org/name@REVISION", model_revision="main"),
    Key("trust_remote_code", "task.trust_remote_code"),
    Key("flash_attn", "task.attn_implementation", one_of(ATTENTION)),
    Key("stage", note="sft; other stages are refused"),
    Key("finetuning_type", note="lora, full"),
    Key("lora_rank", "train.adapters.0.rank"),
    Key("lora_alpha", note="train.adapters: alpha; absent, twice the rank"),
    Key("lora_dropout", "train.adapters.0.dropout", float),
    Key("lora_target", note="train.adapters: targets; all is auto"),
    Key("loraplus_lr_ratio", "train.adapters.0.b_lr_scale", float),
    Drop("loraplus_lr_embedding", "embeddings are not trained"),
    Key("use_rslora", "train.adapters.0.rslora"),
    Key("use_dora", "train.adapters.0.dora"),
    Key("pissa_init", note="train.adapters: init"),
    Key("pissa_iter", note="train.adapters: init pissa_niter_16, or pissa for -1"),
    Drop("pissa_convert", "a file of the adapter is converted always"),
    Key("adapter_name_or_path", "train.adapters.0.from", model_name, "its files set targets and rank"),
    *off("", "write train.also_train", additional_target=None),
    *off("", "write two adapters: {from: FILE, train: false} and a new one", create_new_adapter=False),
    Key("quantization_bit", "train.base_dtype", one_of({4: "nf4", 8: "int8"}), "rounded by rows, or by 64"),
    *off("", "base_dtype has its own", quantization_method=("bnb", "bitsandbytes"), quantization_type="nf4"),
    Drop("double_quantization", FASTER),
    Key("freeze_vision_tower", note="train.freeze, or exclude of the adapter"),
    Key("freeze_multi_modal_projector", note="train.freeze, or exclude of the adapter"),
    Key("freeze_language_model", note="train.freeze, or exclude of the adapter"),
    *off("", "write train.freeze", freeze_trainable_layers=2, freeze_trainable_modules="all"),
    Key("dataset", note="data.train.sources, by dataset_info.json"),
    Key("eval_dataset", note="data.validation, by dataset_info.json"),
    Key("dataset_dir", note="where dataset_info.json is"),
    Key("media_dir", note="folder of the sources"),
    Key("template", note="here the chat template of the model's own folder"),
    Key("default_system", "data.train.system"),
    *known("cutoff_len", "data.train.max_length", 2048, absent="ours is 16384"),
    Key("packing", note="data.train.packing"),
    Key("neat_packing", "data.train.packing", note="each conversation attends to itself"),
    *off("", "all rows are used: shorten the files, or set weight of the sources", max_samples=None),
    *off("", "answers are learnt: rows have `weight`", train_on_prompt=False, mask_history=False),
    *off("", "as the model's template has it", enable_thinking=True, preserve_thinking=False),
    *off("", "weight of the sources", mix_strategy="concat", interleave_probs=None),
    *off("", "held-out rows are files of their own: data.validation", val_size=0.0),
    *off("", "the model's template writes tools", tool_format=None),
    *off("", "data.loader.sampler: sequential", disable_shuffling=False),
    Key("image_max_pixels", note="the model's own processor decides"),
    Drop("image_min_pixels", "the model's own processor decides"),
    *off("", "the model's own processor decides", image_do_pan_and_scan=False, crop_to_patches=False),
    *(Differs(f"video_{name}", _VIDEO) for name in ("max_pixels", "min_pixels", "fps", "maxlen")),
    Differs("*audio*", "there is no sound"),
    Drop("disable_gradient_checkpointing", OFF, only=(False,)),
    *known("disable_gradient_checkpointing", "engine.recompute_modules", "auto", lambda _: None),
    *off("", "weights that are trained are float32", pure_bf16=False),
    *off("", "engine.param_dtype is of all", upcast_layernorm=False, upcast_lmhead_output=False),
    *off("", _OPTIMIZER, use_galore=False, use_apollo=False, use_badam=False, use_adam_mini=False),
    *off("", "write optimizer: {type: muon}", use_muon=False),
    *off("", "the model stays as it is", use_llama_pro=False, mixture_of_depths=None, shift_attn=False),
    *off("", "write task.overrides, task.weights", rope_scaling=None, train_from_scratch=False),
    *off("", _LOSS, use_dft_loss=False, use_eaft_loss=False, use_asft_loss=False, moe_aux_loss_coef=None),
    *off("", _VOCABULARY, resize_vocab=False, add_tokens=None, add_special_tokens=None),
    *off("", _VOCABULARY, new_special_tokens_config=None, split_special_tokens=False),
    *off("", "not here", use_kt=False, use_mca=False, fp8=False, early_stopping_steps=None),
    *drops("", "galore_* apollo_* badam_* asft_alpha eaft_alpha", "of something that is off"),
    *drops("", "pref_* dpo_* kto_* ref_* reward_* ppo_* simpo_*", _STAGE),
    *drops("", "streaming buffer_size overwrite_cache preprocessing_* tokenized_path", FASTER),
    *drops("", "data_shared_file_system cache_dir low_cpu_mem_usage use_unsloth*", FASTER),
    *drops("", "enable_liger_kernel use_reentrant_gc use_fast_tokenizer ray_*", FASTER),
    *drops("", "use_swanlab swanlab_* print_param_status compute_accuracy placement_strategy", LOGGING),
    *drops("", "export_* infer_* vllm_* sglang_* model_revision resources_per_worker", EXPORT),
    *drops("", "ignore_pad_token_for_loss predict_with_generate max_new_tokens", OFF),
    *ARGUMENTS,
)
