"""A clip with wrong bits that every decoder notices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def damaged(encode: Callable[..., Path], clip: Path, frames: int) -> None:
    """Writes a clip with zeros in its middle. Its code words have no arithmetic coding, in which a decoder
    overlooks nearly half of such places, others with each build of the encoder."""
    encode(clip, frames, noise=True, gop=4, options={"profile": "baseline"})
    content = bytearray(clip.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 600] = bytes(600)
    clip.write_bytes(content)
