"""Tiny InternVL checkpoints for tests: the published class and file layout at small sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mm_internvl.tiny_data import make_tiny_conversations
from mm_internvl.tiny_original import rewrite_as_original

if TYPE_CHECKING:
    from transformers import InternVLConfig

__all__ = [
    "PATCH",
    "SIDE",
    "TOKENS",
    "WORDS",
    "make_tiny_checkpoint",
    "make_tiny_conversations",
    "tiny_model",
    "tiny_rows",
]

SIDE, PATCH, TOKENS = 56, 14, 4
"""Sizes of tiny checkpoints: side of a tile and of a patch in pixels, tokens per tile (published: 448, 14,
256)."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% elif part['type'] == 'video' %}{{ '<video>\n' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML as in InternVL's Transformers folders: one block per turn, a token and a line break per image."""

SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    *("<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>"),
)

WORDS = (
    *(
        "the",
        "a",
        "is",
        "of",
        "in",
        "it",
        "and",
        "what",
        "which",
        "this",
        "image",
        "picture",
        "video",
        "frame",
    ),
    *("colour", "number", "digit", "red", "green", "blue", "circle", "square", "user", "assistant", "system"),
)
"""Words that are one token in tiny tokenizers, with and without a space before them."""

# The expression that cuts text before merging in Qwen2 and Qwen3 (their tokenizer.json).
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def make_tiny_checkpoint(
    folder: str | Path,
    *,
    seed: int = 0,
    vocab_size: int | None = None,
    max_shard_size: str | None = None,
    experts: int = 0,
    original: bool = False,
) -> Path:
    """Writes a tiny InternVL checkpoint (0.35 MB) in the published layout, which `from_pretrained` loads.

    The folder contains config.json and safetensors of `InternVLForConditionalGeneration` (two layers of
    InternViT, two of Qwen3), a byte-level tokenizer that cuts text as Qwen's, the chat template, and the
    files of the image, video and common processors.

    Args:
        folder: output folder; created if it does not exist.
        seed: seed for all weights. Equal seeds and library versions give equal weights.
        vocab_size: rows of the embedding; None: those of the tokenizer, rounded up to a multiple of 64.
        max_shard_size: splits the weights into files of this size, with an index ("100KB").
        experts: experts per layer of the language model, as in Qwen3-MoE, two per token; 0: a dense Qwen3.
        original: whether to write OpenGVLab's own layout, that of `InternVLChatModel`, in one file.

    Returns:
        The folder.
    """
    from transformers import InternVLForConditionalGeneration

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ids = _write_tokenizer(folder)
    _write_processors(folder)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = InternVLForConditionalGeneration(
            _config(ids, vocab_size or -(-len(ids) // 64) * 64, experts)
        ).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("cls_token", "position_embeddings")):
                    torch.nn.init.normal_(parameter, std=0.02)  # the class leaves zeros
    model.save_pretrained(folder, **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
    if original:
        rewrite_as_original(folder)
    return folder


def tiny_model(folder: Path) -> torch.nn.Module:
    """A tiny InternVL on the meta device; writes its tokenizer."""
    from transformers import InternVLForConditionalGeneration

    ids = _write_tokenizer(folder)
    with torch.device("meta"):
        model: torch.nn.Module = InternVLForConditionalGeneration(
            _config(ids, -(-len(ids) // 64) * 64, 0)
        ).eval()
    return model


def tiny_rows(folder: Path) -> Mapping[str, object]:
    """Writes conversations, and the tokenizer and processors of a tiny checkpoint; returns the fields of
    `internvl/conversations` for them."""
    processor = folder / "processor"
    processor.mkdir()
    _write_tokenizer(processor)
    _write_processors(processor)
    rows = make_tiny_conversations(folder / "rows", rows=4)
    return {"sources": [{"annotations": str(rows)}], "processor": str(processor), "max_length": 64}


def _config(ids: dict[str, int], vocab_size: int, experts: int) -> InternVLConfig:
    from transformers import InternVLConfig, InternVLVisionConfig, Qwen3Config, Qwen3MoeConfig

    sparse = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    text = (Qwen3MoeConfig if experts else Qwen3Config)(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=2048,
        rope_theta=1_000_000.0, tie_word_embeddings=False, bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"], **(sparse if experts else {}),
    )  # fmt: skip
    vision = InternVLVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, attention_bias=True,
        image_size=[SIDE, SIDE], patch_size=[PATCH, PATCH],
    )  # fmt: skip
    return InternVLConfig(
        text_config=text, vision_config=vision, image_token_id=ids["<IMG_CONTEXT>"], image_seq_length=TOKENS,
        tie_word_embeddings=False,
    )  # fmt: skip


def _write_processors(folder: Path) -> None:
    """Writes the processor files as published: mean and deviation are ImageNet's, not the class's
    defaults."""
    images: dict[str, object] = {
        "crop_to_patches": False, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True,
        "do_resize": True, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
        "max_patches": 12, "min_patches": 1, "resample": 3, "rescale_factor": 1 / 255,
        "size": {"height": SIDE, "width": SIDE}, "processor_class": "InternVLProcessor",
    }  # fmt: skip
    videos = {k: v for k, v in images.items() if k not in {"crop_to_patches", "max_patches", "min_patches"}}
    _write(
        folder / "preprocessor_config.json", {**images, "image_processor_type": "GotOcr2ImageProcessorFast"}
    )
    _write(
        folder / "video_preprocessor_config.json",
        {**videos, "video_processor_type": "InternVLVideoProcessor"},
    )
    common = {"image_seq_length": TOKENS, "processor_class": "InternVLProcessor"}
    _write(folder / "processor_config.json", common)


def _write_tokenizer(folder: Path) -> dict[str, int]:
    """Writes a byte-level BPE tokenizer of the 256 bytes and `WORDS`; returns its ids."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = sorted(space + word for word in WORDS for space in ("", "Ġ"))
    pieces = [*letters, "ĊĊ", "ĠĠ", *(word for word in words if len(word) > 1)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "InternVLProcessor",
        "model_max_length": 2048,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": list(SPECIALS[1:]),
        "extra_special_tokens": {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    }
    _write(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return ids


def _write(file: Path, value: Mapping[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
