"""Texts of rows: what no tokenizer takes, and captions as they come from the web."""

from __future__ import annotations

import html
import unicodedata


def clean_caption(text: str) -> str:
    """One line of readable text: HTML entities resolved, control characters gone, single spaces.

    Entities are resolved twice, because scraped captions often were escaped twice
    (`&amp;quot;`). Letters of any script, emoji and the joiners inside them stay as they are.
    """
    text = html.unescape(html.unescape(text))
    text = "".join(" " if unicodedata.category(letter) == "Cc" else letter for letter in text)
    return " ".join(text.split())


def half_character(text: str) -> str | None:
    """Spelt out, the first half of a surrogate pair that stands alone: JSON can write one, and no tokenizer
    takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return ascii(text[error.start])[1:-1]
    return None
