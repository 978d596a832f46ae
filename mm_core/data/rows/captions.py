"""Texts of rows: cleaning captions from the web, and finding text that no tokenizer takes."""

from __future__ import annotations

import html
import unicodedata


def clean_caption(text: str) -> str:
    """Cleans a sample's caption: HTML entities resolved, control characters removed, single spaces.

    Entities are resolved twice, because scraped captions are often escaped twice (`&amp;quot;`). Letters of
    any script, emoji and the joiners inside them are kept.
    """
    text = html.unescape(html.unescape(text))
    text = "".join(" " if unicodedata.category(letter) == "Cc" else letter for letter in text)
    return " ".join(text.split())


def unnameable(path: str) -> str | None:
    """The first letter of a path that no file name has, as an escape; None if there is none.

    Python writes bytes of names that are not UTF-8 as the surrogates U+DC80 to U+DCFF: they are files' names.
    """
    try:
        path.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        return ascii(path[error.start])[1:-1]
    return None


def half_character(text: str) -> str | None:
    """The first unpaired surrogate in a sample's text, as an escape; None if there is none.

    JSON can contain one, but no tokenizer accepts it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return ascii(text[error.start])[1:-1]
    return None
