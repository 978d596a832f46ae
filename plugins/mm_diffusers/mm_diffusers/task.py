"""The task `diffusers/pipeline`."""

from __future__ import annotations

from typing import Any

from mm_core.tasks import TextToVideo


class PipelineTask(TextToVideo):
    """Trains the transformer of a pipeline of Diffusers: `TextToVideo` with all its parts from one folder.

    Args:
        pipeline: the folder, from which the parts were filled in.
        others: as of `TextToVideo`.
    """

    def __init__(self, pipeline: str, **others: Any) -> None:
        super().__init__(**others)
