"""Tasks: what a step computes, from checked inputs and clip sizes to logits and losses; generation.

The names below are for tasks of plugins; the configs do not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mm_core.lazy import lazy_names

if TYPE_CHECKING:
    from mm_core.builtin.configs.conversations import ConversationSource
    from mm_core.builtin.configs.text_to_video import SampleConfig, TextToVideoConfig
    from mm_core.tasks.conversations.dataset import Conversations
    from mm_core.tasks.conversations.media import MediaReader, Shown
    from mm_core.tasks.conversations.placed import Learnt, Placed, put_in
    from mm_core.tasks.conversations.processor import ChatProcessor, Encoded
    from mm_core.tasks.conversations.rows.turns import PLACEHOLDER, Medium, Picture, RowTurn
    from mm_core.tasks.conversations.template import ChatTemplate
    from mm_core.tasks.text_to_video.task import TextToVideo

__all__ = [
    "PLACEHOLDER",
    "ChatProcessor",
    "ChatTemplate",
    "ConversationSource",
    "Conversations",
    "Encoded",
    "Learnt",
    "MediaReader",
    "Medium",
    "Picture",
    "Placed",
    "RowTurn",
    "SampleConfig",
    "Shown",
    "TextToVideo",
    "TextToVideoConfig",
    "put_in",
]

__getattr__ = lazy_names(__name__)
