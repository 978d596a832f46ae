"""The headers of tar files, read without unpacking anything: v7, ustar, GNU and pax."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mm_core.data.rows.annotations import escapes
from mm_core.errors import DataError, plural

ACCEPTED = "uncompressed tar files, whose members are 0001.jpg, 0001.txt (or 0001.json), 0002.mp4, ..."
FILES, HARD, LINKS = (b"0", b"\0", b"7"), b"1", (b"1", b"2")
"""Kinds of members; symbolic links are links too."""

_EMPTY = (b"1", b"2", b"3", b"4", b"5", b"6")  # kinds without content, whatever size they claim
_RECORDS, _LONG = (b"x", b"X", b"g"), {b"L": b"path", b"K": b"linkpath"}
_USED, _HOLES = (b"path", b"linkpath", b"size"), b"GNU.sparse"
_BLOCK = 512
_SKIPPED = 2**20  # bytes of zeros that are read at once
_LONGEST = 2**24  # bytes of records
_DIGITS = 20  # of a number in a record
_PACKERS = {
    **{b"\x1f\x8b": "gunzip", b"\x1f\x9d": "gunzip", b"BZh": "bunzip2"},
    **{b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd", b"\x04\x22\x4d\x18": "unlz4"},
}


class Place(NamedTuple):
    """Where a member's bytes are in its archive."""

    start: int
    size: int


class Header(NamedTuple):
    """A member: of a kind as in `FILES` and `LINKS`, or another; a link leads to `link`."""

    name: str
    kind: bytes
    link: str
    place: Place


class Headers:
    """Walks the headers of a tar file: v7, ustar, GNU and pax; of several on end too, as by `cat`.

    Args:
        path: of the archive.
        file: its descriptor.
        total: its length in bytes.

    Raises:
        DataError: it is empty.
    """

    def __init__(self, path: Path, file: int, total: int) -> None:
        self._path, self._file, self._total = path, file, total
        self._at = self._start = 0  # of the next header, and of the one that is read
        self._last, self._closed = "", False
        self._shared: dict[bytes, bytes] = {}  # records of all later members
        if not total:
            raise DataError("the archive cannot be read: it is empty", where=str(path), accepted=ACCEPTED)

    def following(self) -> Header | None:
        """The next member; None at the end.

        Raises:
            DataError: a header is damaged, the archive is cut off, a member has holes or leads outside.
        """
        own: dict[bytes, bytes] = {}
        while (block := self._block()) is not None:
            kind = block[156:157]
            if kind in _RECORDS:
                (self._shared if kind == b"g" else own).update(self._records(block))
            elif kind in _LONG:
                own[_LONG[kind]] = self._long(block)
            else:
                return self._member(block, kind, {**self._shared, **own} if own or self._shared else own)
        if own:
            raise self._damaged("no member follows it")
        if not self._closed:
            raise DataError(
                "the archive ends without a block of zeros: "
                f"it may be cut off behind {self._last!r}, at byte {self._at}",
                where=str(self._path),
                hint="copy it again; if it is whole, close it: head -c 1024 /dev/zero >> " + self._path.name,
            )
        return None

    def _member(self, block: bytes, kind: bytes, records: Mapping[bytes, bytes]) -> Header:
        raw = records.get(b"path") or _name(block)
        name = raw.decode("utf-8", "surrogateescape")
        if not raw:
            raise self._damaged("its member has no name")
        if escapes(name):
            raise DataError(
                f"the member {name!r} of the archive leads outside its folder",
                where=str(self._path),
                accepted="relative names without `..`",
                hint="do not unpack it; make the archive again with relative names",
            )
        if kind == b"S" or _HOLES in records:
            raise DataError(f"the member {name!r} of the archive is stored with holes", where=str(self._path))
        if kind == b"\0" and raw.endswith(b"/"):  # a folder, in v7
            kind = b"5"
        link = b""
        if kind in LINKS:
            link = records.get(b"linkpath") or block[157:257].partition(b"\0")[0]
        size = 0 if kind in _EMPTY else self._size(block, records.get(b"size"))
        place = self._span(size, f"the member {name!r}")
        self._last = name
        return Header(name, kind, link.decode("utf-8", "surrogateescape"), place)

    def _block(self) -> bytes | None:
        """The next header, behind any zeros."""
        while self._at < self._total:
            block = os.pread(self._file, _BLOCK, self._at)
            if block[:1] == b"\0" and not block.strip(b"\0"):
                self._closed, self._shared = True, {}
                self._skip_zeros()
                continue
            self._start, self._at, self._closed = self._at, self._at + _BLOCK, False
            if len(block) < _BLOCK:
                raise self._no_header(block)
            found = sum(block) - sum(block[148:156]) + 8 * ord(" ")
            wanted = _number(block[148:156])
            if wanted != found:
                negative = sum(byte > 127 for byte in block[:148] + block[156:])
                if wanted != found - 256 * negative:  # of signed bytes, in old archives
                    raise self._no_header(block)
            return block
        return None

    def _skip_zeros(self) -> None:
        while zeros := os.pread(self._file, _SKIPPED, self._at):
            rest = len(zeros.lstrip(b"\0"))
            self._at += (len(zeros) - rest) // _BLOCK * _BLOCK if rest else len(zeros)
            if rest:
                return

    def _size(self, block: bytes, record: bytes | None = None) -> int:
        if record is None:
            size = _number(block[124:136])
        else:
            size = int(record) if record.isdigit() and len(record) < _DIGITS else None
        if size is None or size < 0:
            raise self._damaged(f"the size of its member is {record or block[124:136]!r}")
        return size

    def _span(self, size: int, what: str) -> Place:
        """The place of `size` bytes from here; the walk goes on behind them."""
        if self._at + size > self._total:
            raise self._damaged(f"{what} is cut off: it ends at byte {self._at + size} of {self._total}")
        place = Place(self._at, size)
        self._at += -(-size // _BLOCK) * _BLOCK
        return place

    def _content(self, block: bytes) -> bytes:
        size = self._size(block)
        if size > _LONGEST:
            raise self._damaged(f"it would have {plural(size, 'byte')} of records")
        place = self._span(size, "it")
        return os.pread(self._file, size, place.start)

    def _long(self, block: bytes) -> bytes:
        """A long name of GNU's, which a zero ends."""
        text = self._content(block)
        if not text[:-1] or text.find(b"\0") != len(text) - 1:
            raise self._damaged("this is not a long name")
        return text[:-1]

    def _records(self, block: bytes) -> dict[bytes, bytes]:
        """The records of pax: `27 path=photos/a.jpg` and a line break, each with its own length first."""
        content, found, at = self._content(block).rstrip(b"\0"), dict[bytes, bytes](), 0
        while at < len(content):
            length, _, _ = content[at : at + _DIGITS].partition(b" ")
            end = at + int(length) if length.isdigit() and len(length) < _DIGITS else 0
            key, equals, value = content[at + len(length) + 1 : end - 1].partition(b"=")
            if not key or not equals or content[end - 1 : end] != b"\n":
                raise self._damaged(f"its record at byte {at} is broken")
            if key in _USED or key.startswith(b"GNU.sparse."):
                found[key if key in _USED else _HOLES] = value
            at = end
        return found

    def _no_header(self, block: bytes) -> DataError:
        tools = [tool for start, tool in _PACKERS.items() if not self._start and block.startswith(start)]
        if not tools:
            cut = len(block) < _BLOCK
            return self._damaged("it is cut off" if cut else "its checksum is wrong, or this is not a header")
        return DataError(
            "the archive cannot be read: it is compressed",
            where=str(self._path),
            accepted=ACCEPTED,
            hint=f"unpack it: {tools[0]} --stdout {self._path.name} > unpacked.tar",
        )

    def _damaged(self, why: str) -> DataError:
        last = f"the last whole member is {self._last!r}" if self._last else "no member is before it"
        return DataError(
            f"the archive cannot be read: the header at byte {self._start} is damaged: {why} ({last})",
            where=str(self._path),
            accepted=ACCEPTED,
            hint="copy the archive again, or make it again",
        )


def _name(block: bytes) -> bytes:
    name = block[:100].partition(b"\0")[0]
    if block[257:262] != b"ustar" or block[262:263] == b" ":  # v7 and GNU
        return name
    end = 476 if block[508:512] == b"tar\0" else 500  # star has times behind it
    first = block[345:end].partition(b"\0")[0]
    return first + b"/" + name if first else name


def _number(field: bytes) -> int | None:
    """The number in a header's field: octal digits, or bytes behind a first bit of 1; None if neither."""
    if field[0] & 128:
        value = int.from_bytes(field, "big") - (1 << 8 * len(field) - 1)
        return value - (1 << 8 * len(field) - 1) if field[0] & 64 else value
    digits = field.partition(b"\0")[0].strip(b" ")
    return None if digits.translate(None, b"01234567") else int(digits or b"0", 8)
