"""Converts a tiny checkpoint from Transformers' layout to OpenGVLab's, tensor by tensor.

This repeats in plain code the key map of `mm_internvl.formats`: tests compare the two.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_NAMES = (
    ("multi_modal_projector.layer_norm.", "mlp1.0."),
    ("multi_modal_projector.linear_1.", "mlp1.1."),
    ("multi_modal_projector.linear_2.", "mlp1.3."),
    ("vision_tower.", "vision_model."),
    (".encoder.layer.", ".encoder.layers."),
    (".cls_token", ".class_embedding"),
    (".position_embeddings", ".position_embedding"),
    (".patch_embeddings.projection.", ".patch_embedding."),
    (".attention.projection_layer.", ".attn.proj."),
    (".layernorm_before.", ".norm1."),
    (".layernorm_after.", ".norm2."),
    (".lambda_", ".ls"),
)


def as_original(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames InternVL's tensors from the published Transformers layout to that of `InternVLChatModel`."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith("language_model."):
            found[name] = tensor
        elif ".attention.q_proj." in name:
            parts = [tensors[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            new = name.replace("vision_tower.", "vision_model.").replace(".layer.", ".layers.")
            found[new.replace(".attention.q_proj.", ".attn.qkv.")] = torch.cat(parts)
        elif ".attention.k_proj." not in name and ".attention.v_proj." not in name:
            for ours, theirs in _NAMES:
                name = name.replace(ours, theirs)
            found[name] = tensor
    return found


def rewrite_as_original(folder: Path) -> None:
    """Rewrites a tiny InternVL checkpoint with one safetensors file into OpenGVLab's layout: weights and
    config.json change, the tokenizer stays."""
    weights = folder / "model.safetensors"
    save_file(as_original(load_file(weights)), weights, metadata={"format": "pt"})
    given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(_config(given), indent=2) + "\n", encoding="utf-8")
    # As published: without the token that ends an answer.
    generation = {"_from_model_config": True, "transformers_version": "4.52.1"}
    (folder / "generation_config.json").write_text(json.dumps(generation) + "\n", encoding="utf-8")


def _config(given: dict[str, Any]) -> dict[str, object]:
    """config.json in the form of InternVL 3.5's: from an older Transformers, with code files beside it."""
    text, seen = dict(given["text_config"]), given["vision_config"]
    ropes = text.pop("rope_parameters", {"rope_theta": text.get("rope_theta")})
    if "num_local_experts" in text:  # the name in Transformers 5
        text["num_experts"] = text.pop("num_local_experts")
    kind = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[text["model_type"]]
    text |= {"architectures": [kind], "rope_theta": ropes["rope_theta"], "rope_scaling": None}
    text |= {"torch_dtype": "bfloat16", "_attn_implementation_autoset": True, "top_k": 50}
    size, patch = seen["image_size"][0], seen["patch_size"][0]
    vision = {
        "architectures": ["InternVisionModel"], "attention_dropout": 0.0, "drop_path_rate": 0.0,
        "dropout": 0.0, "hidden_act": "gelu", "hidden_size": seen["hidden_size"], "image_size": size,
        "initializer_factor": 0.1, "initializer_range": 1e-10, "intermediate_size": seen["intermediate_size"],
        "layer_norm_eps": 1e-06,
        "model_type": "intern_vit_6b", "norm_type": "layer_norm", "num_channels": 3, "patch_size": patch,
        "num_attention_heads": seen["num_attention_heads"], "num_hidden_layers": seen["num_hidden_layers"],
        "qk_normalization": False, "qkv_bias": True, "torch_dtype": "bfloat16", "use_flash_attn": True,
    }  # fmt: skip
    code = {
        "AutoConfig": "configuration_internvl_chat.InternVLChatConfig",
        "AutoModel": "modeling_internvl_chat.InternVLChatModel",
    }
    return {
        "architectures": ["InternVLChatModel"], "auto_map": code, "downsample_ratio": 0.5,
        "dynamic_image_size": True, "force_image_size": size, "llm_config": text, "max_dynamic_patch": 12,
        "min_dynamic_patch": 1, "model_type": "internvl_chat", "pad2square": False, "ps_version": "v2",
        "select_layer": -1, "template": "internvl2_5", "torch_dtype": "bfloat16", "use_backbone_lora": 0,
        "use_llm_lora": 0, "use_thumbnail": True, "vision_config": vision,
    }  # fmt: skip
