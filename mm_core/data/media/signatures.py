"""What the first bytes of a file show: the format of an image that is read, or a clip."""

from __future__ import annotations

HEAD = 64
"""Bytes that decide."""

READ = "JPEG, PNG, WebP, TIFF, BMP, PPM, GIF, AVIF or HEIC"
"""The formats of images: Pillow is asked to open no other, since some start other programs."""

STREAMS = (".mjpeg", ".mjpg")
"""Suffixes of clips that begin like an image: JPEGs one after another."""

_IMAGES = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    **dict.fromkeys((b"GIF87a", b"GIF89a"), "GIF"),
    # Of the byte order, 42; of BigTIFF, 43; and two that are written the wrong way round.
    **dict.fromkeys((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+", b"II\0*", b"MM*\0"), "TIFF"),
}
_OTHERS = {
    b"\xff\x0a": "JPEG XL",
    b"\0\0\0\x0cJXL ": "JPEG XL",
    b"\xff\x4f\xff\x51": "JPEG 2000",
    b"\0\0\0\x0cjP  ": "JPEG 2000",
    **dict.fromkeys((b"%!PS", b"\xc5\xd0\xd3\xc6"), "EPS"),
    b"%PDF": "PDF",
    b"8BPS": "PSD",
}
_CLIPS = (
    b"\x1a\x45\xdf\xa3",  # Matroska, WebM
    *(b"GIF87a", b"GIF89a"),  # an animated one
    *(b"FLV\x01", b"OggS", b"\0\0\x01\xba", b"\0\0\x01\xb3"),
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11",  # ASF: .wmv
)
_DIB = (12, 40, 52, 56, 64, 108, 124)
"""Sizes of the second header of a BMP."""

_AVIF = {b"avif", b"avis"}
_HEIF = {b"heic", b"heix", b"heim", b"heis", b"mif1", b"mif2"}
"""Brands of still pictures; sequences of HEVC (`hevc`, `msf1`) are clips."""


def format_of(head: bytes) -> str | None:
    """Pillow's name of the format of an image that is read, by the first `HEAD` bytes of its file."""
    if head[4:8] == b"ftyp":
        own, others = head[8:12], {head[at : at + 4] for at in range(16, min(_length(head), len(head)), 4)}
        if own in _AVIF or (own in (b"mif1", b"msf1") and others & _AVIF):
            return "AVIF"
        return "HEIF" if own in _HEIF else None
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[:2] == b"BM" and int.from_bytes(head[14:18], "little") in _DIB:
        return "BMP"
    if head[:1] == b"P" and head[1:2] in b"123456f" and head[2:3] in b" \t\r\n#":
        return "PPM" if len(head) > 2 else None
    return next((name for start, name in _IMAGES.items() if head.startswith(start)), None)


def is_clip(head: bytes) -> bool:
    """Whether the first `HEAD` bytes of a file are those of a clip."""
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return format_of(head) is None
    if head[:4] == b"RIFF":
        return head[8:12] == b"AVI "
    # A packet of MPEG-TS begins with G and the number of its stream: the first one lists streams, or names.
    transport = head[:1] == b"G" and head[1:2] in b"\x40\x00" and head[2:3] in b"\0\x11"
    return transport or head.startswith(_CLIPS)


def name_of(head: bytes) -> str:
    """What the first bytes of a file in no format of `READ` show, for errors."""
    known = next((name for start, name in _OTHERS.items() if head.startswith(start)), None)
    return f"it is {known}" if known else f"it begins with {head[:8]!a}"


def _length(head: bytes) -> int:
    return int.from_bytes(head[:4])
