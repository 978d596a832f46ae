"""What a diffusion task computes of a batch before anything is drawn at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mm_core.contracts import GivenFrames, Posterior, SampleKey
from mm_core.tasks.text_to_video.captions import Encoded


@dataclass(frozen=True)
class EncodedClips:
    """A batch after `TextToVideo.encode`, which depends on its samples and the frozen components alone.

    Attributes:
        keys: one SampleKey per clip: with the run's seed, the seed path of what is drawn for it.
        sample_weights: [B] float32.
        weight: the task's weight of the batch.
        size: frames, height and width (F,Y,X) of the clips.
        posterior: the distribution of latents; its `moments` can be stored.
        text: states, mask and conditions of the clips' own captions.
        empty: the same of the empty caption, one row; None where captions are never dropped.
        conditions: conditions that the task itself gives, [B,...] by name.
        frames: frames to show the predictor, or None.
    """

    keys: Sequence[SampleKey]
    sample_weights: Tensor
    weight: float
    size: tuple[int, int, int]
    posterior: Posterior
    text: Encoded
    empty: Encoded | None
    conditions: Mapping[str, Tensor]
    frames: GivenFrames | None
