"""Pictures that a pipeline edits: their sizes, and the processor of those that a text encoder sees."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor

from mm_core.errors import ContractError
from mm_diffusers.call import Stop
from mm_diffusers.folder import PipelineFolder


def resized(folder: PipelineFolder, picture: Tensor, area: int) -> Image.Image:
    """A picture uint8 [3,Y,X] as the pipeline resizes it."""
    module = sys.modules[getattr(diffusers, folder.kind).__module__]
    width, height, *_ = module.calculate_dimensions(area, picture.shape[2] / picture.shape[1])
    shown = Image.fromarray(picture.permute(1, 2, 0).cpu().contiguous().numpy())
    return shown.resize((width, height), Image.Resampling.LANCZOS)


def for_autoencoder(folder: PipelineFolder, fields: Mapping[str, Tensor], size: Any) -> Tensor:
    """A reference picture [1,3,1,Y,X] from -1 to 1 in the size in which it is encoded; see `Input.make`."""
    (picture,) = fields.values()
    levels = ((picture[0, :, 0] + 1) * 127.5).round().clamp(0, 255).byte()
    assert folder.family.areas is not None
    made = torch.from_numpy(np.array(resized(folder, levels, folder.family.areas[0])))
    return (made.to(picture.device).float() / 127.5 - 1).permute(2, 0, 1)[None, :, None]


def open_processor(path: Path) -> Any:
    """The processor of pictures and text in a folder, of pictures alone where there is no torchvision."""
    kind = transformers.Qwen2VLProcessor
    if importlib.util.find_spec("torchvision"):
        return kind.from_pretrained(path, local_files_only=True)
    images = getattr(transformers, "Qwen2VLImageProcessorPil", None) or transformers.Qwen2VLImageProcessor
    parts = images, transformers.AutoTokenizer
    opened = [part.from_pretrained(path, local_files_only=True) for part in parts]
    # The class wants a processor of videos, which needs torchvision.
    unchecked = {"check_argument_for_proper_class": lambda *given: None}
    return type(kind.__name__, (kind,), unchecked)(*opened, video_processor=None)


def encode_with(
    folder: PipelineFolder, pipe: Any, captions: Sequence[str], rows: Sequence[Sequence[Tensor]], **given: Any
) -> Any:
    """What `encode_prompt` returns of captions with pictures uint8 [3,Y,X] of each, of any number and size.

    The pipeline writes the text of one row at a time; the text encoder is called once for all.

    Raises:
        ContractError: a row has no picture.
    """
    assert folder.family.references is not None and folder.family.areas is not None
    several, area = bool(folder.family.references[1]), folder.family.areas[1]
    processor, texts, shown = pipe.processor, [], []
    try:
        for caption, pictures in zip(captions, rows, strict=True):
            if not pictures:
                raise ContractError(
                    f"the caption {caption!r:.80} has no reference picture, and {folder.kind} edits one",
                    where="the field `references`",
                    accepted="at least one picture of each sample, or of each prompt",
                    hint="name its column in the data; when sampling: --input references=FILE",
                )
            images = [resized(folder, picture, area) for picture in pictures]
            pipe.processor = _stop
            try:
                pipe.encode_prompt([caption], image=images if several else images[0], **given)
            except Stop as stop:
                texts += stop.named["text"]
            shown += images
        pipe.processor = _of_all(processor, texts, shown)
        return pipe.encode_prompt(list(captions), image=shown, **given)
    finally:
        pipe.processor = processor


def _stop(**named: Any) -> Any:
    raise Stop(**named)


def _of_all(processor: Any, texts: list[str], images: list[Image.Image]) -> Callable[..., Any]:
    """The processor, called with these in the place of what it is given."""
    return lambda **named: processor(**{**named, "text": texts, "images": images})
