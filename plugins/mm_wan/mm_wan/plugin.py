"""Entry point of the plugin: imports nothing heavy."""

from mm_core import Component, hookimpl


@hookimpl
def mm_predictors() -> list[Component]:
    return []


@hookimpl
def mm_autoencoders() -> list[Component]:
    return []


@hookimpl
def mm_text_encoders() -> list[Component]:
    return []


@hookimpl
def mm_schedulers() -> list[Component]:
    return []


@hookimpl
def mm_weight_formats() -> list[Component]:
    return []
