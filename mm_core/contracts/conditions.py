"""Conditions: further tensors, beside the text, that reach a predictor by the names of its forward."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol, runtime_checkable

ConditionShapes = Mapping[str, tuple[int | None, ...]]
"""Name of a condition -> shape of one sample's tensor, without the batch; None for a size that varies."""

CLIP_CONDITIONS: ConditionShapes = MappingProxyType({"fps": (), "size": (2,), "guidance": ()})
"""Conditions that the task `text_to_video` gives to every predictor whose forward names them, in float32.

`fps` [B] are the frames per second of each clip, `size` [B,2] its height and width in pixels, and `guidance`
[B] the scale of embedded guidance: a predictor that takes it is sampled without an unconditional pass. Their
precision is never lowered.
"""


@runtime_checkable
class SupportsConditionShapes(Protocol):
    """Capability of a text encoder that returns conditions, or of a predictor that declares those it takes.

    Of a text encoder: what `encode` returns beside hidden states and mask. Of a predictor: without it, the
    predictor takes the parameters of its forward; with it, exactly the conditions declared here, and those of
    its own `with_frames`.

    Attributes:
        condition_shapes: name of each condition -> shape of one sample's tensor, without the batch; None for
            a size that varies. Example: `{"pooled": (768,), "glyphs": (None, 1472)}`.
    """

    condition_shapes: ConditionShapes
