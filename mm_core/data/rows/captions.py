"""Texts of rows: captions beside their files, captions from the web cleaned, text that no tokenizer takes."""

from __future__ import annotations

import html
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mm_core.data.rows.annotations import escapes
from mm_core.data.rows.json_rows import kind_of
from mm_core.data.rows.media_rows import CAPTIONS, Medium, medium_of
from mm_core.data.rows.paths import refusal
from mm_core.errors import DataError, plural

_BESIDE_BOTH = ".json"  # its picture has a caption too; nobody takes it for a picture
_DOCUMENTS = frozenset({".md", ".rst", ".html"})  # their .txt is another form of them, no caption
NO_MEDIUM = f"a {CAPTIONS} file without an image or clip beside it"

TAR_BESIDE = "a .tar file beside images and clips (name it as a source of its own)"
COMPRESSED = re.compile(
    r"\.(tar\.(gz|bz2|xz|zst|lz4|lzma|lz|z)|tgz|taz|tbz2?|tb2|txz|tlz|tzst|zip|7z|rar)$", re.IGNORECASE
)
"""Found in the names of compressed archives."""

LINK_LOST = "a link that leads to nothing"
LINK_OUT = "a linked folder: files outside the source are not read (name it as a source of its own)"
LINK_WITHIN = "a linked folder, whose files are read in their own place"


class Beside(NamedTuple):
    """The files of one folder, by names alone: hidden ones are no part of it.

    Attributes:
        media: its images and clips, by name, and the medium of each.
        captions: the text of each that has one; of another name where only upper and lower case differ.
        unread: number of further files and captions for each reason why they are not used.
        strange: number of files of each suffix that are neither read nor captioned.
    """

    media: Mapping[str, Medium]
    captions: Mapping[str, str]
    unread: Counter[str]
    strange: Counter[str]


def walked(root: Path) -> Iterator[tuple[str, Beside]]:
    """Each folder of a source, as "" or "a/b/", with its files.

    Linked folders are not entered: a file outside the source is refused, and one within is met in its place.
    """
    refused: Counter[str] = Counter()

    def refuse(fault: OSError) -> None:
        refused[f"a folder that cannot be opened: {refusal(fault)}"] += 1

    for place, folders, names in os.walk(root, onerror=refuse):
        folders.sort()
        found = beside(names)
        for name in folders:
            if os.path.islink(link := f"{place}/{name}"):  # noqa: PTH114  # is_symlink may raise
                inner = Path(os.path.realpath(link)).is_relative_to(os.path.realpath(root))
                found.unread[LINK_WITHIN if inner else LINK_OUT] += 1
        for name in names if found.strange else ():
            lost = os.path.islink(link := f"{place}/{name}") and not os.path.exists(link)  # noqa: PTH110, PTH114
            found.unread[LINK_LOST] += lost and name[0] != "." and medium_of(name) is None
        within = Path(place).relative_to(root).as_posix()
        yield "" if within == "." else f"{within}/", found
    yield "", Beside({}, {}, refused, Counter())


def beside(names: Iterable[str]) -> Beside:
    """Finds which text file of a folder is the caption of which image or clip."""
    media: dict[str, Medium] = {}
    texts: set[str] = set()
    others: list[str] = []
    for name in sorted(names):
        if name[0] == ".":
            continue
        if name[-4:].lower() == CAPTIONS:
            texts.add(name)
        elif (medium := medium_of(name)) is not None:
            media[name] = medium
        else:
            others.append(name)
    captions = {name: text for name in media if (text := name[: name.rfind(".")] + CAPTIONS) in texts}
    free = texts.difference(captions.values())
    if free and len(captions) < len(media):
        found = _but_for_case([name for name in media if name not in captions], free)
        captions |= found
        free.difference_update(found.values())
    unread, strange = _unread(others, free)
    return Beside(media, captions, unread, strange)


def _but_for_case(media: Iterable[str], texts: Iterable[str]) -> dict[str, str]:
    """The captions of media by their names in lower case, where only one text and one name have them."""
    own: dict[str, set[str]] = {}
    for text in texts:
        own.setdefault(text[:-4].lower(), set()).add(text)
    stems: dict[str, set[str]] = {}
    keys = {name: split_suffix(name)[0].lower() for name in media}
    for name, key in keys.items():
        stems.setdefault(key, set()).add(split_suffix(name)[0])
    return {
        name: min(own[key]) for name, key in keys.items() if len(own.get(key, ())) == len(stems[key]) == 1
    }


def split_suffix(name: str) -> tuple[str, str]:
    """A file name without its suffix, and the suffix in lower case; "" where it has none."""
    stem, dot, suffix = name.rpartition(".")
    return (stem, dot + suffix.lower()) if dot and "/" not in suffix else (name, "")


def not_read(suffix: str) -> str:
    """Why a captioned file of an unknown suffix is not used."""
    return f"{suffix or 'a file without a suffix'} is not read"


def _unread(others: Iterable[str], texts: Iterable[str]) -> tuple[Counter[str], Counter[str]]:
    """What is not used of files of unknown suffixes and of texts without an image or clip: for `Beside`."""
    reasons: Counter[str] = Counter()
    strange: Counter[str] = Counter()
    waiting = {text[:-4].lower() for text in texts}
    met: set[str] = set()
    for name in others:
        stem, suffix = split_suffix(name.lower())
        if suffix == ".tar":
            reasons[TAR_BESIDE] += 1
        elif stem not in waiting and COMPRESSED.search(name):
            reasons["a compressed archive is not read: unpack it"] += 1
        elif stem not in waiting or suffix in _DOCUMENTS or suffix == _BESIDE_BOTH:
            strange[suffix] += 1
        else:
            reasons[not_read(suffix)] += 1
        if suffix != _BESIDE_BOTH:
            met.add(stem)
    if alone := sum(text[:-4].lower() not in met for text in texts):
        reasons[NO_MEDIUM] = alone
    return reasons, strange


def clean_caption(text: str) -> str:
    """Cleans a sample's caption: HTML entities resolved, control characters removed, single spaces.

    Entities are resolved twice, because scraped captions are often escaped twice (`&amp;quot;`). Letters of
    any script, emoji and the joiners inside them are kept.
    """
    text = html.unescape(html.unescape(text))
    text = "".join(" " if unicodedata.category(letter) == "Cc" else letter for letter in text)
    return " ".join(text.split())


def texts_of(cell: object) -> tuple[str, ...]:
    """The captions in a cell that holds a text, or a list of texts and lists; () if anything else."""
    if isinstance(cell, str):
        return (cell,)
    if not isinstance(cell, list):
        return ()
    found = [texts_of(each) for each in cell if each is not None]
    return tuple(text for texts in found for text in texts) if all(found) else ()


def decoded(content: bytes, where: str) -> str:
    """The text of a member of an archive; DataError if it is not UTF-8."""
    try:
        return content.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise DataError("a text member of the archive is not UTF-8", where=where) from None


def filled(texts: tuple[str, ...], default: tuple[str, ...] | None) -> tuple[str, ...]:
    """The captions of a row; those of its source, if it has any, where all are blank."""
    return texts if default is None or any(map(str.strip, texts)) else default


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


def row_fault(path: object, texts: Sequence[str], caption: object) -> str | None:
    """The error of a row without its place, so that equal errors can be grouped."""
    if not isinstance(path, str) or not path:
        return f"the path is {kind_of(path)}, not a file name"
    if "\0" in path:
        return f"the path {path!r} contains a NUL"
    if how := escapes(path):
        return f"the path {path!r} {how}"
    if not path.isascii() and (half := unnameable(path)):
        return f"the path contains {half}, half of a character"
    if not texts:
        return f"the caption is {kind_of(caption)}, not a text or a list of texts"
    for text in texts:
        if not text.isascii() and (half := half_character(text)):
            return f"the caption contains {half}, half of a character"
    return None


def no_row(path: Path, dropped: Mapping[str, int], strange: Counter[str], accepted: str) -> DataError:
    """The error of a source of which no row is left.

    Args:
        path: of the source.
        dropped: number of rows left out for each reason.
        strange: number of its files of each suffix that no image or clip has.
        accepted: kinds of sources.
    """
    parts = [", ".join(f"{reason} ({plural(count, 'row')})" for reason, count in dropped.items())]
    if strange:
        shown = (f"{suffix or 'no suffix'} ({count:,})" for suffix, count in strange.most_common(5))
        parts.append(f"its files are {', '.join(shown)}")
    what = "every row is left out" if dropped else "the source has no image or clip"
    what = ": ".join(filter(None, [what, "; ".join(filter(None, parts))]))
    lacking = any(reason.startswith(f"no {CAPTIONS}") for reason in dropped)
    hint = "write captions, or set `caption` of the source" if lacking else None
    return DataError(what, where=str(path), accepted=None if dropped else accepted, hint=hint)
