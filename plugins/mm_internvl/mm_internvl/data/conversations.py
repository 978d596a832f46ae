"""The dataset `internvl/conversations`: conversations with InternVL's tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mm_core.contracts import VideoReader
from mm_core.tasks import Conversations as Base
from mm_core.tasks import ConversationSource, MediaReader
from mm_internvl.data.config import ConversationsConfig
from mm_internvl.data.processor import InternVLProcessor


class Conversations(Base):
    """Conversations about images and videos, for `InternVLForConditionalGeneration`: `conversations` of the
    core, with numbers of tiles.

    Args: fields of `ConversationsConfig`.
    """

    config = ConversationsConfig

    def __init__(
        self,
        sources: Sequence[ConversationSource],
        processor: str,
        *,
        reader: VideoReader | None = None,
        **others: Any,
    ) -> None:
        super().__init__(sources, processor, reader=reader, **others)

    @classmethod
    def make_processor(cls, wanted: ConversationsConfig, media: MediaReader) -> InternVLProcessor:
        """The tokenizer, chat template and tiles of a config's folder."""
        return InternVLProcessor(
            wanted.processor,
            media,
            min_tiles=wanted.min_tiles,
            max_tiles=wanted.max_tiles,
            share_tiles=wanted.share_tiles,
        )
