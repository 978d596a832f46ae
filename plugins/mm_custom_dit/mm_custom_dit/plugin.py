"""Entry point of the plugin `custom_dit`: registers its components and imports no torch."""

from mm_core import Component, hookimpl


@hookimpl
def mm_predictors() -> list[Component]:
    return [Component(name="custom_dit", target="mm_custom_dit.model:CustomDiT",
                      config="mm_custom_dit.config:CustomDiTConfig",
                      tiny={"num_layers": 1, "num_heads": 2, "head_dim": 12, "in_channels": 4, "text_dim": 8,
                            "out_channels": 4, "freq_dim": 8, "ffn_dim": 16, "rope_max_seq_len": 16},
                      summary="Wan-style text-to-video DiT of the tutorial")]  # fmt: skip


@hookimpl
def mm_weight_formats() -> list[Component]:
    return [Component(name="wan_transformer", target="mm_custom_dit.weights:WanTransformer",
                      summary="CustomDiT as Diffusers' WanTransformer3DModel, in and out")]  # fmt: skip
