"""Clips as files: mp4, GIF bytes for pages, and the small previews that ranks exchange."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from mm_core.contracts import Clip
from mm_core.data.media.contact_sheet import write_contact_sheet
from mm_core.errors import DataError

if TYPE_CHECKING:
    import numpy

SHEET, PROMPTS = "contact_sheet.png", "prompts.json"
"""Names of the further files in a folder of clips."""


def write_clips(clips: Sequence[Clip], folder: Path) -> Path:
    """Writes each clip as `write_video` does, `prompts.json`, and a contact sheet, whose path is returned."""
    make_folder(folder)
    names = [clip_name(index, clip) for index, clip in enumerate(clips)]
    for name, clip in zip(names, clips, strict=True):
        write_video(clip, folder / name)
    write_prompts({name: clip.prompt for name, clip in zip(names, clips, strict=True)}, folder)
    rows = [(to_bytes(clip), clip.prompt) for clip in clips]
    return write_contact_sheet(rows, folder / SHEET)


def make_folder(folder: Path) -> None:
    """Creates a folder for clips, with its parents.

    Raises:
        DataError: the system refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the folder cannot be created: {error.strerror}",
            where=str(folder),
            hint="choose another folder, in which this user can write",
        ) from None


def clip_name(index: int, clip: Clip) -> str:
    """File name of a clip, number and prompt: `003-a-red-circle.mp4`; one frame is a `.png`."""
    slug = re.sub(r"[\W_]+", "-", clip.prompt.lower())[:60].strip("-")
    suffix = ".png" if clip.pixels.shape[1] == 1 else ".mp4"
    return f"{index:03d}-{slug}{suffix}" if slug else f"{index:03d}{suffix}"


def write_prompts(prompts: Mapping[str, str], folder: Path) -> None:
    """Writes `prompts.json`, the prompt of each clip's file, in the format of an annotation file."""
    rows = [{"path": name, "cap": prompt} for name, prompt in prompts.items()]
    (folder / PROMPTS).write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")


def write_video(clip: Clip, path: Path) -> None:
    """Writes a clip as an H.264 video, small ones with full chroma to keep colours; for a path that ends in
    `.png`, its first frame as an image."""
    import av
    from PIL import Image

    frames = to_bytes(clip)
    if path.suffix == ".png":
        Image.fromarray(frames[0]).save(path)
        return
    with av.open(str(path), "w") as container:
        rate = Fraction(clip.fps).limit_denominator(1001)
        stream = container.add_stream("libx264", rate=rate, options={"crf": "12"})
        height, width = frames.shape[1:3]
        even = height % 2 == 0 and width % 2 == 0
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv420p" if even and min(height, width) >= 128 else "yuv444p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def gif_bytes(clip: Clip) -> bytes:
    """Encodes a clip as a GIF that repeats endlessly at the clip's speed (frame times are rounded to
    hundredths of a second, at least two, since players slow down below that)."""
    from PIL import Image

    images = [Image.fromarray(frame) for frame in to_bytes(clip)]
    ends = [round(100 * (number + 1) / clip.fps) for number in range(len(images))]
    durations = [10 * max(2, end - start) for start, end in zip([0, *ends], ends, strict=False)]
    buffer = io.BytesIO()
    images[0].save(
        buffer, format="GIF", save_all=True, append_images=images[1:], duration=durations, loop=0, disposal=2
    )
    return buffer.getvalue()


def preview(clip: Clip, most: int = 256) -> Clip:
    """A clip shrunk to at most `most` pixels per side, by averaging; smaller clips are returned unchanged."""
    height, width = clip.pixels.shape[2:]
    share = most / max(height, width)
    if share >= 1:
        return clip
    size = (max(1, round(height * share)), max(1, round(width * share)))
    frames = functional.interpolate(clip.pixels.transpose(0, 1), size=size, mode="area")
    return Clip(frames.transpose(0, 1).contiguous(), clip.fps, clip.prompt)


def to_bytes(clip: Clip) -> numpy.ndarray:
    """Pixels of a clip as a uint8 array [F,Y,X,3]."""
    pixels = ((clip.pixels.clamp(-1, 1) + 1) * 127.5).round().byte()
    return pixels.permute(1, 2, 3, 0).contiguous().numpy()


def from_bytes(frames: numpy.ndarray) -> Tensor:
    """Pixels of a clip, float32 [3,F,Y,X] in [-1, 1], from uint8 [F,Y,X,3]: the inverse of `to_bytes`."""
    return torch.from_numpy(frames).permute(3, 0, 1, 2).float().contiguous() / 127.5 - 1
