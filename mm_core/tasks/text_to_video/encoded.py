"""What a diffusion task computes of a batch before anything is drawn at random, and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mm_core.contracts import (
    Batch,
    CachePart,
    FeatureBatch,
    Features,
    GivenFrames,
    Posterior,
    PredictorInputs,
    SampleKey,
    SupportsFrames,
    SupportsPosterior,
    VideoTextBatch,
)
from mm_core.errors import ContractError
from mm_core.plugin.checks.places import place_of_object
from mm_core.tasks.text_to_video.captions import Encoded
from mm_core.tasks.text_to_video.frames import clip_digest, frame_features, frame_latents, image_dim

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


@dataclass
class TextToVideoInputs:
    """Inputs of one forward of the text-to-video task, on the device, in float32.

    Attributes:
        given: noisy latents [B,C,T,H,W], their timesteps, and the predictor's tensors for given frames.
        text: [B,L,D].
        text_mask: [B,L].
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


def stored_posterior(task: TextToVideo, batch: VideoTextBatch) -> Posterior:
    """The posterior of clips of which a batch has the moments in place of pixels.

    Raises:
        ContractError: the autoencoder takes no moments, or the predictor is shown frames of the clips.
    """
    if task.frames:
        raise ContractError(
            "the predictor is shown frames of the clips, but the batch has no pixels",
            where="task.frames",
            hint="let the dataset return pixels in place of moments",
        )
    assert batch.moments is not None
    return _posterior(task, batch.moments)


def _posterior(task: TextToVideo, moments: Tensor) -> Posterior:
    if not isinstance(task.autoencoder, SupportsPosterior):
        raise ContractError(
            "the batch has moments in place of pixels, but the autoencoder has no method `posterior`",
            where=f"task.autoencoder, {place_of_object(task.autoencoder)}",
            hint="add `posterior(moments)` to it, which returns what encode does",
        )
    return task.autoencoder.posterior(moments)


LATENTS, FRAMES, IMAGES, TEXTS = "latents", "frame latents", "image features", "text states"
"""The parts of the feature cache."""


def cache_parts(task: TextToVideo) -> tuple[CachePart, ...]:
    """The parts of a cache for a text-to-video task. ContractError if its autoencoder takes no moments."""
    _posterior(task, torch.empty(0))
    found = [CachePart(LATENTS, ("autoencoder",), "media")]
    predictor = task.predictor
    if isinstance(predictor, SupportsFrames) and task.frames:
        settings = {"frames": list(task.frames), "clip": clip_digest(predictor, task.frames)}
        found.append(CachePart(FRAMES, ("autoencoder",), "media", settings))
        if image_dim(predictor) is not None:
            shown = {"frames": list(task.frames)}
            found.append(CachePart(IMAGES, ("image_encoder",), "media", shown))
    empty = ("",) if task.caption_dropout > 0 else ()
    return (*found, CachePart(TEXTS, ("text_encoder",), "text", texts=empty))


def features_of(task: TextToVideo, part: str, given: Batch | Sequence[str]) -> list[Features]:
    """What a cache stores of each clip of a batch, or of each text."""
    if not isinstance(given, Batch):
        return task.captions.features(given, task.compute_device())
    assert isinstance(given, VideoTextBatch)
    pixels = given.to(given.device).pixels
    if part != LATENTS:
        assert pixels is not None
        found = (frame_latents if part == FRAMES else frame_features)(task, pixels)
        return [{"values": row} for row in found]
    posterior = stored_posterior(task, given) if pixels is None else task.autoencoder.encode(pixels)
    size = torch.tensor(given.size)
    rows: list[Features] = [{"moments": row, "size": size} for row in posterior.moments]
    if given.fps is not None:
        rows = [{**row, "fps": fps} for row, fps in zip(rows, given.fps, strict=True)]
    return rows


def cached_clips(task: TextToVideo, batch: FeatureBatch, drops: bool) -> EncodedClips:
    """What `TextToVideo.encode` returns, from the features of a batch."""
    features, device = batch.features, batch.device
    size: tuple[int, int, int] = tuple(features[f"{LATENTS}.size"][0])
    texts, empty = batch.texts.get("", {}), None
    length = max((found[f"{TEXTS}.mask"].shape[1] for found in (features, texts) if found), default=0)
    if drops and task.caption_dropout > 0:
        empty = task.captions.of_features(texts, TEXTS, device, length)
    fps = features.get(f"{LATENTS}.fps")
    given = task.conditions.of_clips(len(batch), size[1:], device, fps, task.given_guidance)
    frames = None
    if task.frames:
        shown = features.get(f"{IMAGES}.values")
        frames = GivenFrames(task.frames, features[f"{FRAMES}.values"], shown)
    return EncodedClips(
        keys=batch.keys,
        sample_weights=batch.sample_weights,
        weight=task.weight(batch),
        posterior=_posterior(task, features[f"{LATENTS}.moments"]),
        shape=(len(batch), *task.autoencoder.latent_shape(*size)),
        text=task.captions.of_features(features, TEXTS, device, length),
        empty=empty,
        conditions=given,
        frames=frames,
    )
