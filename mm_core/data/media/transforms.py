"""From decoded frames to the pixels that a model sees."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Interpolation = Literal["bicubic", "bilinear"]


def covering_size(height: int, width: int, target_height: int, target_width: int) -> tuple[int, int]:
    """The smallest size of the same aspect that covers the target (its short side fits exactly)."""
    scale = max(target_height / height, target_width / width)
    return max(target_height, round(height * scale)), max(target_width, round(width * scale))


def resize_centre_crop(
    frames: Tensor, height: int, width: int, interpolation: Interpolation = "bicubic"
) -> Tensor:
    """Short-side resize and centre crop: uint8 [F,Y,X,3] -> float32 [3,F,height,width] in [-1,1].

    The resize is antialiased and works on 8-bit values, as Pillow's does (the two agree within two
    levels). It goes frame by frame, so that beside the result one resized frame is held at a time.
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
