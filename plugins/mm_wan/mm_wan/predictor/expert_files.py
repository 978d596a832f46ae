"""An expert that is not trained: its transformer read from the folder that it was published in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mm_core.errors import CheckpointError
from mm_core.plugin import get_registry
from mm_core.weights import Fit, best_layout, candidate_layouts, formats_of, no_layout_error, stream
from mm_wan.predictor.architecture import is_original
from mm_wan.predictor.transformer import WanTransformer


@dataclass(frozen=True)
class ExpertFiles:
    """A transformer without memory, and the files that hold its weights."""

    model: WanTransformer
    way: Fit

    def read(self, dtype: torch.dtype, device: torch.device) -> WanTransformer:
        """The transformer, frozen: parameters in `dtype`, streamed tensor by tensor onto `device`; tables in
        their own precision. CheckpointError where a file cannot be read."""
        model = self.model
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        model.to_empty(device=device)
        model.init_tables()
        stream(model.state_dict(), self.way.pieces)
        model.requires_grad_(False)
        model.eval()
        return model


def open_expert(folder: Path) -> ExpertFiles:
    """The transformer of a folder of Diffusers' or Wan-AI's. Only names and shapes are read.

    Raises:
        CheckpointError: a folder that is missing, damaged or hostile, or whose weights are not all of the
            transformer that its config.json describes.
    """
    with torch.device("meta"):
        model = WanTransformer(from_pretrained=str(folder))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    formats = formats_of(get_registry(), "wan/original" if is_original(folder) else "wan/diffusers")
    ways = candidate_layouts(folder, folder.name, model, shapes, formats)
    if not ways:
        raise no_layout_error(folder, folder.name, formats)
    way = best_layout(ways, folder, folder.name)
    if not way.whole:
        wrong = [name for name, *_ in way.misshapen]
        names = [*way.missing, *wrong, *(name for _, name in way.unexpected)]
        raise CheckpointError(
            f"these weights are not all and only those of the transformer in config.json: {len(names)} of "
            f"them differ, such as {names[0]}",
            where=str(folder),
        )
    return ExpertFiles(model, way)
