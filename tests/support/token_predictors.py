"""Tiny predictors of the plugins whose tokens can be spread over ranks, as `mm_core.build` takes them."""

from __future__ import annotations

SIZES = {"patch_size": [1, 2, 2], "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16}
PREDICTORS = {
    "custom_dit": {
        **{"type": "custom_dit", "num_layers": 2, "num_heads": 4, "head_dim": 12, "ffn_dim": 40},
        **{"rope_max_seq_len": 32, **SIZES},
    },
    "wan": {
        **{"type": "wan/transformer", "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 12},
        **{"ffn_dim": 40, "rope_max_seq_len": 32, **SIZES},
    },
}
PREDICTORS["two_expert"] = {**PREDICTORS["wan"], "type": "wan/two_expert", "boundary": 0.5}
