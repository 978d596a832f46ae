"""The published architectures of InternVL 3.5, as data; torch-free.

Each language model is a Qwen3, with the values in config.json of the repository that its preset names. The
vision tower is InternViT-300M-448px-V2.5. Embedding and head are separate tensors in all of them, as in the
published files, even where Qwen's own model shares one tensor. tests/test_configs.py compares the tensors
with the published numbers and sizes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mm_core.errors import ConfigError

_VISION: Mapping[str, object] = MappingProxyType(
    {
        "model_type": "internvl_vision",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "attention_bias": True,
        "image_size": [448, 448],
        "patch_size": [14, 14],
    }
)

_TEXT: Mapping[str, object] = MappingProxyType(
    {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1_000_000.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "tie_word_embeddings": False,
    }
)


@dataclass(frozen=True)
class Preset:
    """A published InternVL model.

    Attributes:
        source: repository whose config.json contains the values of `text`.
        text: fields of the language model that are not in `_TEXT`.
    """

    source: str
    text: Mapping[str, object]

    @property
    def document(self) -> dict[str, object]:
        """config.json of this InternVL model in Transformers' layout."""
        return {
            "architectures": ["InternVLForConditionalGeneration"],
            "model_type": "internvl",
            "text_config": {**_TEXT, **self.text},
            "vision_config": dict(_VISION),
            "downsample_ratio": 0.5,
            "image_seq_length": 256,
            "image_token_id": 151671,
            "projector_hidden_act": "gelu",
            "tie_word_embeddings": False,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
        }


def _dense(hidden: int, inner: int, layers: int, heads: int, kv_heads: int = 8) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "internvl3.5-1b": Preset("Qwen/Qwen3-0.6B", _dense(1024, 3072, 28, 16)),
        "internvl3.5-2b": Preset("Qwen/Qwen3-1.7B", _dense(2048, 6144, 28, 16)),
        "internvl3.5-8b": Preset("Qwen/Qwen3-8B", _dense(4096, 12288, 36, 32)),
        "internvl3.5-30b-a3b": Preset(
            "Qwen/Qwen3-30B-A3B",
            {
                **_dense(2048, 6144, 48, 32, 4),
                "model_type": "qwen3_moe",
                "decoder_sparse_step": 1,
                "moe_intermediate_size": 768,
                "norm_topk_prob": True,
                "num_experts": 128,
                "num_experts_per_tok": 8,
            },
        ),
    }
)


def write_config(folder: str | Path, preset: str) -> Path:
    """Writes config.json of a published InternVL model: enough to plan a run without a download.

    Args:
        folder: output folder; created if it does not exist.
        preset: a name in `PRESETS`.

    Raises:
        ConfigError: the preset does not exist, or the folder already has a config.json.
    """
    if preset not in PRESETS:
        raise ConfigError(f"unknown preset {preset!r}", accepted=", ".join(PRESETS))
    file = Path(folder) / "config.json"
    if file.exists():
        raise ConfigError(
            "this folder already has a config.json", where=str(folder), hint="choose an empty folder"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(PRESETS[preset].document, indent=2) + "\n", encoding="utf-8")
    return file.parent
