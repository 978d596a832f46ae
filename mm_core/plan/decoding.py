"""Where the limit of a decoder's time does not hold."""

from __future__ import annotations

from collections.abc import Iterator

from mm_core.config.sections import RunConfig
from mm_core.schema.fields import ComponentConfig


def decode_notes(config: RunConfig) -> Iterator[str]:
    """A note if clips are decoded where nothing can end a decoder."""
    values = [value for dataset in config.data.splits.values() for value in dataset.options.values()]
    clips = any(isinstance(value, ComponentConfig) and value.kind == "video_reader" for value in values)
    if clips and not config.data.loader.workers:
        yield (
            "with data.loader.workers: 0 the training process decodes, which cannot be ended:"
            " data.decode_seconds does not hold, and a decoder that hangs stops the run"
        )
