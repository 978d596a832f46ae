"""Entry point of the plugin: imports nothing heavy."""

from mm_core import Component, hookimpl


@hookimpl
def mm_predictors():
    return [Component(name="custom_dit", target="mm_custom_dit.model:CustomDiT",
                      config="mm_custom_dit.config:CustomDiTConfig",
                      summary="Wan-style DiT from the tutorial, 1.3B by default")]  # fmt: skip
