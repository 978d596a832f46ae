"""Operations of what `text_to_video` trains, from the shapes of a forward's arguments."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from mm_core.contracts import CountsProducts, Predictor, PredictorInputs
from mm_core.parallel.operations import step_operations


class TrainedOperations:
    """Of the forward and backward of a predictor. Reckoned once for each set of shapes: what is trained does
    not change in a run."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._known: dict[tuple[object, ...], float] = {}

    def of(self, given: PredictorInputs, text: Tensor, expert: str | None = None) -> float:
        """Operations that MFU counts, of a forward with these arguments and its backward; 0 where the
        predictor does not say what it multiplies."""
        if not isinstance(self._predictor, CountsProducts):
            return 0.0
        tensors = {"latents": given.latents, "timestep": given.timestep, "text": text, **given.conditions}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        key = (expert, *sorted(shapes.items()))
        if key not in self._known:
            routed = {} if expert is None else {"expert": expert}
            products = self._predictor.products(**shapes, **routed)  # type: ignore[arg-type]
            self._known[key] = step_operations(cast(nn.Module, self._predictor), products).useful
        return self._known[key]
