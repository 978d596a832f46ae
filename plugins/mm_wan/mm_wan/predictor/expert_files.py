"""Reads the untrained expert of Wan 2.2 from its original folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mm_core.errors import CheckpointError, plural
from mm_core.plugin import get_registry
from mm_core.weights import Fit, best_layout, candidate_layouts, formats_of, no_layout_error, stream
from mm_wan.predictor.transformer import WanTransformer


@dataclass(frozen=True)
class ExpertFiles:
    """The untrained expert of Wan 2.2 and its weights files.

    Attributes:
        model: transformer without memory for its parameters.
        way: layout used to read the files.
    """

    model: WanTransformer
    way: Fit

    def read(self, dtype: torch.dtype, device: torch.device) -> WanTransformer:
        """Reads the untrained Wan expert's weights, tensor by tensor, into a frozen transformer.

        Args:
            dtype: dtype of the parameters; rotary tables keep their own precision.
            device: device of all tensors.

        Raises:
            CheckpointError: a file cannot be read.
        """
        model = self.model
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        model.to_empty(device=device)
        model.init_tables()
        stream(model.state_dict(), self.way.pieces)
        model.requires_grad_(False)
        model.eval()
        return model


def open_expert(folder: Path, heads: int | None = None) -> ExpertFiles:
    """Opens the files of one Wan expert, in any layout. Reads only names and shapes.

    Args:
        folder: of the expert, or its one file.
        heads: number of attention heads; None: from config.json.

    Raises:
        CheckpointError: the folder is missing, damaged or unsafe, or its tensors differ from the transformer
            that its config.json describes.
    """
    with torch.device("meta"):
        model = WanTransformer(from_pretrained=str(folder), num_attention_heads=heads)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert model.weights_from is not None
    formats = formats_of(get_registry(), model.weights_from.format)
    ways = candidate_layouts(folder, folder.name, model, shapes, formats)
    if not ways:
        raise no_layout_error(folder, folder.name, formats)
    way = best_layout(ways, folder, folder.name)
    if not way.whole:
        wrong = [name for name, *_ in way.misshapen]
        names = [*way.missing, *wrong, *(name for _, name in way.unexpected)]
        raise CheckpointError(
            "the weights do not match the transformer that config.json describes: "
            f"{plural(len(names), 'tensor')} missing, unexpected or with another shape, such as {names[0]}",
            where=str(folder),
            hint="download it again",
        )
    return ExpertFiles(model, way)
