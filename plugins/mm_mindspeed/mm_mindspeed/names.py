"""Names of modules: theirs to ours, in patterns of the engine and in targets of LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LATEST, RELEASE = "latest_checkpointed_iteration.txt", "release"
"""The file of a folder of saves that names the newest, and its text for converted weights."""

WAN_LORA: Mapping[str, tuple[str, ...]] = {
    "proj_q": ("to_q",),
    "proj_k": ("to_k",),
    "proj_v": ("to_v",),
    "proj_out": ("to_out.0",),
    "ffn.0": ("ffn.net.0.proj",),
    "ffn.2": ("ffn.net.2",),
    "k_img": ("add_k_proj",),
    "v_img": ("add_v_proj",),
}
"""Targets of LoRA in Wan's transformer -> ends of paths in Diffusers' class."""

_JOINED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_WAN: Mapping[str, str] = {
    "predictor.head": "predictor.proj_out",
    "predictor.text_embedding": "predictor.condition_embedder.text_embedder",
    "predictor.time_embedding": "predictor.condition_embedder.time_embedder",
    "predictor.img_emb": "predictor.condition_embedder.image_embedder",
    "predictor.blocks": "predictor.blocks",
}
"""Beginnings of paths in Wan's task -> those of ours; the first that fits counts."""


def patterns(value: Any) -> Any:
    """Patterns of modules by their paths in our task; `auto`, the blocks of the model, for other models."""
    names = [value] if isinstance(value, str) else list(value or ())
    found = [
        next(
            (ours + name.removeprefix(start) for start, ours in _WAN.items() if name.startswith(start)), None
        )
        for name in names
    ]
    return found if found and None not in found else "auto"


def lora_targets(value: Any) -> list[str]:
    """Targets of LoRA by the ends of paths in our models."""
    words = value if isinstance(value, list) else [value]
    names = [name for word in words for name in str(word).split(",") if name]
    if joined := [name for name in names if name in _JOINED]:
        raise ValueError(f"{', '.join(joined)} are Megatron's joined layers, which are several layers here")
    return [ours for name in names for ours in WAN_LORA.get(name, (name,))]


def in_model(value: Any) -> list[str]:
    """Paths of a Transformers model by their paths in the task `pretrained`."""
    return [f"model.{name}" for name in ([value] if isinstance(value, str) else value or ())]
