"""What this package adds to mm_core. Nothing heavy is imported here: listing plugins stays fast."""

from __future__ import annotations

from mm_core import Component, hookimpl


@hookimpl
def mm_metrics() -> list[Component]:
    return [
        Component(
            name="recall_by_class",
            target="mm_emotion.recall:RecallByClass",
            config="mm_emotion.config:RecallByClassConfig",
            summary="of each class's rows, the share that is found: recall/joy, ...",
        )
    ]
