"""Entry point of the plugin `custom_dit`: registers its components and imports no torch."""

from mm_core import Component, hookimpl


@hookimpl
def mm_predictors() -> list[Component]:
    return [Component(name="custom_dit", target="mm_custom_dit.model:CustomDiT",
                      config="mm_custom_dit.config:CustomDiTConfig",
                      summary="Wan-style text-to-video DiT of the tutorial")]  # fmt: skip


@hookimpl
def mm_weight_formats() -> list[Component]:
    return [Component(name="wan_transformer", target="mm_custom_dit.weights:WanTransformer",
                      summary="CustomDiT as Diffusers' WanTransformer3DModel, in and out")]  # fmt: skip
