"""What a diffusion task computes of a batch before anything is drawn at random, and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from mm_core.contracts import (
    Autoencoder,
    Batch,
    CachePart,
    FeatureBatch,
    Features,
    Posterior,
    PredictorInputs,
    SampleKey,
    SupportsPosterior,
    VideoTextBatch,
)
from mm_core.errors import ContractError
from mm_core.plugin.checks.places import place_of_object
from mm_core.tasks.text_to_video.captions import TEXTS, Captions, Encoded
from mm_core.tasks.text_to_video.conditions import Conditions
from mm_core.tasks.text_to_video.inputs import GivenInputs, fields_of


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
        given: conditions of the predictor's inputs, [B,...] by name.
    """

    keys: Sequence[SampleKey]
    sample_weights: Tensor
    weight: float
    posterior: Posterior
    shape: tuple[int, ...]
    text: Encoded
    empty: Encoded | None
    conditions: Mapping[str, Tensor]
    given: Mapping[str, Tensor]


@dataclass
class TextToVideoInputs:
    """Inputs of one forward of the text-to-video task, on the device, in float32.

    Attributes:
        given: noisy latents [B,C,T,H,W], their timesteps, and the predictor's tensors for given frames.
        text: [B,L,D].
        text_mask: [B,L], on the device or the host.
        target: [B,C,T,H,W].
        factors: [B], loss weight of the timestep times weight of the sample.
        weight: total weight of the batch.
        weights: [B], weight of each sample.
        sigma: [B], noise level from 0 to 1.
        expert: the expert of the predictor for all rows, or None.
    """

    given: PredictorInputs
    text: Tensor
    text_mask: Tensor
    target: Tensor
    factors: Tensor
    weight: float
    weights: Tensor
    sigma: Tensor
    expert: str | None = None


LATENTS = "latents"
"""The part of the feature cache beside those of the predictor's inputs and of captions."""


@dataclass(frozen=True)
class ClipEncoder:
    """Encodes clips with the frozen components of a text-to-video task.

    Attributes:
        autoencoder: of the clips.
        captions: encodes their captions.
        conditions: of the predictor.
        inputs: of the predictor, beside its text.
        guidance: the scale that the predictor is given as a condition.
        drops: whether captions are dropped.
    """

    autoencoder: Autoencoder
    captions: Captions
    conditions: Conditions
    inputs: GivenInputs
    guidance: float
    drops: bool

    def encode(self, batch: Batch, weight: float, drops: bool) -> EncodedClips:
        """A batch after `TextToVideo.encode`, from clips or from the features of a cache.

        Args:
            batch: a `VideoTextBatch` or `FeatureBatch`.
            weight: the task's weight of the batch.
            drops: whether captions may be dropped.
        """
        drops = drops and self.drops
        if isinstance(batch, FeatureBatch):
            features, device = batch.features, batch.device
            size: tuple[int, int, int] = tuple(features[f"{LATENTS}.size"][0])
            fps = features.get(f"{LATENTS}.fps")
            posterior = self._of_moments(features[f"{LATENTS}.moments"])
            texts = batch.texts.get("", {})
            text, empty = self.captions.of_batch(features, texts, drops, device)
            given: dict[str, Tensor] = {}
            for row in self.inputs.rows:
                given |= self.inputs.read(row, features, device)
        else:
            batch = cast(VideoTextBatch, batch)
            size, fps, device = batch.size, batch.fps, batch.device
            batch = batch.to(device)  # floats, also of a batch that never moved
            pixels = batch.pixels
            posterior = self._posterior(batch, pixels)
            text, empty = self.captions.encoded(batch, empty=drops)
            given = self.inputs.encoded(fields_of(pixels, batch.fields), size, device)
        return EncodedClips(
            keys=batch.keys,
            sample_weights=batch.sample_weights,
            weight=weight,
            posterior=posterior,
            shape=(len(batch), *self.autoencoder.latent_shape(*size)),
            text=text,
            empty=empty,
            conditions=self.conditions.of_clips(len(batch), size[1:], device, fps, self.guidance),
            given=given,
        )

    def _posterior(self, batch: VideoTextBatch, pixels: Tensor | None) -> Posterior:
        """The posterior of clips, which may have moments in place of pixels.

        Raises:
            ContractError: the autoencoder takes no moments, or the predictor is shown frames of the clips.
        """
        if pixels is not None:
            return self.autoencoder.encode(pixels)
        if self.inputs.reads_clip:
            raise ContractError(
                "the predictor is shown frames of the clips, but the batch has no pixels",
                where="task.frames",
                hint="let the dataset return pixels in place of moments",
            )
        assert batch.moments is not None
        return self._of_moments(batch.moments)

    def _of_moments(self, moments: Tensor) -> Posterior:
        if not isinstance(self.autoencoder, SupportsPosterior):
            raise ContractError(
                "the batch has moments in place of pixels, but the autoencoder has no method `posterior`",
                where=f"task.autoencoder, {place_of_object(self.autoencoder)}",
                hint="add `posterior(moments)` to it, which returns what encode does",
            )
        return self.autoencoder.posterior(moments)

    def cache_parts(self) -> tuple[CachePart, ...]:
        """The parts of a cache for the task. ContractError if its autoencoder takes no moments."""
        self._of_moments(torch.empty(0))
        found = [CachePart(LATENTS, ("autoencoder",), "media")]
        found += self.inputs.cache_parts()
        return (*found, self.captions.cache_part(self.drops))

    def features(self, part: str, given: Any, device: torch.device) -> list[Features]:
        """What a cache stores of each clip of a batch, or of each caption where the encoder reads no fields.

        Args:
            part: name of one of `cache_parts`.
            given: a `VideoTextBatch`, or captions.
            device: where captions are encoded.
        """
        if part == TEXTS and not self.captions.reads:
            return self.captions.features(given, device)
        batch: VideoTextBatch = given.to(given.device)
        pixels = batch.pixels
        if part == TEXTS:
            return self.captions.features_of(batch, self.drops)
        if part != LATENTS:
            fields = fields_of(pixels, batch.fields)
            return self.inputs.stored(self.inputs.row_of(part), fields, batch.size, batch.device)
        size = torch.tensor(batch.size)
        rows: list[Features] = [
            {"moments": row, "size": size} for row in self._posterior(batch, pixels).moments
        ]
        if batch.fps is not None:
            rows = [{**row, "fps": fps} for row, fps in zip(rows, batch.fps, strict=True)]
        return rows
