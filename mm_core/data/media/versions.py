"""Which clips and images are read otherwise than in version 1 of the feature cache: they have other keys."""

from __future__ import annotations

import errno
from io import BytesIO
from pathlib import Path

import av

from mm_core.data.media.geometry import see_through
from mm_core.data.media.image_headers import first_bytes
from mm_core.data.media.images import read_anew as picture_anew
from mm_core.data.media.readers import FAULTS, OPTIONS, absolute_name, shown_stream, streams_of
from mm_core.data.media.signatures import STREAMS, format_of
from mm_core.data.media.timeline import hides_alpha
from mm_core.files import open_plain


def read_anew(path: Path, start: int = 0, size: int = -1, clip: bool = True) -> bool:
    """Whether the frames of a clip or an image are others than before, or it is read or refused since then.

    Args:
        path: the file, or an archive.
        start: first byte of a member of the archive.
        size: number of bytes of the member; -1: all of the file.
        clip: whether a reader of clips reads it; false: it is read as an image.
    """
    known = format_of(first_bytes(path, start))
    if not clip or (known is not None and path.suffix.lower() not in STREAMS):
        pixels = picture_anew(path, start, size, as_clip=clip)
        if pixels is not None or not clip:
            return bool(pixels)
    source: str | BytesIO = absolute_name(path)
    if size >= 0:
        with open_plain(path) as file:
            file.seek(start)
            source = BytesIO(file.read(size))
    try:
        with av.open(source, metadata_errors="replace", options=OPTIONS) as container:
            streams = streams_of(container)
            if not streams:
                return False
            shown = shown_stream(streams)
            if shown is not streams[0]:
                return True
            codec = shown.codec_context
            if codec is None or codec.name == "gif":  # what is transparent in a GIF was white
                return False
            if codec.name == "mjpeg":  # was refused with EXIF
                return b"Exif\0\0" in bytes(next(container.demux(shown)))
            return hides_alpha(shown) or (codec.format is not None and see_through(codec.format, shown))
    except FAULTS as error:
        return getattr(error, "errno", None) == errno.EINVAL  # not in the list of formats
