"""`model_index.json` whose lists are not all parts."""

from __future__ import annotations

import json

import diffusers

from mm_core.weights import Diffusers, Written, pipeline_parts


def test_a_list_of_numbers_in_the_index_of_a_real_pipeline_is_no_part(tmp_path):
    transformer = diffusers.Krea2Transformer2DModel(
        **{"in_channels": 16, "num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2},
        **{"num_key_value_heads": 1, "intermediate_size": 32, "text_hidden_dim": 16, "num_text_layers": 3},
        **{"text_num_attention_heads": 2, "text_num_key_value_heads": 1, "text_intermediate_size": 32},
        **{"timestep_embed_dim": 16, "axes_dims_rope": (4, 6, 6)},
    )
    pipeline = diffusers.Krea2Pipeline(
        **{"transformer": transformer, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()},
        **dict.fromkeys(("vae", "text_encoder", "tokenizer")),
        text_encoder_select_layers=(0, 1, 2),
    )
    pipeline.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["text_encoder_select_layers"] == [0, 1, 2]
    assert pipeline_parts(tmp_path) == {
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "transformer": "Krea2Transformer2DModel",
    }
    config = (tmp_path / "transformer/config.json").read_text()
    written = Written("predictor", "", "", {"config.json": config}, [tmp_path / "transformer"])
    found = Diffusers().companions(None, [written])
    assert found.copies.keys() == {"model_index.json", "scheduler"}
    assert found.places == {("predictor", ""): "transformer"}
