"""Tiny models of Transformers in folders, and YAML configs of their runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

BERT = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
BERT |= {"num_attention_heads": 2, "max_position_embeddings": 32, "num_labels": 3}
# No dropout: forwards are compared.
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
QWEN = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
QWEN |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
VISION = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16}
VISION |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
VISION |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "mrope_interleaved": True}
VL: dict[str, Any] = {"text_config": {**QWEN, "rope_scaling": ROPE}, "vision_config": VISION}
VL |= {"image_token_id": 42, "vision_start_token_id": 40, "vision_end_token_id": 41, "video_token_id": 43}
T5 = {"vocab_size": 48, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
GEMMA = {**QWEN, "final_logit_softcapping": 5.0, "attn_logit_softcapping": None, "sliding_window": 64}
COHERE = {k: v for k, v in QWEN.items() if k != "head_dim"} | {"logit_scale": 0.3}
ROWS = 12  # of a step
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

MODELS: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    # name: config, class, options, auto class, kind of rows
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**QWEN, **ENDS}, "AutoModelForCausalLM", "tokens"),
    "qwen3_tied": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {**QWEN, **ENDS, "tie_word_embeddings": True},
        "AutoModelForCausalLM",
        "tokens",
    ),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**GEMMA, **ENDS}, "AutoModelForCausalLM", "tokens"),
    "cohere": ("CohereConfig", "CohereForCausalLM", {**COHERE, **ENDS}, "AutoModelForCausalLM", "tokens"),
    "bert_classes": (
        "BertConfig",
        "BertForSequenceClassification",
        BERT,
        "AutoModelForSequenceClassification",
        "classes",
    ),
    "bert_numbers": (
        "BertConfig",
        "BertForSequenceClassification",
        {**BERT, "num_labels": 1},
        "AutoModelForSequenceClassification",
        "numbers",
    ),
    "bert_marks": (
        "BertConfig",
        "BertForSequenceClassification",
        BERT,
        "AutoModelForSequenceClassification",
        "marks",
    ),
    "bert_masked": ("BertConfig", "BertForMaskedLM", BERT, "AutoModelForMaskedLM", "tokens"),
    "qwen3_classes": (
        "Qwen3Config",
        "Qwen3ForSequenceClassification",
        {**QWEN, **ENDS, "num_labels": 3},
        "AutoModelForSequenceClassification",
        "classes",
    ),
    "t5": ("T5Config", "T5ForConditionalGeneration", {**T5, **ENDS}, "AutoModelForSeq2SeqLM", "tokens"),
    "qwen3_vl": (
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        VL,
        "AutoModelForImageTextToText",
        "images",
    ),
}


def batch_of(dataset: Any, rows: range, last: float = 0.0) -> Any:
    """A batch of rows from a dataset; row 11 has the weight `last`."""
    from mm_core.contracts import SampleKey

    samples = [
        {**dataset[row], "key": SampleKey(0, row), "weight": last if row == ROWS - 1 else 1.0} for row in rows
    ]
    return dataset.collate(samples)


def save_model(name: str, folder: Path) -> Path:
    """Writes a model's folder, with weights that differ from tensor to tensor."""
    import torch
    import transformers

    config, model, options, _, _ = MODELS[name]
    torch.manual_seed(0)
    with torch.device("cpu"), torch.no_grad():  # also for tests that build on the meta device
        made = getattr(transformers, model)(getattr(transformers, config)(**options))
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        made.save_pretrained(folder / name)
    return folder / name


def save_words(folder: Path) -> None:
    """Writes a tokenizer for the models' 48 tokens into a model's folder: `w3` is token 3."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<bos>", "</s>", *(f"w{number}" for number in range(3, 48))]
    words = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="</s>"
    )
    made.save_pretrained(folder)


def run_config(name: str, model: Path, folder: Path, case: str = "", **changes: Any) -> Path:
    """Writes the YAML of a run: 12 rows per step in micro-batches of 2, checkpoints at steps 2 and 4."""
    _, _, _, auto_class, kind = MODELS[name]
    document: dict[str, Any] = {
        "run": {"name": name, "dir": str(folder / "runs")},
        "plugins": {"path": [str(Path(__file__).parent / "token_rows.py")]},
        "task": {"type": "pretrained", "from_pretrained": str(model), "auto_class": auto_class},
        "data": {"train": {"type": "token_rows", "kind": kind}, "loader": {"workers": 0}},
        "optimizer": {"type": "adamw", "lr": 1e-3},
        "train": {"steps": 4, "micro_batch_size": 2, "global_batch_size": 12},
        "checkpoint": {"every": 2},
    }
    for key, value in changes.items():
        document[key] = {**document.get(key, {}), **value}
    path = folder / f"{case or name}.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path
