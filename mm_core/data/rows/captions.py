"""Cleaning of captions as they come from the web."""

from __future__ import annotations

import html
import re
import unicodedata

_SPACE = re.compile(r"\s+")


def clean_caption(text: str) -> str:
    """One line of readable text: HTML entities resolved, control characters gone, single spaces.

    Entities are resolved twice, because scraped captions often were escaped twice
    (`&amp;quot;`). Letters of any script, emoji and the joiners inside them stay as they are.
    """
    text = html.unescape(html.unescape(text))
    text = "".join(" " if unicodedata.category(letter) == "Cc" else letter for letter in text)
    return _SPACE.sub(" ", text).strip()
