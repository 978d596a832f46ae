"""Tasks: what a step computes, from checked inputs and clip sizes to logits and losses; generation.

The names below are for tasks of plugins; the configs do not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mm_core.lazy import lazy_names

if TYPE_CHECKING:
    from mm_core.builtin.configs.text_to_video import SampleConfig, TextToVideoConfig
    from mm_core.tasks.text_to_video.task import TextToVideo

__all__ = ["SampleConfig", "TextToVideo", "TextToVideoConfig"]

__getattr__ = lazy_names(__name__)
