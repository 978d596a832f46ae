"""Tiny checkpoints are whole: Transformers loads and runs them, in the layout of the published ones."""

from __future__ import annotations

import json

import torch
from mm_internvl.testing import SIDE, TOKENS, make_tiny_checkpoint
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    InternVLForConditionalGeneration,
)

PUBLISHED = {
    *("config.json", "generation_config.json", "model.safetensors", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer_config.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
}
"""What Transformers reads of a published folder: vocab.json and merges.txt only repeat it."""


def test_it_has_the_published_layout(tmp_path):
    folder = make_tiny_checkpoint(tmp_path / "deep" / "model")
    assert {file.name for file in folder.iterdir()} == PUBLISHED
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1_000_000
    config = AutoConfig.from_pretrained(folder)
    assert config.text_config.model_type == "qwen3" and not config.tie_word_embeddings
    names = {name.split(".")[0] for name in load_file(folder / "model.safetensors")}
    assert names == {"language_model", "multi_modal_projector", "vision_tower"}
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    assert processor["image_processor_type"] == "GotOcr2ImageProcessorFast"


def test_transformers_loads_and_runs_it(tmp_path):
    folder = make_tiny_checkpoint(tmp_path)
    model, tokenizer = (
        AutoModelForImageTextToText.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    assert type(model) is InternVLForConditionalGeneration
    said = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it? 你好 😀"}]}]
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n<IMG_CONTEXT>\nwhat is it? 你好 😀<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    picture = f"<img>{'<IMG_CONTEXT>' * TOKENS * 2}</img>"
    ids = tokenizer(text.replace("<IMG_CONTEXT>", picture), return_tensors="pt").input_ids
    found = model.generate(
        input_ids=ids, pixel_values=torch.randn(2, 3, SIDE, SIDE), max_new_tokens=3, do_sample=False
    )
    assert found.shape[1] <= ids.shape[1] + 3


def test_the_same_seed_is_the_same_checkpoint(tmp_path):
    first, again, other = (
        make_tiny_checkpoint(tmp_path / str(n), seed=seed) for n, seed in enumerate((0, 0, 1))
    )
    weights = [load_file(folder / "model.safetensors") for folder in (first, again, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    differ = [name for name in weights[0] if not torch.equal(weights[0][name], weights[2][name])]
    assert "vision_tower.embeddings.cls_token" in differ and "language_model.lm_head.weight" in differ
