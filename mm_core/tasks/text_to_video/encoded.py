"""What a diffusion task computes of a batch before anything is drawn at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mm_core.contracts import GivenFrames, Randomness, SampleKey
from mm_core.tasks.text_to_video.captions import Encoded, chosen
from mm_core.tasks.text_to_video.returned_shapes import EncodedPixels


@dataclass(frozen=True)
class EncodedClips:
    """A batch after `TextToVideo.encode`, which depends on its samples and the frozen components alone.

    Attributes:
        keys: one SampleKey per clip: with the run's seed, the seed path of what is drawn for it.
        sample_weights: [B] float32, and `weight`, the task's weight of the batch.
        pixels: the autoencoder's distribution of latents.
        text: states [B,L,D], mask [B,L] and conditions of the clips' own captions.
        empty: the same of the empty caption, one row; None where captions are never dropped.
        clips: conditions that the task itself gives, [B,...] by name.
        frames: frames to show the predictor, or None.
    """

    keys: Sequence[SampleKey]
    sample_weights: Tensor
    weight: float
    pixels: EncodedPixels
    text: Encoded
    empty: Encoded | None
    clips: Mapping[str, Tensor]
    frames: GivenFrames | None

    def drawn_text(self, rng: Randomness, share: float) -> Encoded:
        """Text states, mask and conditions, with a `share` of the captions dropped for the empty one."""
        if self.empty is None:
            return self.text
        return chosen(
            self.text, self.empty, [rng.uniform("caption_dropout", *key) < share for key in self.keys]
        )
