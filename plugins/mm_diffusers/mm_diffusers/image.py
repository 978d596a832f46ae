"""The image encoder `diffusers/image`: that of a pipeline from pictures to clips."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor, nn

from mm_core.contracts import torch_dtype
from mm_core.diffusion import ModelFolder
from mm_core.plugin import DType
from mm_diffusers.config import ImageConfig
from mm_diffusers.families import Family
from mm_diffusers.folder import PipelineFolder

PART, SETTINGS = "image_encoder", "feature_extractor"


class DiffusersImage(nn.Module):
    """The image encoder of a pipeline. Satisfies `ImageEncoder` and `Streamed`.

    Args:
        from_pretrained: folder of the pipeline.
        dtype: of its weights.
        family: recipe of the pipeline; None: a known one.
    """

    entry_points = ("encode",)
    block_patterns = "auto"
    model: nn.Module | None

    def __init__(
        self, from_pretrained: str, dtype: DType = ImageConfig.dtype, family: Family | None = None
    ) -> None:
        super().__init__()
        self.folder = PipelineFolder(Path(from_pretrained), family)
        self.dtype = torch_dtype(dtype)
        self._files = ModelFolder(self.folder.path / PART, "image encoder")
        self.weights_from = self._files.weights
        self._processor: Any = None
        self.register_module("model", None)

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self._config.hidden_size)

    @property
    def tokens(self) -> int | None:
        """Tokens of a picture: its patches. None without files."""
        if not self._files.has("config.json"):
            return None
        return (int(self._config.image_size) // int(self._config.patch_size)) ** 2

    @property
    def _config(self) -> Any:
        return self._files.config()

    def missing_files(self) -> list[str]:
        """Files of the image encoder and its processor that do not exist."""
        settings = self.folder.path / SETTINGS / "preprocessor_config.json"
        return self._files.missing_files() + ([] if settings.is_file() else [str(settings)])

    def files(self) -> list[Path]:
        """Files on which the hidden states depend."""
        return [*self._files.files(), *sorted((self.folder.path / SETTINGS).glob("*.json"))]

    def build_empty(self) -> None:
        """Builds the image encoder without memory for its weights, and its processor."""
        if self.model is None:
            kind = self.folder.parts[SETTINGS][1]
            # In Transformers 5, the name without a suffix is a processor based on torchvision.
            processor = getattr(transformers, f"{kind}Pil", None) or getattr(transformers, kind)
            self._processor = processor.from_pretrained(self.folder.path / SETTINGS, local_files_only=True)
            self.model = self._files.empty(transformers.AutoModel, self._config, self.dtype)

    @torch.no_grad()
    def encode(self, images: Sequence[Tensor]) -> Tensor:
        """Hidden states [B,K,D] of pictures, each uint8 [3,Y,X]."""
        assert self.model is not None
        pictures = [Image.fromarray(image.permute(1, 2, 0).cpu().contiguous().numpy()) for image in images]
        pixels = self._processor(images=pictures, return_tensors="pt")["pixel_values"]
        place = next(self.model.parameters()).device
        found: Tensor = self.model(pixel_values=pixels.to(place, self.dtype)).last_hidden_state
        return found

    def train(self, mode: bool = True) -> DiffusersImage:
        """Stays in evaluation mode."""
        return super().train(False)
