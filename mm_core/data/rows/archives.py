"""WebDataset archives: uncompressed tar files with images, clips and their texts, read by their headers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import NamedTuple

from mm_core.data.rows.captions import (
    COMPRESSED,
    LINK_WITHIN,
    NO_MEDIUM,
    TAR_BESIDE,
    not_read,
    split_suffix,
    walked,
)
from mm_core.data.rows.media_rows import CAPTIONS, CLIPS, IMAGES, medium_of
from mm_core.data.rows.paths import plain_file, refusal
from mm_core.data.tar_headers import ACCEPTED, FILES, HARD, LINKS, Headers, Place
from mm_core.errors import DataError
from mm_core.files import open_plain

_TEXTS = (CAPTIONS, ".json")
_LONGEST = 2**24  # bytes of a text member
_KNOWN = (*IMAGES, *CLIPS, *_TEXTS)
_CUT = 100  # bytes of a name in a header alone
_MOST_LINKS = 40  # that lead to each other, as Linux follows them


class Member(NamedTuple):
    """An image or clip of an archive with its texts.

    Attributes:
        name: of its member; bytes that are not UTF-8 are in it as Python has them in file names.
        place: of its bytes.
        texts: content of its text files by suffix: `.txt`, `.json`.
    """

    name: str
    place: Place
    texts: dict[str, bytes]


def archives_of(path: Path) -> tuple[Path, ...]:
    """The tar files of a source, in order; () for other sources. Those of a folder's subfolders are used if
    the folder itself has some, or no image or clip anywhere."""
    if path.suffix.lower() == ".tar" or (COMPRESSED.search(path.name) and not path.is_dir()):
        return (path,)  # also to be refused by name
    if not path.is_dir():
        return ()
    found: list[Path] = []
    own = None  # whether the folder itself has archives
    for place, folders, names in os.walk(path):
        folders.sort()
        shown = [name for name in names if name[0] != "."]
        found += [Path(place, name) for name in shown if name[-4:].lower() == ".tar"]
        own = bool(found) if own is None else own
        if not own and any(medium_of(name) for name in shown):
            return ()
    return tuple(sorted(found))


def beside_archives(folder: Path) -> Iterator[str]:
    """For each file of a folder that has archives: the reason why it is not used."""
    for _, found in walked(folder) if folder.is_dir() else ():
        for _ in found.media:
            yield "an image or clip beside .tar files (name its folder as a source of its own)"
        for reason, count in found.unread.items():
            if reason != TAR_BESIDE:
                yield from [reason] * count


def read_archive(path: Path, left_out: Callable[[str], None]) -> Iterator[Member]:
    """Reads the images and clips of an archive by its headers, in its order, each with its texts.

    A text belongs to the image or clip of its own name, else to those of its WebDataset key: the name up to
    the first dot. The members of a sample may lie anywhere in the archive, and may be links to others.

    Args:
        path: the archive.
        left_out: called with the reason for each file that is not used.

    Raises:
        DataError: it cannot be read, is damaged, a member would be written outside the folder it is unpacked
            to, two have one name, or it is not clear which text belongs to an image or clip.
    """
    total = plain_file(path, "archive")
    with _readable(path), open_plain(path) as file:
        places, others = _places(path, Headers(path, file.fileno(), total), left_out)
        texts = _Texts(path, places)
        used: set[str] = set()
        for name, place in places.items():
            if medium_of(name) is None:
                continue
            found: dict[str, bytes] = {}
            for suffix in _TEXTS:
                try:
                    text = texts.of(name, suffix)
                except DataError:
                    if not found:
                        raise
                    text = None  # a caption is there, and several .json members for other readers
                if text is not None:
                    used.add(text)
                    start, size = places[text]
                    file.seek(start)
                    found[suffix] = file.read(size) if size <= _LONGEST else b""
            yield Member(name, place, found)
    for reason in _unread(places, used, others):
        left_out(reason)


def _unread(places: Iterable[str], used: set[str], others: Iterable[str]) -> Iterator[str]:
    """Why texts without an image or clip are not used: their file has an unknown suffix, or is absent."""
    free = [name for name in places if medium_of(name) is None and name not in used]
    if not free:
        return
    keys = {_key(name) for name in places if medium_of(name) is not None}
    stems = {split_suffix(name)[0] for name in free}
    waiting = {_key(name) for name in free} - keys
    met: set[str] = set()
    for name in others:
        stem, suffix = split_suffix(name)
        if stem in stems or _key(name) in waiting:
            met |= {stem, _key(name)}
            yield not_read(suffix)
    for name in free:
        stem, suffix = split_suffix(name)
        if suffix == CAPTIONS and not {stem, _key(name)} & met and _key(name) in waiting:
            yield NO_MEDIUM


class _Texts:
    """Finds the texts of the images and clips of an archive by their names."""

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        self._path = path
        self._own: dict[tuple[str, str], str] = {}  # (stem, suffix) -> text
        self._keys: dict[str, list[str]] = {}  # WebDataset key -> members
        for name in names:
            self._keys.setdefault(_key(name), []).append(name)
            if medium_of(name) is None and name != (first := self._own.setdefault(split_suffix(name), name)):
                raise _double(path, f"{first!r} and {name!r} are both the text of one sample")
        self._shared = cache(self._of_key)

    def of(self, name: str, suffix: str) -> str | None:
        """The text of an image or clip; None if there is none."""
        return self._own.get((split_suffix(name)[0], suffix)) or self._shared(_key(name), suffix)

    def _of_key(self, key: str, suffix: str) -> str | None:
        """The text of those members of a key that have none of their own name."""
        members = self._keys[key]
        media = {split_suffix(name)[0]: name for name in members if medium_of(name) is not None}
        texts = [name for name in members if medium_of(name) is None and split_suffix(name)[1] == suffix]
        if len(texts) == 1 and split_suffix(texts[0])[0] == key:
            return texts[0]
        free = [name for name in texts if split_suffix(name)[0] not in media]
        if not free:
            return None
        lacking = [name for stem, name in media.items() if (stem, suffix) not in self._own]
        if len(texts) > 1:
            raise _unclear(self._path, f"{texts[0]!r} or {texts[1]!r} belongs to {lacking[0]!r}")
        if len(media) > 1:
            raise _unclear(self._path, f"{free[0]!r} belongs to {lacking[0]!r} or {lacking[1]!r}")
        return free[0]


def _key(name: str) -> str:
    base = name.rfind("/") + 1
    return name[:base] + name[base:].partition(".")[0]


def _places(
    path: Path, headers: Headers, left_out: Callable[[str], None]
) -> tuple[Mapping[str, Place], Iterable[str]]:
    """The places of an archive's images, clips and texts by name, in its order, without hidden ones; and the
    names of its other files."""
    found: dict[str, Place] = {}
    others: dict[str, Place] = {}
    links: dict[str, str] = {}
    while (header := headers.following()) is not None:
        name, kind, link, place = header
        base = name[name.rfind("/") + 1 :]
        _, suffix = split_suffix(base)
        known = (medium_of(base) is not None or suffix in _TEXTS) and base[0] != "."
        if kind in LINKS:
            links[name] = normpath(link if kind == HARD else join(dirname(name), link))
        elif kind not in FILES:
            if known:
                left_out(f"a member of type {kind.decode('latin-1')!r}, not a file")
            continue
        elif base[:1] != "." and (suffix == ".tar" or COMPRESSED.search(base)):
            left_out("an archive inside the archive is not read: unpack it")
        elif not known and len(name) == _CUT and any(each.startswith(suffix) for each in _KNOWN):
            left_out("a member whose name is cut off")  # its long name is lost
        if known and name in found:
            raise _double(path, f"two members of the archive are named {name!r}")
        (found if known else others)[name] = place
    if links:
        _follow(links, found, others, left_out)
    return found, [name for name in others if name[name.rfind("/") + 1 :][:1] not in (".", "")]


def _follow(
    links: Mapping[str, str],
    found: dict[str, Place],
    others: dict[str, Place],
    left_out: Callable[[str], None],
) -> None:
    """Gives links the places of the members that they lead to; leaves out those that lead to none."""
    names = {normpath(name): name for name in (*others, *found)}
    folders: set[str] = set()
    for folder in names:
        while (folder := folder.rpartition("/")[0]) and folder not in folders:
            folders.add(folder)
    for own, target in links.items():
        fault = "a link to a file that the archive does not have"
        for _ in range(_MOST_LINKS):
            name = names.get(target)
            if name is None or name not in links:
                break
            target = links[name]
        else:
            name, fault = None, "a link that leads back to itself"
        if name is not None:
            where = found if own in found else others
            where[own] = found[name] if name in found else others[name]
            continue
        if outside := target[:1] == "/" or target.partition("/")[0] == "..":
            fault = "a link that leads out of the archive"
        if inner := target in folders:
            fault = LINK_WITHIN
        if own in found or outside or inner:
            left_out(fault)
        found.pop(own, None)
        others.pop(own, None)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"the archive cannot be read: {refusal(error)}"
        raise DataError(what, where=str(path), accepted=ACCEPTED) from None


def _unclear(path: Path, what: str) -> DataError:
    hint = "make the archive again, each text with the name of its image or clip: a.001.txt for a.001.jpg"
    return DataError(f"it is not clear whether {what}", where=str(path), hint=hint)


def _double(path: Path, what: str) -> DataError:
    return DataError(what, where=str(path), hint="make the archive again, each member with a name of its own")
