"""Entry point of the plugin: registers its metric. It imports no torch, so listing plugins is fast."""

from __future__ import annotations

from mm_core import Component, hookimpl


@hookimpl
def mm_metrics() -> list[Component]:
    return [
        Component(
            name="recall_by_class",
            target="mm_emotion.recall:RecallByClass",
            config="mm_emotion.config:RecallByClassConfig",
            summary="recall of each class: recall/joy, ...",
            tiny={"classes": ("joy", "anger", "fear")},
        )
    ]
