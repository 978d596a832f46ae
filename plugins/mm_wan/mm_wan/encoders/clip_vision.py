"""The image encoder `wan/clip_vision`: Transformers' CLIPVisionModel, with inputs as in Wan's pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mm_core.contracts import WeightsFrom, torch_dtype
from mm_core.diffusion import ModelFolder
from mm_core.errors import CheckpointError, first_line
from mm_core.plugin import DType
from mm_core.weights import read_mapping
from mm_wan.encoders.config import WanCLIPVisionConfig
from mm_wan.encoders.vae_files import pipeline_part

if TYPE_CHECKING:
    from transformers import CLIPImageProcessor, CLIPVisionConfig

SETTINGS = "preprocessor_config.json"
PUBLISHED_TOKENS = 257
"""Tokens of ViT-H/14 on 224 pixels (Wan 2.1, wan/modules/clip.py): 16 x 16 patches and the class token."""
_KINDS = ("clip_vision_model", "clip")


class WanCLIPVision(nn.Module):
    """CLIP image encoder for Wan's image-to-video models (https://arxiv.org/abs/2103.00020), frozen.
    Satisfies `ImageEncoder` and `Streamed`.

    The output equals `WanImageToVideoPipeline.encode_image`: hidden states before the last layer, for the
    class token and the patches. `WanCLIPVisionConfig` describes the fields. The constructor opens no file.
    """

    entry_points = ("encode",)
    block_patterns = "auto"
    model: nn.Module | None

    def __init__(
        self,
        from_pretrained: str,
        processor: str | None = WanCLIPVisionConfig.processor,
        dtype: DType = WanCLIPVisionConfig.dtype,
    ) -> None:
        super().__init__()
        self.folder = pipeline_part(Path(from_pretrained), "image_encoder")
        self.processor_folder = _processor_folder(self.folder) if processor is None else Path(processor)
        self.dtype = torch_dtype(dtype)
        self._files = ModelFolder(self.folder, "image encoder")
        self.weights_from: WeightsFrom | None = self._files.weights
        self._processor: CLIPImageProcessor | None = None
        self.register_module("model", None)

    @property
    def hidden_size(self) -> int:
        """Width of the image encoder's hidden states, from config.json.

        Raises:
            CheckpointError: config.json describes no CLIP model.
        """
        return int(self._config().hidden_size)

    @property
    def tokens(self) -> int:
        """Number of tokens that the image encoder gives for one image: its patches and a class token, from
        config.json. Without that file: 257, as for all published Wan models."""
        if not self._files.has("config.json"):
            return PUBLISHED_TOKENS
        config = self._config()
        return 1 + (int(config.image_size) // int(config.patch_size)) ** 2

    def missing_files(self) -> list[str]:
        """Files of the CLIP image encoder that do not exist: config.json, weights, processor settings."""
        settings = self.processor_folder / SETTINGS
        return self._files.missing_files() + ([] if settings.is_file() else [str(settings)])

    def files(self) -> list[Path]:
        """Files on which the hidden states depend, for the feature cache: config.json, weights, processor."""
        settings = self.processor_folder / SETTINGS
        return [*self._files.files(), *([settings] if settings.is_file() else [])]

    def build_empty(self) -> None:
        """Builds the CLIP image encoder without memory for its weights. Executes no code from files.

        Raises:
            CheckpointError: the folder holds another model, no processor settings, or only pickled weights.
        """
        if self.model is not None:
            return
        from transformers import AutoModel

        config = self._config()
        self._files.check()
        self._processor = _open_processor(self.processor_folder)
        self.model = self._files.empty(AutoModel, config, self.dtype)

    @torch.no_grad()
    def encode(self, images: Sequence[Tensor]) -> Tensor:
        """Encodes images with CLIP.

        Args:
            images: B images, each uint8 [3,Y,X] of any size.

        Returns:
            Hidden states [B,K,D] in the encoder's dtype; K is 1 + the number of patches.
        """
        assert self.model is not None and self._processor is not None, (
            "call build_empty and load weights first"
        )
        from PIL import Image

        pictures = [Image.fromarray(image.permute(1, 2, 0).cpu().contiguous().numpy()) for image in images]
        pixels = self._processor(images=pictures, return_tensors="pt")["pixel_values"]
        place = next(self.model.parameters()).device
        found: Tensor = self.model(
            pixel_values=pixels.to(place, self.dtype), output_hidden_states=True
        ).hidden_states[-2]
        return found

    def train(self, mode: bool = True) -> WanCLIPVision:
        """Keeps the frozen image encoder in evaluation mode, whatever `mode` is."""
        return super().train(False)

    def _config(self) -> CLIPVisionConfig:
        """Config of CLIP's vision part. CheckpointError if config.json describes another model."""
        config = self._files.config()
        if config.model_type not in _KINDS:
            raise CheckpointError(
                "this folder holds no CLIP image encoder: its config.json is of model_type "
                f"{config.model_type!r}",
                where=str(self.folder),
                accepted="the folder `image_encoder` of a Wan image-to-video pipeline",
            )
        return config if config.model_type == _KINDS[0] else config.vision_config


def _processor_folder(weights: Path) -> Path:
    """Folder with the processor settings: the weights' folder if it has them, else its neighbour."""
    return weights if (weights / SETTINGS).is_file() else weights.parent / "image_processor"


def _open_processor(folder: Path) -> CLIPImageProcessor:
    """CLIP's processor based on Pillow, which Wan's pipelines were published with, even if torchvision is
    installed."""
    import transformers

    # In Transformers 5, the name without a suffix is a processor based on torchvision.
    name = "CLIPImageProcessorPil" if hasattr(transformers, "CLIPImageProcessorPil") else "CLIPImageProcessor"
    try:
        settings = read_mapping(folder / SETTINGS)
        if not settings:
            raise ValueError(f"{SETTINGS} is missing or is not a mapping")
        return getattr(transformers, name).from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError) as fault:
        raise CheckpointError(
            f"the settings of the image processor cannot be read: {first_line(fault)}",
            where=str(folder),
            accepted="the folder `image_processor` of a Wan pipeline",
            hint=f"set processor: to the folder that holds {SETTINGS}",
        ) from fault
