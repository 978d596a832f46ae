"""WebDataset archives: uncompressed tar files in which the files of a sample follow each other."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from mm_core.data.rows.annotations import escapes
from mm_core.data.rows.media_rows import CAPTIONS, medium_of
from mm_core.data.rows.paths import plain_file
from mm_core.errors import DataError

_ACCEPTED = "uncompressed tar files, whose members are 0001.jpg, 0001.txt (or 0001.json), 0002.mp4, ..."
_LONGEST = 2**24  # bytes of a text member


@dataclass
class Member:
    """A sample of an archive: an image or clip with its texts.

    Attributes:
        key: name of its files without suffixes.
        media: (name, start in the archive, bytes) of each image and clip.
        texts: content of its text files by suffix: `.txt`, `.json`.
    """

    key: str
    media: list[tuple[str, int, int]] = field(default_factory=list)
    texts: dict[str, bytes] = field(default_factory=dict)


def read_archive(path: Path) -> Iterator[Member]:
    """Reads the samples of an archive from its headers; images and clips are not read.

    Raises:
        DataError: it cannot be read, or a member would be written outside the folder it is unpacked to.
    """
    total = plain_file(path, "archive")
    member: Member | None = None
    try:
        with tarfile.open(path, "r:") as archive:
            for each in archive:
                _check(each, path, total)
                if not each.isreg():
                    continue
                base = PurePosixPath(each.name).name
                key = each.name[: len(each.name) - len(base)] + base.partition(".")[0]
                if member is None or member.key != key:
                    if member is not None:
                        yield member
                    member = Member(key)
                if medium_of(base) is not None:
                    member.media.append((each.name, each.offset_data, each.size))
                elif (suffix := PurePosixPath(base).suffix.lower()) in (CAPTIONS, ".json"):
                    content = archive.extractfile(each) if each.size <= _LONGEST else None
                    member.texts[suffix] = b"" if content is None else content.read()
                archive.members = []  # type: ignore[attr-defined]  # a list of a million headers otherwise
    except (tarfile.TarError, OSError, EOFError) as error:
        what = f"the archive cannot be read: {error}"
        raise DataError(what, where=str(path), accepted=_ACCEPTED) from None
    if member is not None:
        yield member


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
