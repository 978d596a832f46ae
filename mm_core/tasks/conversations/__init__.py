"""Conversations about images, as rows of tokens: rows, chat templates, processors, packing, questions.

The names below are for plugins; each name imports its module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mm_core.lazy import lazy_names

if TYPE_CHECKING:
    from mm_core.tasks.conversations.chat import Chat
    from mm_core.tasks.conversations.dataset import Conversations
    from mm_core.tasks.conversations.media import MediaReader, Shown
    from mm_core.tasks.conversations.packing import Packs, positions
    from mm_core.tasks.conversations.processor import ChatProcessor, Encoded
    from mm_core.tasks.conversations.template import ChatTemplate, Fault
    from mm_core.tasks.conversations.turns import PLACEHOLDER, Medium, Picture, RowTurn

__all__ = [
    "PLACEHOLDER",
    "Chat",
    "ChatProcessor",
    "ChatTemplate",
    "Conversations",
    "Encoded",
    "Fault",
    "MediaReader",
    "Medium",
    "Packs",
    "Picture",
    "RowTurn",
    "Shown",
    "positions",
]

__getattr__ = lazy_names(__name__)
