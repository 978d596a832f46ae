"""FLOPs of training a text-to-video predictor, computed from the shapes of the forward's arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mm_core.contracts import (
    CLIP_CONDITIONS,
    Predictor,
    PredictorInputs,
    StepFlops,
    SupportsExperts,
    SupportsModuleFlops,
    TextEncoder,
)
from mm_core.modules.flops import counted_flops, products_of, step_flops
from mm_core.tasks.text_to_video.checks import SIZES
from mm_core.tasks.text_to_video.conditions import Conditions, shapes_of
from mm_core.tasks.text_to_video.inputs import GivenInputs


class TrainedFlops:
    """FLOPs of a predictor's forward and backward, computed once for each set of shapes."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._known: dict[tuple[object, ...], float] = {}
        self._counted: dict[tuple[int, tuple[str, ...]], StepFlops | None] = {}

    def of(self, given: PredictorInputs, text: Tensor, expert: str | None = None) -> float:
        """FLOPs that MFU counts for one forward of the predictor with these arguments and its backward; 0 for
        a predictor without `module_flops`."""
        tensors = {"latents": given.latents, "timestep": given.timestep, "text": text, **given.conditions}
        if not isinstance(self._predictor, SupportsModuleFlops):
            return 0.0
        key = (expert, *sorted((name, tensor.shape) for name, tensor in tensors.items()))
        if key not in self._known:
            found = self.of_sample(tensors if expert is None else {**tensors, "expert": expert}, ())
            self._known[key] = 0.0 if found is None else found.useful
        return self._known[key]

    def of_sample(self, arguments: Mapping[str, Any], recomputed: Collection[str]) -> StepFlops | None:
        """FLOPs of a forward with these arguments; those of a predictor without `module_flops` are counted,
        and None where its forward reads numbers.

        Args:
            arguments: of the predictor's forward, with `expert` if it has experts, on the meta device.
            recomputed: module paths in the task whose activations are recomputed.
        """
        predictor = self._predictor
        assert isinstance(predictor, nn.Module)
        own = tuple(path.removeprefix("predictor").removeprefix(".") for path in recomputed)
        if not isinstance(predictor, SupportsModuleFlops):
            size: int = arguments["latents"].numel()
            # It takes seconds for a large model, so buckets of about the same area share a count.
            for (known, paths), count in self._counted.items():
                if paths == own and count is not None and abs(size / known - 1) < 0.1:
                    return count * (size / known)
            found = counted_flops(predictor, arguments, own)
            self._counted[size, own] = found
            return found
        taken = {name: one for name, one in arguments.items() if name not in (*CLIP_CONDITIONS, "text_mask")}
        shapes = {name: tuple(one.shape) if isinstance(one, Tensor) else one for name, one in taken.items()}
        return step_flops(predictor, products_of(predictor, shapes), own)


def sample_forward(
    given: GivenInputs, encoder: TextEncoder, conditions: Conditions, batch_spec: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any]] | None:
    """The arguments of the predictor's forward for one training clip, with tensors on the meta device.

    Args:
        given: the predictor and its inputs.
        encoder: of captions; they have the maximum length.
        conditions: of the predictor.
        batch_spec: the dataset's fields.

    Returns:
        The predictor's path and the arguments. None where the clip size, the image encoder's tokens or the
        size of a text condition are unknown.
    """
    predictor, autoencoder = given.predictor, given.autoencoder
    if any(batch_spec.get(name) is None for name in SIZES):
        return None
    declared = conditions.of_text(shapes_of(encoder))
    if any(None in shape for shape in declared.values()):
        return None
    size = batch_spec["num_frames"], batch_spec["height"], batch_spec["width"]
    encoded = given.on_meta(size)
    if encoded is None:
        return None
    padding = predictor.text_padding
    length = padding[1] if isinstance(padding, tuple) else encoder.max_length
    with torch.device("meta"):
        latents = torch.empty(1, *autoencoder.latent_shape(*size))
        others = {name: torch.empty(1, *filter(None, shape)) for name, shape in declared.items()}
        others |= conditions.of_clips(1, size[1:], latents.device, 1.0, 1.0)
        inputs = given.inputs(latents, torch.empty(1), encoded, others)
        text, mask = torch.empty(1, length, predictor.text_dim), torch.ones(1, length, dtype=torch.bool)
    routed: object = predictor
    experts = routed.experts if isinstance(routed, SupportsExperts) else ()
    trained = [expert.name for expert in experts if expert.trained]  # all experts have the same shapes
    chosen = {"expert": trained[0]} if trained else {}
    arguments = {"latents": inputs.latents, "timestep": inputs.timestep, "text": text, "text_mask": mask}
    return "predictor", {**arguments, **inputs.conditions, **chosen}
