"""Images that a row holds itself, as data URLs (RFC 2397) in base64."""

from __future__ import annotations

import base64
import binascii
import re
from urllib.parse import unquote

from mm_core.errors import plural

_HEAD = re.compile(r"(?i)data:(image/[\w.+-]+|application/octet-stream|)(;[\w.-]+=[^;,]*)*;base64,")
_LARGEST = 64 * 2**20
"""Most characters of a data URL: an image of 48 MiB."""


def decoded(url: str) -> tuple[str, bytes]:
    """The media type of an image in a data URL, and its bytes.

    Raises:
        ValueError: it is not an image in base64, or too large; the reason.
    """
    if len(url) > _LARGEST:
        raise ValueError(f"it has {plural(len(url), 'character')}, more than {_LARGEST:,}")
    head = _HEAD.match(url)
    if head is None:
        raise ValueError("it does not begin as data:image/TYPE;base64,")
    text = unquote(url[head.end() :]) if "%" in url else url[head.end() :]
    try:
        return head[1].lower() or "of no type", base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as fault:
        raise ValueError(f"what follows is not base64: {fault}") from None
