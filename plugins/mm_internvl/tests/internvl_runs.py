"""Configs that train a tiny InternVL by the task `pretrained`."""

from __future__ import annotations

from functools import partial

from support import conversation_sets as sets

AUTO_CLASS = "mm_internvl.model:InternVLForConditionalGeneration"

config_of = partial(
    sets.config_of, dataset={"type": "internvl/conversations", "max_tiles": 2}, auto_class=AUTO_CLASS
)
