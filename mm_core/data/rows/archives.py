"""WebDataset archives: uncompressed tar files with images, clips and their texts."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from mm_core.data.rows.annotations import escapes
from mm_core.data.rows.media_rows import CAPTIONS, medium_of
from mm_core.data.rows.paths import plain_file
from mm_core.errors import DataError

_ACCEPTED = "uncompressed tar files, whose members are 0001.jpg, 0001.txt (or 0001.json), 0002.mp4, ..."
_TEXTS = (CAPTIONS, ".json")
_LONGEST = 2**24  # bytes of a text member


class Place(NamedTuple):
    """Where a member's bytes are in its archive."""

    start: int
    size: int


class Member(NamedTuple):
    """An image or clip of an archive with its texts.

    Attributes:
        name: of its member.
        place: of its bytes.
        texts: content of its text files by suffix: `.txt`, `.json`.
    """

    name: str
    place: Place
    texts: dict[str, bytes]


def read_archive(path: Path) -> Iterator[Member]:
    """Reads the images and clips of an archive by its headers, in its order, each with its texts.

    A text belongs to the image or clip of its own name, else to those of its WebDataset key: the name up to
    the first dot. The members of a sample may lie anywhere in the archive.

    Raises:
        DataError: it cannot be read, a member would be written outside the folder it is unpacked to, two have
            one name, or it is not clear which text belongs to an image or clip.
    """
    places = _places(path)
    texts = _Texts(path, places)
    with _readable(path), path.open("rb") as file:
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
                    start, size = places[text]
                    file.seek(start)
                    found[suffix] = file.read(size) if size <= _LONGEST else b""
            yield Member(name, place, found)


class _Texts:
    """Finds the texts of the images and clips of an archive by their names."""

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        self._path = path
        self._own: dict[tuple[str, str], str] = {}  # (stem, suffix) -> text
        self._keys: dict[str, list[str]] = {}  # WebDataset key -> members
        for name in names:
            self._keys.setdefault(_key(name), []).append(name)
            if medium_of(name) is None and name != (first := self._own.setdefault(_split(name), name)):
                raise _double(path, f"{first!r} and {name!r} are both the text of one sample")
        self._shared = cache(self._of_key)

    def of(self, name: str, suffix: str) -> str | None:
        """The text of an image or clip; None if there is none."""
        return self._own.get((_split(name)[0], suffix)) or self._shared(_key(name), suffix)

    def _of_key(self, key: str, suffix: str) -> str | None:
        """The text of those members of a key that have none of their own name."""
        members = self._keys[key]
        media = {_split(name)[0]: name for name in members if medium_of(name) is not None}
        texts = [name for name in members if medium_of(name) is None and _split(name)[1] == suffix]
        if len(texts) == 1 and _split(texts[0])[0] == key:
            return texts[0]
        free = [name for name in texts if _split(name)[0] not in media]
        if not free:
            return None
        lacking = [name for stem, name in media.items() if (stem, suffix) not in self._own]
        if len(texts) > 1:
            raise _unclear(self._path, f"{texts[0]!r} or {texts[1]!r} belongs to {lacking[0]!r}")
        if len(media) > 1:
            raise _unclear(self._path, f"{free[0]!r} belongs to {lacking[0]!r} or {lacking[1]!r}")
        return free[0]


def _key(name: str) -> str:
    base = PurePosixPath(name).name
    return name[: len(name) - len(base)] + base.partition(".")[0]


def _split(name: str) -> tuple[str, str]:
    stem, dot, suffix = name.rpartition(".")
    return stem, dot + suffix.lower()


def _places(path: Path) -> dict[str, Place]:
    """The places of an archive's images, clips and texts by name, in its order; hidden files are left out."""
    total = plain_file(path, "archive")
    found: dict[str, Place] = {}
    with _readable(path), tarfile.open(path, "r:") as archive:
        for each in archive:
            _check(each, path, total)
            archive.members = []  # type: ignore[attr-defined]  # a list of a million headers otherwise
            base = PurePosixPath(each.name).name
            known = medium_of(base) is not None or _split(base)[1] in _TEXTS
            if not each.isreg() or not known or base.startswith("."):
                continue
            if each.name in found:
                raise _double(path, f"two members of the archive are named {each.name!r}")
            found[each.name] = Place(each.offset_data, each.size)
    return found


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, OSError, EOFError) as error:
        what = f"the archive cannot be read: {error}"
        raise DataError(what, where=str(path), accepted=_ACCEPTED) from None


def _unclear(path: Path, what: str) -> DataError:
    hint = "make the archive again, each text with the name of its image or clip: a.001.txt for a.001.jpg"
    return DataError(f"it is not clear whether {what}", where=str(path), hint=hint)


def _double(path: Path, what: str) -> DataError:
    return DataError(what, where=str(path), hint="make the archive again, each member with a name of its own")


def _check(member: tarfile.TarInfo, path: Path, total: int) -> None:
    if escapes(member.name):
        raise DataError(
            f"the member {member.name!r} of the archive leads outside its folder",
            where=str(path),
            accepted="relative names without `..`",
            hint="do not unpack it; make the archive again with relative names",
        )
    if member.isreg() and (member.issparse() or member.offset_data + member.size > total):
        what = "is stored with holes" if member.issparse() else "is cut off"
        raise DataError(f"the member {member.name!r} of the archive {what}", where=str(path))
