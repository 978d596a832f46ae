"""The weight format of CustomDiT: a folder that Diffusers loads as its Wan transformer, in and out."""

from __future__ import annotations

import json

from torch import nn

from mm_core.weights import AdapterLayout, Diffusers, KeyMap, Layout, Reshape
from mm_custom_dit.model import CustomDiT


class WanTransformer(Diffusers):
    """The weight format `wan_transformer`: `WanTransformer3DModel.from_pretrained` loads its files, and
    the model has the same output.

    Tensor names are equal. Diffusers embeds patches with a convolution, CustomDiT with its matrix.
    """

    def layout(self, name: str, component: nn.Module) -> Layout | None:
        """How weights of a CustomDiT are named in Diffusers' layout. None for any other module, and for
        absolute positions, which Wan does not have."""
        if not isinstance(component, CustomDiT) or component.sizes.absolute_positions:
            return None
        text = json.dumps(wan_config(component), indent=2) + "\n"
        return Layout(
            keys_of(component),
            stem=self.stem,
            texts={"config.json": text},
            library="diffusers",
            loading="from diffusers import WanTransformer3DModel\n\n"
            'model = WanTransformer3DModel.from_pretrained("{folder}")',
        )

    def adapter(self, name: str, component: nn.Module) -> AdapterLayout | None:
        """How adapter weights of a CustomDiT are written for `load_lora_adapter` of Diffusers' class."""
        if not isinstance(component, CustomDiT) or self.layout(name, component) is None:
            return None
        file = "pytorch_lora_weights.safetensors"
        return AdapterLayout(
            file,
            "transformer.",
            keys_of(component),
            metadata_key="lora_adapter_metadata",
            library="diffusers",
            loading='pipeline.load_lora_weights("{folder}", weight_name="pytorch_lora_weights.safetensors")',
        )


def keys_of(model: CustomDiT) -> KeyMap:
    """Key map from CustomDiT to Diffusers' Wan transformer: one weight has another shape, [M, C, t, h, w]."""
    weight = "patch_embedding.weight"
    return KeyMap((Reshape(weight, weight, (model.in_channels, *model.patch_size)),))


def wan_config(model: CustomDiT) -> dict[str, object]:
    """config.json of `diffusers.WanTransformer3DModel` (0.35 and later) for the architecture of a
    CustomDiT."""
    sizes = model.sizes
    return {
        "_class_name": "WanTransformer3DModel",
        "patch_size": list(sizes.patch_size),
        "num_attention_heads": sizes.num_heads,
        "attention_head_dim": sizes.head_dim,
        "in_channels": sizes.in_channels,
        "out_channels": sizes.out_channels,
        "text_dim": sizes.text_dim,
        "freq_dim": sizes.freq_dim,
        "ffn_dim": sizes.ffn_dim,
        "num_layers": len(model.blocks),
        "cross_attn_norm": sizes.cross_attn_norm,
        "qk_norm": "rms_norm_across_heads",
        "eps": sizes.eps,
        "rope_max_seq_len": sizes.rope_max_seq_len,
    }
