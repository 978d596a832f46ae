"""Transformers of real classes at tiny sizes on meta, and their layers of attention and feed-forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import diffusers
import torch
from torch import nn

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.weights.adapters.inject import add_adapters

HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
IMAGE = {"in_channels": 16, "num_layers": 2, "axes_dims_rope": (4, 6, 6), **HEADS}
TEXT = {"text_num_attention_heads": 2, "text_num_key_value_heads": 1, "text_intermediate_size": 32}

QKV = ["to_q", "to_k", "to_v"]
BOTH = [*QKV, "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out"]
FEED_FORWARD = ["net.0.proj", "net.2"]


def under(block: str, **parts: list[str]) -> list[str]:
    return [f"{block}.{part}.{name}" for part, names in parts.items() for name in names]


DOUBLE = under("transformer_blocks.N", attn=BOTH, ff=FEED_FORWARD, ff_context=FEED_FORWARD)
SINGLE = "single_transformer_blocks.N"
GATED = {"attn": [*QKV, "to_gate", "to_out.0"], "ff": ["gate", "up", "down"]}
REFINED = {"attention": [*QKV, "to_out.0"], "feed_forward": ["w1", "w2", "w3"]}

CASES: Mapping[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "Flux": (
        lambda: diffusers.FluxTransformer2DModel(
            **IMAGE, num_single_layers=2, joint_attention_dim=24, pooled_projection_dim=16
        ),
        [*DOUBLE, *under(SINGLE, attn=QKV), f"{SINGLE}.proj_mlp", f"{SINGLE}.proj_out"],
    ),
    "Flux2": (
        lambda: diffusers.Flux2Transformer2DModel(
            **{**IMAGE, "axes_dims_rope": (4, 4, 4, 4)},
            num_single_layers=2,
            joint_attention_dim=24,
            timestep_guidance_channels=16,
        ),
        [
            *under("transformer_blocks.N", attn=BOTH, ff=["linear_in", "linear_out"]),
            *under("transformer_blocks.N", ff_context=["linear_in", "linear_out"]),
            *under(SINGLE, attn=["to_qkv_mlp_proj", "to_out"]),
        ],
    ),
    "QwenImage": (
        lambda: diffusers.QwenImageTransformer2DModel(**IMAGE, joint_attention_dim=16),
        under("transformer_blocks.N", attn=BOTH, img_mlp=FEED_FORWARD, txt_mlp=FEED_FORWARD),
    ),
    "SD3": (
        lambda: diffusers.SD3Transformer2DModel(
            **{"in_channels": 4, "num_layers": 2, "joint_attention_dim": 64, **HEADS},
            **{"caption_projection_dim": 32, "pooled_projection_dim": 40, "dual_attention_layers": (0,)},
        ),
        [*DOUBLE, *under("transformer_blocks.N", attn2=[*QKV, "to_out.0"])],
    ),
    "ZImage": (
        lambda: diffusers.ZImageTransformer2DModel(
            **{"in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2},
            **{"n_kv_heads": 2, "cap_feat_dim": 16, "axes_dims": [4, 6, 6], "axes_lens": [512, 64, 64]},
        ),
        [
            *(n for block in ("noise_refiner", "context_refiner") for n in under(f"{block}.N", **REFINED)),
            *under("layers.N", **REFINED),
        ],
    ),
    "Krea2": (
        lambda: diffusers.Krea2Transformer2DModel(
            **{**IMAGE, **TEXT, "num_key_value_heads": 1, "intermediate_size": 64, "text_hidden_dim": 16},
            **{"num_text_layers": 3, "timestep_embed_dim": 16},
        ),
        [
            *under("text_fusion.layerwise_blocks.N", **GATED),
            *under("text_fusion.refiner_blocks.N", **GATED),
            *under("transformer_blocks.N", **GATED),
        ],
    ),
    "LTXVideo": (
        lambda: diffusers.LTXVideoTransformer3DModel(
            **{"in_channels": 8, "out_channels": 8, "num_layers": 2, "cross_attention_dim": 32, **HEADS},
            caption_channels=16,
        ),
        under(
            "transformer_blocks.N",
            attn1=[*QKV, "to_out.0"],
            attn2=[*QKV, "to_out.0"],
            ff=FEED_FORWARD,
        ),
    ),
    "HunyuanVideo15": (  # not the refiner of its context embedder
        lambda: diffusers.HunyuanVideo15Transformer3DModel(
            **{"in_channels": 9, "out_channels": 4, "num_layers": 2, "rope_axes_dim": (4, 6, 6), **HEADS},
            **{"text_embed_dim": 16, "text_embed_2_dim": 16, "image_embed_dim": 16},
        ),
        DOUBLE,
    ),
    "Wan": (
        lambda: diffusers.WanTransformer3DModel(
            **{"num_layers": 2, "ffn_dim": 32, "text_dim": 16, "freq_dim": 16, "added_kv_proj_dim": 32},
            **{"image_dim": 16, **HEADS},
        ),
        [
            *under("blocks.N", attn1=[*QKV, "to_out.0"], ffn=FEED_FORWARD),
            *under("blocks.N", attn2=[*QKV, "add_k_proj", "add_v_proj", "to_out.0"]),
        ],
    ),
    "Cosmos": (  # its modulation has two linear layers
        lambda: diffusers.CosmosTransformer3DModel(
            **{"in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": 32, **HEADS},
            adaln_lora_dim=8,
        ),
        under("transformer_blocks.N", attn1=[*QKV, "to_out.0"], attn2=[*QKV, "to_out.0"], ff=FEED_FORWARD),
    ),
}


class Task(nn.Module):
    trainable, frozen = ("predictor",), ()

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        with torch.device("meta"):
            self.predictor = nn.ModuleDict({"transformer": build()})
        add_adapters(self, [AdapterConfig("auto", rank=2)], {})
