"""Small models of architectures drawn from Transformers' registry with a seed.

usage: drawn_architectures.py     prints the architectures, and why others that were drawn are not among them
"""

from __future__ import annotations

import functools
import random
import re
from typing import Any, NamedTuple

SEED, COUNT = 13, 25
LARGEST = 2_000_000
SIZES: tuple[tuple[str, int], ...] = (
    # (pattern of a config's keys, what a larger integer there becomes): the first that fits
    (r"num_labels|num_channels|in_channels|num_mel_bins|feature_size|.*_token_id|.*_index", 0),
    (r"(vocab|.*_vocab)_size(_.*)?|num_embeddings|codebook_size", 96),
    (r"num_key_value_heads|num_kv_heads|multi_query_group_num", 2),
    (r".*(attention_heads|_heads|n_head|num_head|heads)", 4),
    (r".*(num_layers|_layers|n_layer|n_layers|_depth|depth|num_blocks|_layer)", 2),
    (r"head_dim|d_kv|attention_head_size|qk_nope_head_dim|v_head_dim|qk_rope_head_dim", 16),
    (r".*(hidden_size|d_model|n_embd|embed_dim|embedding_size|hidden_dim|projection_dim|_dim|dim)", 64),
    (r".*(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|mlp_dim)", 96),
    (r"max_.*positions?(_embeddings)?|n_positions|max_seq_len|max_sequence_length|context_length", 64),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"image_size|input_size", 32),
    (r"patch_size", 8),
)


class Architecture(NamedTuple):
    """A model class, and the config of a small model."""

    kind: Any
    config: Any

    @property
    def name(self) -> str:
        return str(self.kind.__name__)

    def make(self) -> Any:
        """The model with the library's initialisation, drawn with torch's generator."""
        return self.kind._from_config(type(self.config).from_dict(self.config.to_dict()))


def small(kind: Any) -> dict[str, Any]:
    """Options that make a config, and the configs in it, those of a small model."""
    known = kind()
    options: dict[str, Any] = {}
    for key, value in known.to_dict().items():
        inner = getattr(known, key, None)
        if key in (known.sub_configs or {}) and hasattr(inner, "to_dict"):
            options[key] = small(type(inner))
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((size for pattern, size in SIZES if re.fullmatch(pattern, key)), 0)
            if size and value > size:
                options[key] = size
    return options


@functools.cache
def drawn() -> tuple[tuple[Architecture, ...], dict[str, str]]:
    """The architectures, and the reasons why others drawn before the last of them cannot be built, by
    name."""
    import torch
    from transformers.models.auto import modeling_auto

    names = [name for name in vars(modeling_auto) if re.fullmatch(r"MODEL_(FOR_.*_)?MAPPING", name)]
    keys = {name: sorted(getattr(modeling_auto, name)._model_mapping) for name in sorted(names)}
    listed = [(name, key) for name in keys for key in keys[name]]
    random.Random(SEED).shuffle(listed)
    found: dict[str, Architecture] = {}
    left: dict[str, str] = {}
    for name, key in listed:
        if len(found) == COUNT:
            break
        if key in found or key in left:
            continue
        mapping = getattr(modeling_auto, name)
        try:
            config = mapping._load_attr_from_module(key, mapping._config_mapping[key])
            kind = mapping._load_attr_from_module(key, mapping._model_mapping[key])
            architecture = Architecture(kind, config(**small(config)))
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in architecture.make().parameters())
            if size > LARGEST:
                left[key] = f"{size} parameters"
                continue
            architecture.make()
        except Exception as fault:  # whatever a config or model objects to
            left[key] = f"{type(fault).__name__}: {' '.join(str(fault).split())[:90]}"
        else:
            found[key] = architecture
    return tuple(found.values()), left


if __name__ == "__main__":
    architectures, others = drawn()
    print(*(architecture.name for architecture in architectures), sep="\n")
    print(*(f"not {key}: {why}" for key, why in others.items()), sep="\n")
