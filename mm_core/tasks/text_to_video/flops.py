"""FLOPs of training a text-to-video predictor, computed from the shapes of the forward's arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mm_core.contracts import (
    CLIP_CONDITIONS,
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
from mm_core.tasks.text_to_video.conditions import shapes_of
from mm_core.tasks.text_to_video.frames import image_dim, inputs_of

if TYPE_CHECKING:
    from mm_core.tasks.text_to_video.task import TextToVideo

Shapes = Mapping[str, tuple[int, ...]]


class TrainedFlops:
    """FLOPs of a predictor's forward and backward, computed once for each set of shapes."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._known: dict[tuple[object, ...], float] = {}

    def of(self, given: PredictorInputs, text: Tensor, expert: str | None = None) -> float:
        """FLOPs that MFU counts for one forward of the predictor with these arguments and its backward; 0 for
        a predictor without `module_flops`."""
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
    """FLOPs of one training clip with a caption of the maximum length.

    Args:
        task: the text-to-video task.
        batch_spec: the dataset's fields.
        recomputed: module paths in the task whose activations are recomputed.

    Returns:
        None where these or the sizes of the forward's arguments (`sample_forward`) are unknown.
    """
    found = sample_forward(task, batch_spec)
    if found is None or not isinstance(task.predictor, SupportsModuleFlops):
        return None
    given, own = found[1], [path.removeprefix("predictor").removeprefix(".") for path in recomputed]
    skipped = ("expert", "text_mask", *CLIP_CONDITIONS)
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items() if name not in skipped}
    return _flops(task.predictor, shapes, given.get("expert"), own)


def sample_forward(task: TextToVideo, batch_spec: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """The arguments of the predictor's forward for one training clip, with tensors on the meta device.

    Args:
        task: the text-to-video task.
        batch_spec: the dataset's fields.

    Returns:
        The predictor's path and the arguments. None where the clip size, the image encoder's tokens or the
        size of a text condition are unknown.
    """
    predictor, tokens = task.predictor, _feature_tokens(task)
    if tokens is None or any(batch_spec.get(name) is None for name in SIZES):
        return None
    declared = task.conditions.of_text(shapes_of(task.text_encoder))
    if any(None in shape for shape in declared.values()):
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
        others = {name: torch.empty(1, *filter(None, shape)) for name, shape in declared.items()}
        inputs = inputs_of(predictor, latents, torch.empty(1), given, others)
        text, mask = torch.empty(1, length, predictor.text_dim), torch.ones(1, length, dtype=torch.bool)
    expert = _trained_expert(predictor)
    chosen = {} if expert is None else {"expert": expert}
    arguments = {"latents": inputs.latents, "timestep": inputs.timestep, "text": text, "text_mask": mask}
    return "predictor", {**arguments, **inputs.conditions, **chosen}


def _feature_tokens(task: TextToVideo) -> int | None:
    """Number of tokens of the given frames' image features; 0 without features, None where unknown."""
    if not task.frames or image_dim(task.predictor) is None:
        return 0
    each = task.image_encoder.tokens if task.image_encoder is not None else None
    return None if each is None else each * len(task.frames)


def _trained_expert(predictor: object) -> str | None:
    """The first trained expert (all experts have the same shapes); None for a predictor without experts."""
    experts = predictor.experts if isinstance(predictor, SupportsExperts) else ()
    return next((expert.name for expert in experts if expert.trained), None)


def _shapes(given: PredictorInputs, text: Tensor) -> Shapes:
    tensors = {"latents": given.latents, "timestep": given.timestep, "text": text, **given.conditions}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in CLIP_CONDITIONS}


def _flops(
    predictor: SupportsModuleFlops, shapes: Shapes, expert: str | None, recomputed: Collection[str]
) -> StepFlops:
    assert isinstance(predictor, nn.Module)
    routed: dict[str, Any] = {} if expert is None else {"expert": expert}
    return step_flops(predictor, predictor.module_flops(**shapes, **routed), recomputed)
