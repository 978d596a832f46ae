"""What a diffusion task computes of a batch before anything is drawn at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from mm_core.contracts import GivenFrames, Posterior, SampleKey, SupportsPosterior, VideoTextBatch
from mm_core.errors import ContractError
from mm_core.plugin.checks.places import place_of_object
from mm_core.tasks.text_to_video.captions import Encoded

if TYPE_CHECKING:
    from mm_core.tasks.text_to_video.task import TextToVideo


@dataclass(frozen=True)
class EncodedClips:
    """A batch after `TextToVideo.encode`, which depends on its samples and the frozen components alone.

    Attributes:
        keys: one SampleKey per clip: with the run's seed, the seed path of what is drawn for it.
        sample_weights: [B] float32.
        weight: the task's weight of the batch.
        posterior: the distribution of latents; its `moments` can be stored.
        shape: [B,C,T,H,W] of the latents.
        text: states, mask and conditions of the clips' own captions.
        empty: the same of the empty caption, one row; None where captions are never dropped.
        conditions: conditions that the task itself gives, [B,...] by name.
        frames: frames to show the predictor, or None.
    """

    keys: Sequence[SampleKey]
    sample_weights: Tensor
    weight: float
    posterior: Posterior
    shape: tuple[int, ...]
    text: Encoded
    empty: Encoded | None
    conditions: Mapping[str, Tensor]
    frames: GivenFrames | None


def stored_posterior(task: TextToVideo, batch: VideoTextBatch) -> Posterior:
    """The posterior of clips of which a batch has the moments in place of pixels.

    Raises:
        ContractError: the autoencoder takes no moments, or the predictor is shown frames of the clips.
    """
    if not isinstance(task.autoencoder, SupportsPosterior):
        raise ContractError(
            "the batch has moments in place of pixels, but the autoencoder has no method `posterior`",
            where=f"task.autoencoder, {place_of_object(task.autoencoder)}",
            hint="add `posterior(moments)` to it, which returns what encode does",
        )
    if task.frames:
        raise ContractError(
            "the predictor is shown frames of the clips, but the batch has no pixels",
            where="task.frames",
            hint="let the dataset return pixels in place of moments",
        )
    assert batch.moments is not None
    return task.autoencoder.posterior(batch.moments)
