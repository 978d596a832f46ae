"""Transforms from decoded video frames to a model's pixels: resizing and cropping."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Interpolation = Literal["bicubic", "bilinear"]


def covering_size(height: int, width: int, target_height: int, target_width: int) -> tuple[int, int]:
    """The smallest (height, width) with a video frame's aspect ratio that covers a target size."""
    scale = max(target_height / height, target_width / width)
    return max(target_height, round(height * scale)), max(target_width, round(width * scale))


def resize_centre_crop(
    frames: Tensor, height: int, width: int, interpolation: Interpolation = "bicubic"
) -> Tensor:
    """Resizes video frames by their short side and crops the centre: float32 [3,F,height,width] in [-1,1].

    The resize is antialiased, on 8-bit values, like Pillow's (within two levels). Frames are resized singly.

    Args:
        frames: uint8 [F,Y,X,3].
        height: of the result.
        width: of the result.
        interpolation: filter of the resize.
    """
    count, source_height, source_width, _ = frames.shape
    size = covering_size(source_height, source_width, height, width)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    pixels = torch.empty(3, count, height, width, dtype=torch.float32)
    for index in range(count):
        frame = frames[index].permute(2, 0, 1)
        if size != (source_height, source_width):
            frame = F.interpolate(frame[None], size=size, mode=interpolation, antialias=True)[0]
        pixels[:, index] = frame[:, top : top + height, left : left + width]
    return pixels.div_(127.5).sub_(1.0)
