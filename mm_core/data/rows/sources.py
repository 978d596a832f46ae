"""Sources of images and clips: tables, folders and archives, read as rows without opening any medium."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from mm_core.builtin.configs.data import MediaColumns, MediaSource
from mm_core.data.rows.annotations import describe_faults
from mm_core.data.rows.archives import Member, archives_of, beside_archives, read_archive
from mm_core.data.rows.captions import decoded, filled, no_row, row_fault, texts_of, walked
from mm_core.data.rows.json_rows import RowFile
from mm_core.data.rows.media_rows import (
    CAPTIONS,
    SIZES,
    MediaRow,
    Medium,
    RowBlock,
    declared,
    field_fault,
    field_text,
    medium_of,
    number_of,
)
from mm_core.data.rows.paths import check_folder, open_plain, status
from mm_core.data.rows.tables import (
    SUFFIXES,
    Cells,
    Column,
    batch_cells,
    columns_for,
    parquet_batches,
    read_table,
)
from mm_core.data.rows.where import Where
from mm_core.errors import DataError

Rows = TypeVar("Rows", MediaRow, MediaRow | RowBlock)

ACCEPTED = f"a table ({', '.join(SUFFIXES)}), a folder of images and clips, or .tar files"
HEAD = 100
"""Rows of a source that are read to check a config."""


@dataclass(frozen=True)
class OpenedSource:
    """A source whose rows have been read.

    Attributes:
        name: as in the config.
        folder: of the files that its rows name.
        archives: the tar files of the source, in order.
        kept: number of rows of each medium.
        dropped: number of rows left out for each reason.
        filled: number of rows without a caption of their own, which have the source's.
    """

    name: str
    folder: Path
    archives: tuple[Path, ...]
    kept: Mapping[Medium, int]
    dropped: Mapping[str, int]
    filled: int

    @property
    def uncaptioned(self) -> int:
        """Number of images and clips left out, although `where` does not ask for it."""
        return sum(count for reason, count in self.dropped.items() if not reason.startswith("where"))


class SourceReader:
    """Reads the rows of one source, and counts what it leaves out.

    Args:
        number: of the source.
        source: its config.

    Attributes:
        archives: the tar files of the source, in order.
        kept: number of rows of each medium.
        dropped: number of rows left out for each reason.

    Raises:
        DataError: the source is of no known kind, is missing, or its `where` is no condition.
    """

    def __init__(self, number: int, source: MediaSource) -> None:
        self.number, self.source, self.path = number, source, Path(source.annotations)
        self.where = None if source.where is None else Where(source.where)
        self.kept: dict[Medium, int] = {}
        self.dropped: Counter[str] = Counter()
        self.filled = 0
        self._strange: Counter[str] = Counter()  # files of a folder by their unknown suffixes
        self.archives = archives_of(self.path)
        own = self.path if self.path.is_dir() else self.path.parent
        self.folder = own if source.folder is None else Path(source.folder)
        self.in_table = not self.archives and not self.path.is_dir()
        if self.in_table and status(self.path, "source") is None:
            raise RowFile(self.path, "source", ACCEPTED).missing()
        if self.in_table and self.path.suffix.lower() not in SUFFIXES:
            raise DataError("the source is of no known kind", where=str(self.path), accepted=ACCEPTED)
        if source.folder is not None and not self.in_table:
            what = "`folder` is the base of a table's paths, but this source is no table"
            raise DataError(what, where=str(self.path), hint="remove `folder` of the source")
        if source.columns != MediaColumns() and not self.in_table and not self.archives:
            what = "`columns` names the columns of a table, but this source is a folder"
            raise DataError(what, where=str(self.path), hint="remove `columns` of the source")
        check_folder(self.folder, "the folder of the images and clips")
        named = source.columns
        if named.fields and not self.in_table:
            raise DataError("`columns.fields` needs a table, but this source is none", where=str(self.path))
        captions = named.caption if isinstance(named.caption, tuple) else (named.caption,)
        self.captions: tuple[Column, ...] = captions
        self.default = None if source.caption is None else (source.caption,)
        # A table without names has only numbers.
        sizes: dict[str, Column] = {name: getattr(named, name) for name in SIZES}
        self.sizes = {k: v for k, v in sizes.items() if type(v) is type(named.path)}
        self._faults: dict[str, list[str]] = {}  # error -> the rows that have it
        self._met: set[str] = set()  # names in `where` that have had a value

    def rows(self, most: int | None = None) -> Iterator[MediaRow]:
        """Reads every row of the source, or the first `most`, without those that `where` leaves out.

        Raises:
            DataError: a file cannot be read, rows are broken (all errors of a table at once), `where` names
                an unknown column, or no row is left.
        """
        return self._counted(islice(self._every(), most), most)

    def blocks(self) -> Iterator[MediaRow | RowBlock]:
        """Reads every row as `rows` does; those of a Parquet table in blocks, several times as fast."""
        columnar = (
            self.in_table
            and self.path.suffix.lower() == ".parquet"
            and self.where is None
            and not self.source.columns.fields
            and not self.default
        )
        return self._counted(self._in_blocks() if columnar else self._every(), None)

    def _counted(self, found: Iterator[Rows | None], most: int | None) -> Iterator[Rows]:
        self.dropped.clear()
        self.filled = 0
        self._strange.clear()
        self._faults.clear()
        seen = images = clips = 0
        for row in found:
            seen += 1
            if row is not None:
                if isinstance(row, RowBlock):
                    images += (count := int(row.facts["image"].sum()))
                    clips += len(row.facts) - count
                else:
                    images += row[2] == "image"
                    clips += row[2] != "image"
                    self.filled += row[3] is self.default
                yield row
        complete = most is None or seen < most
        self.kept = {"image": images, "clip": clips}
        if self._faults:
            raise DataError(describe_faults(self._faults), where=str(self.path), accepted=ACCEPTED_ROWS)
        if self.where is not None and (complete or self.path.suffix.lower() in (".csv", ".tsv", ".parquet")):
            self._check_names(self.where)
        if self.in_table and self.filled and self.filled == images + clips:
            self._check_captions()
        if complete and not images + clips:
            raise no_row(self.path, self.dropped, self._strange, ACCEPTED)

    def opened(self) -> OpenedSource:
        """The source, once its rows have been read."""
        kept, dropped = dict(self.kept), dict(self.dropped)
        return OpenedSource(self.source.annotations, self.folder, self.archives, kept, dropped, self.filled)

    def _every(self) -> Iterator[MediaRow | None]:
        return (
            self._in_archives() if self.archives else self._in_table() if self.in_table else self._in_folder()
        )

    # -- kinds of sources: each yields a row, or None for one that is left out ------------------

    def _in_folder(self) -> Iterator[MediaRow | None]:
        for within, found in walked(self.path):
            self._strange.update(found.strange)
            for name, medium in found.media.items():
                text = found.captions.get(name)
                if text is None and self.default is None:
                    self._left_out(f"no {CAPTIONS} file beside it")
                    yield None
                elif not self._admits({"path": within + name}):
                    yield None
                elif text is None or text == name[: name.rfind(".")] + CAPTIONS:
                    yield MediaRow(self.number, within + name, medium, () if text else self.default or ())
                else:
                    yield self._captioned(within + name, medium, self.path / within / text)
            for reason, count in found.unread.items():
                for _ in range(count):
                    self._left_out(reason)
                    yield None

    def _captioned(self, path: str, medium: Medium, text: Path) -> MediaRow | None:
        """The row of a file whose caption has another name, which only its row can hold."""
        try:
            with open_plain(text, "caption") as file:
                own = (file.read().decode("utf-8-sig"),)
                return MediaRow(self.number, path, medium, filled(own, self.default))
        except (DataError, OSError, UnicodeDecodeError):
            self._left_out(f"its {CAPTIONS} file cannot be read")
            return None

    def _in_archives(self) -> Iterator[MediaRow | None]:
        for number, archive in enumerate(self.archives):
            for member in read_archive(archive, self._left_out):
                yield self._of_member(number, member, archive)
        for reason in beside_archives(self.path):
            self._left_out(reason)

    def _of_member(self, number: int, member: Member, archive: Path) -> MediaRow | None:
        name, (start, size), where = member.name, member.place, f"{archive}, {member.name}"
        texts = {suffix: decoded(content, where) for suffix, content in member.texts.items()}
        values: dict[str, Any] = {}
        if ".json" in texts:
            with suppress(ValueError, RecursionError):
                values = json.loads(texts[".json"])
            if not isinstance(values, dict):
                raise DataError("the .json member is not a JSON object", where=where)
        named = [values.get(str(column)) for column in self.captions]
        own = (texts[CAPTIONS],) if CAPTIONS in texts else texts_of(named)
        captions = filled(own, self.default)
        if captions is self.default and (fit := columns_for({*values, "path"})):
            raise DataError(f"the .json member has no caption, but its keys fit: set {fit}", where=where)
        sizes = declared(*(values.get(str(column)) for column in self.sizes.values()))
        if not captions:
            self._left_out(f"no {CAPTIONS} member and no caption in a .json member")
        elif fault := row_fault(name, captions, None):
            raise DataError(fault, where=where)
        elif self._admits({**sizes._asdict(), **values, "path": name}):
            medium = medium_of(name) or "clip"
            return MediaRow(self.number, name, medium, captions, *sizes, number, start, size)
        return None

    def _in_table(self) -> Iterator[MediaRow | None]:
        columns, optional = self._columns()
        return self._of_cells(columns, read_table(self.path, columns, optional=optional))

    def _columns(self) -> tuple[list[Column], set[Column]]:
        named = self.where.names if self.where is not None else ()
        own = self.source.columns
        needed = (own.path, *self.captions, *(each.place for each in own.fields))
        columns = list(dict.fromkeys((*needed, *self.sizes.values(), *named)))
        optional = set(columns) - set(needed)
        return columns, optional.union(self.captions if self.default else ())

    def _in_blocks(self) -> Iterator[MediaRow | RowBlock | None]:
        from mm_core.data.rows.mapped_rows import row_block  # imports torch, which mm validate does not

        columns, optional = self._columns()
        seen = 0
        for batch in parquet_batches(self.path, columns, optional):
            found = {
                column: batch[0].column(name)
                for column, name in zip(columns, batch[1], strict=True)
                if name is not None
            }
            sizes = {name: found[column] for name, column in self.sizes.items() if column in found}
            captions = [found[column] for column in self.captions]
            block = row_block(self.number, found[self.source.columns.path], captions, sizes)
            if block is None:
                yield from self._of_cells(columns, batch_cells(batch, seen))
            else:
                yield block
            seen += batch[0].num_rows
        if not seen:
            yield from self._every()  # raises

    def _of_cells(self, columns: Sequence[Column], cells: Iterable[Cells]) -> Iterator[MediaRow | None]:
        named = self.where.names if self.where is not None else ()
        # A size without a column is the None behind the last cell.
        places = [columns.index(self.sizes[name]) if name in self.sizes else -1 for name in SIZES]
        sizes, own = itemgetter(*places), [columns.index(name) for name in named]
        captions = [columns.index(column) for column in self.captions]
        further = [(each, columns.index(each.place)) for each in self.source.columns.fields]
        separated = self.path.suffix.lower() in (".csv", ".tsv")
        number, first, several = self.number, captions[0], len(captions) > 1
        for place, values, fault in cells:
            if fault is None:
                path, caption = values[0], values[first]
                texts = texts_of([values[each] for each in captions] if several else caption)
                if texts or not any(values[each] for each in captions):
                    texts = filled(texts, self.default)
                fault = row_fault(path, texts, caption)
                for each, at in further if fault is None else ():
                    fault = fault or field_fault(each.name, each.kind, values[at], each.most)
            if fault is not None:
                self._faults.setdefault(fault, []).append(place)
                yield None
                continue
            facts = declared(*sizes((*values, None)))
            if named:
                found = {name: values[each] for name, each in zip(named, own, strict=True)}
                if separated:
                    found = {name: number_of(value) if value else None for name, value in found.items()}
                given = {**facts._asdict(), **{k: v for k, v in found.items() if v is not None}}
                if not self._admits(given):
                    yield None
                    continue
            cells_of_fields = tuple(field_text(each.kind, values[at]) for each, at in further)
            yield MediaRow(number, path, medium_of(path) or "clip", texts, *facts, fields=cells_of_fields)

    # -- conditions -----------------------------------------------------------------------------

    def _left_out(self, reason: str) -> None:
        self.dropped[reason] += 1

    def _admits(self, values: Mapping[str, object]) -> bool:
        """Whether `where` keeps a row with these values of columns; counts it otherwise."""
        if self.where is None:
            return True
        given = {name: values.get(name) for name in self.where.names}
        self._met.update(name for name, value in given.items() if value is not None)
        try:
            if self.where(given):
                return True
            self._left_out(f"where: {self.source.where}")
        except TypeError as error:
            empty = [name for name, value in given.items() if value is None or value != value]
            self._left_out(f"where: {' and '.join(empty)} unknown" if empty else f"where: {error}")
        return False

    def _check_captions(self) -> None:
        """DataError if no row of a table has a caption, because their column has another name."""
        try:
            missing = next(read_table(self.path, [self.captions[0]])).fault or ""
        except DataError as fault:
            missing = "; ".join(filter(None, [fault.what, fault.hint]))
        if not missing:
            return
        if self.source.columns.caption != MediaColumns().caption or "columns: {" in missing:
            raise DataError(f"no row has a caption: {missing}", where=str(self.path))

    def _check_names(self, where: Where) -> None:
        for name in where.names:
            if name in self._met:
                continue
            if self.in_table:
                cells = next(read_table(self.path, [name]))  # names the columns that there are
                if cells.fault is None:
                    continue
                raise DataError(f"`where: {where.text}`: {cells.fault}", where=str(self.path))
            raise DataError(f"`where: {where.text}`: no row has {name!r}", where=str(self.path))


ACCEPTED_ROWS = (
    'rows {"path": "clips/a.mp4", "cap": "a caption" (or a list of captions), ...}; `columns` of the source '
    "renames the columns: {path: file, caption: text}"
)


def head(source: MediaSource) -> tuple[Path, Sequence[MediaRow]]:
    """The folder of a source, and its first rows.

    Raises:
        DataError: as for `SourceReader`.
    """
    changed = status(Path(source.annotations), "source")
    return _head(source, None if changed is None else changed.st_mtime_ns)


@lru_cache(maxsize=32)
def _head(source: MediaSource, changed: int | None) -> tuple[Path, Sequence[MediaRow]]:
    reader = SourceReader(0, source)
    return reader.folder, tuple(reader.rows(HEAD))


def media_of(sources: Sequence[MediaSource]) -> list[set[Medium]]:
    """The media in the first rows of each source; an unreadable source has none."""
    found: list[set[Medium]] = []
    for source in sources:
        found.append(set())
        with suppress(DataError):
            found[-1] |= {row.medium for row in head(source)[1]}
    return found
