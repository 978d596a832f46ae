"""Flops of what `text_to_video` trains, from the shapes of a forward's arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mm_core.contracts import (
    GivenFrames,
    Predictor,
    PredictorInputs,
    StepFlops,
    SupportsExperts,
    SupportsFrames,
    SupportsModuleFlops,
)
from mm_core.modules.flops import step_flops
from mm_core.tasks.text_to_video.checks import SIZES
from mm_core.tasks.text_to_video.frames import image_dim, inputs_of

if TYPE_CHECKING:
    from mm_core.tasks.text_to_video.task import TextToVideo

Shapes = Mapping[str, tuple[int, ...]]


class TrainedFlops:
    """Of the forward and backward of a predictor. Reckoned once for each set of shapes: what is trained does
    not change in a run."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._known: dict[tuple[object, ...], float] = {}

    def of(self, given: PredictorInputs, text: Tensor, expert: str | None = None) -> float:
        """Flops that MFU counts, of a forward with these arguments and its backward; 0 where the predictor
        does not say what it multiplies."""
        if not isinstance(self._predictor, SupportsModuleFlops):
            return 0.0
        shapes = _shapes(given, text)
        key = (expert, *sorted(shapes.items()))
        if key not in self._known:
            self._known[key] = _flops(self._predictor, shapes, expert, ()).useful
        return self._known[key]


def sample_flops(
    task: TextToVideo, batch_spec: Mapping[str, Any], recomputed: Collection[str]
) -> StepFlops | None:
    """Of one sample, with text as long as it may be. None where the clips' size, the predictor's products or
    the tokens of an image encoder are not known.

    Args:
        batch_spec: the dataset's fields.
        recomputed: module paths in the task.
    """
    predictor, tokens = task.predictor, _feature_tokens(task)
    known = all(batch_spec.get(name) is not None for name in SIZES)
    if tokens is None or not known or not isinstance(predictor, SupportsModuleFlops):
        return None
    num_frames, height, width = (batch_spec[name] for name in SIZES)
    padding = predictor.text_padding
    length = padding[1] if isinstance(padding, tuple) else task.text_encoder.max_length
    with torch.device("meta"):
        latents = torch.empty(1, *task.autoencoder.latent_shape(num_frames, height, width))
        given = None
        if task.frames:
            assert isinstance(predictor, SupportsFrames)
            frames = [torch.empty(1, 3, height, width) for _ in task.frames]
            count = predictor.frames_clip(frames, num_frames).shape[2]
            shown = torch.empty(1, *task.autoencoder.latent_shape(count, height, width))
            features = torch.empty(1, tokens, image_dim(predictor) or 0) if tokens else None
            given = GivenFrames(task.frames, shown, features)
        inputs = inputs_of(predictor, latents, torch.empty(1), given)
        shapes = _shapes(inputs, torch.empty(1, length, predictor.text_dim))
    own = [path.removeprefix("predictor").removeprefix(".") for path in recomputed]
    return _flops(predictor, shapes, _trained_expert(predictor), own)


def _feature_tokens(task: TextToVideo) -> int | None:
    """Tokens of the given frames' image features; 0 without, None where their number is not known."""
    if not task.frames or image_dim(task.predictor) is None:
        return 0
    each = task.image_encoder.tokens if task.image_encoder is not None else None
    return None if each is None else each * len(task.frames)


def _trained_expert(predictor: object) -> str | None:
    """One that is trained, which stands for all: experts are alike. None for a predictor without."""
    experts = predictor.experts if isinstance(predictor, SupportsExperts) else ()
    return next((expert.name for expert in experts if expert.trained), None)


def _shapes(given: PredictorInputs, text: Tensor) -> Shapes:
    tensors = {"latents": given.latents, "timestep": given.timestep, "text": text, **given.conditions}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _flops(
    predictor: SupportsModuleFlops, shapes: Shapes, expert: str | None, recomputed: Collection[str]
) -> StepFlops:
    assert isinstance(predictor, nn.Module)
    routed: dict[str, Any] = {} if expert is None else {"expert": expert}
    return step_flops(predictor, predictor.module_flops(**shapes, **routed), recomputed)
