"""Rows of images and clips in files of a temporary folder, mapped into memory by all processes of a host."""

from __future__ import annotations

import hashlib
import socket
import tempfile
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from mm_core.data.rows.annotations import MAY_ESCAPE
from mm_core.data.rows.media_rows import IMAGES, SIZES, MediaRow, RowBlock
from mm_core.data.rows.tables import cells_of
from mm_core.errors import MMError
from mm_core.runtime.ranks import Ranks

if TYPE_CHECKING:
    from pyarrow import Array

T = TypeVar("T")

_FACTS = np.dtype(
    [
        *(("source", "<u2"), ("image", "?"), ("num_frames", "<i4"), ("height", "<i4"), ("width", "<i4")),
        *(("fps", "<f8"), ("archive", "<i4"), ("start", "<i8"), ("size", "<i8")),
    ]
)
_PACKED = Struct("<H?iiidiqq")
_BETWEEN = "\0"  # between path and captions


def row_block(
    source: int, path: Array, captions: Sequence[Array], sizes: Mapping[str, Array]
) -> RowBlock | None:
    """The rows in columns of Arrow; None if a row may be broken, or a column is of an unusual type.

    Args:
        source: number of the source.
        path: texts.
        captions: of each column: texts, or lists of texts.
        sizes: the columns that there are, by their names in `SIZES`.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = [_plain(path), *(_joined(_plain(column)) for column in captions)]
    if not all(pa.types.is_string(each.type) or pa.types.is_large_string(each.type) for each in texts):
        return None
    texts = [each.cast(pa.large_string()) for each in texts]
    if not len(path) or any(each.null_count for each in texts) or pc.any(pc.equal(texts[0], "")).as_py():
        return None
    if pc.any(pc.match_substring_regex(texts[0], MAY_ESCAPE)).as_py():
        return None
    joined = pc.binary_join_element_wise(*texts, pa.scalar(_BETWEEN, pa.large_string()))
    starts = np.frombuffer(joined.buffers()[1], np.int64)[joined.offset :][: len(joined) + 1]
    text = np.frombuffer(joined.buffers()[2] or b"", np.uint8)[starts[0] : starts[-1]]
    several = [pc.sum(pc.list_value_length(each)).as_py() for each in captions if _is_list(each)]
    if np.count_nonzero(text == 0) != sum(several) + (len(captions) - len(several)) * len(joined):
        return None  # texts contain what is between them
    facts = np.zeros(len(joined), _FACTS)
    suffixes = "|".join(suffix[1:] for suffix in IMAGES)
    image = pc.match_substring_regex(texts[0], rf"\.({suffixes})$", ignore_case=True)
    facts["source"], facts["image"], facts["archive"] = source, image, -1
    found = {name: _coded(_plain(column), SIZES[name]) for name, column in sizes.items()}
    for name in ("num_frames", "fps", "height", "width"):
        facts[name] = found.get(name, 0)
    if "resolution" in found:
        for side, name in enumerate(("height", "width")):
            facts[name] = np.where(facts[name], facts[name], found["resolution"][:, side])
    return RowBlock(facts, text, starts[1:] - starts[0])


def _plain(column: Array) -> Array:
    import pyarrow as pa

    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _is_list(column: Array) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(column.type) or pa.types.is_large_list(column.type))


def _joined(column: Array) -> Array:
    """The texts of each list as one; None for a list without texts, or with a null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not _is_list(column) or not pa.types.is_string(column.type.value_type):
        return column
    filled = pc.greater(pc.list_value_length(column), 0)
    return pc.if_else(filled, pc.binary_join(column, _BETWEEN), None)


def _coded(column: Array, value_of: Callable[[object], Any]) -> np.ndarray[Any, Any]:
    """What a column of sizes declares, 0 for nothing: each different value is parsed once."""
    import pyarrow as pa

    try:
        coded = column.dictionary_encode("encode")
        values, places = cells_of(coded.dictionary), coded.indices.to_numpy()
    except pa.ArrowNotImplementedError:  # lists and objects
        values, places = cells_of(column), np.arange(len(column))
    found = np.array([value_of(value) for value in values], float)  # NaN for None
    numbers: np.ndarray[Any, Any] = np.nan_to_num(found)[places]
    return numbers


class MappedRows(Sequence[MediaRow]):
    """Rows of images and clips, which processes share: only the folder's path is sent to data workers.

    Args:
        folder: written by `write`.
        fields: the number of further fields of each source's rows; (): none.

    Attributes:
        facts: structured array [N] of what is known of each row without decoding it: `image`, and what it
            declares, `num_frames`, `height`, `width` (0: nothing) and `fps`.
    """

    def __init__(self, folder: Path, fields: tuple[int, ...] = ()) -> None:
        self.folder, self.fields = folder, fields
        self.facts: np.ndarray[tuple[int], np.dtype[np.void]] = np.load(folder / "facts.npy", mmap_mode="r")
        self._ends = np.load(folder / "ends.npy", mmap_mode="r")
        self._text = np.load(folder / "text.npy", mmap_mode="r")

    def __reduce__(self) -> tuple[object, ...]:
        return MappedRows, (self.folder, self.fields)

    def __len__(self) -> int:
        return len(self.facts)

    @overload
    def __getitem__(self, index: int) -> MediaRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[MediaRow]: ...
    def __getitem__(self, index: int | slice) -> MediaRow | list[MediaRow]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]  # negative ones too; IndexError outside
        start, end = (int(self._ends[place - 1]) if place else 0), int(self._ends[place])
        path, *texts = self._text[start:end].tobytes().decode(errors="surrogateescape").split(_BETWEEN)
        source, image, frames, height, width, fps, archive, first, size = self.facts[place].item()
        sizes = (frames or None, fps or None, height or None, width or None)
        own = self.fields[source] if self.fields else 0
        return MediaRow(
            source,
            path,
            "image" if image else "clip",
            tuple(texts[own:]),
            *sizes,
            None if archive < 0 else archive,
            first,
            size,
            tuple(texts[:own]),
        )

    def of_source(self, source: int) -> range:
        """The places of a source's rows."""
        return range(*np.searchsorted(self.facts["source"], [source, source + 1]).tolist())

    def digest(self, places: range) -> bytes:
        """The sha256 of the paths and captions of rows, and of where they are in archives."""
        ends = self._ends[places.start : places.stop]
        first = int(self._ends[places.start - 1]) if places.start else 0
        found = hashlib.sha256(self._text[first : ends[-1] if len(ends) else first])
        found.update(ends - first)
        for name in ("archive", "start", "size"):
            found.update(self.facts[name][places.start : places.stop].tobytes())
        return found.digest()

    def blank_captions(self, places: range) -> int:
        """How many captions of these rows are empty or white space; those beside files are not counted."""
        first = int(self._ends[places.start - 1]) if places.start else 0
        ends = self._ends[places.start : places.stop] - first
        if not len(ends):
            return 0
        text = self._text[first : first + int(ends[-1])]
        starts = np.flatnonzero(text == 0)  # of each caption, by what is between
        cuts = np.sort(np.concatenate([starts, [0], ends[:-1]]))
        # The highest byte from each cut to the next one; controls and spaces are up to 32.
        highest = np.maximum.reduceat(text, cuts)
        return int(np.count_nonzero((highest <= 32) & (text[cuts] == 0)))

    @staticmethod
    def write(rows: Iterable[MediaRow | RowBlock], folder: Path) -> None:
        """Writes rows, one or one block at a time, into the files of a folder."""
        facts, text, ends = bytearray(), bytearray(), array("q")
        pack = _PACKED.pack
        for row in rows:
            if isinstance(row, RowBlock):
                facts += row.facts.tobytes()
                ends.frombytes((row.ends + len(text)).tobytes())
                text += row.text.tobytes()
                continue
            source, path, medium, captions, frames, fps, height, width, archive, start, size, own = row
            texts = (path, *own, *captions)
            facts += pack(
                source,
                medium == "image",
                frames or 0,
                height or 0,
                width or 0,
                fps or 0.0,
                -1 if archive is None else archive,
                start,
                size,
            )
            joined = _BETWEEN.join(texts)
            if joined.count(_BETWEEN) >= len(texts):
                joined = _BETWEEN.join(word.replace(_BETWEEN, " ") for word in texts)
            text += joined.encode(errors="surrogateescape")
            ends.append(len(text))
        np.save(folder / "facts.npy", np.frombuffer(facts, dtype=_FACTS))
        np.save(folder / "text.npy", np.frombuffer(text, dtype=np.uint8))
        np.save(folder / "ends.npy", np.frombuffer(ends, dtype=np.int64))


def read_once(write: Callable[[Path], T]) -> tuple[Path, T]:
    """Calls `write` on one rank of each host, with a folder that lasts as long as that rank.

    All ranks call it.

    Args:
        write: writes files into the folder. What it returns is sent to the other ranks.

    Returns:
        The folder, and what `write` has returned.

    Raises:
        MMError: what `write` raises, on every rank of the host.
    """
    ranks, host = Ranks.current(), socket.gethostname()
    hosts = ranks.gather(host)
    first = hosts.index(host)
    made: tuple[Path, T] | MMError | None = None
    if ranks.rank == first:
        folder = _folder()
        try:
            made = folder, write(folder)
        except MMError as error:
            made = error
    made = ranks.gather(made)[first]
    if isinstance(made, MMError):
        raise made
    assert made is not None, "the first rank of a host has written its rows, or failed"
    if made[0].is_dir():
        return made
    folder = _folder()  # in a container of its own, with its own temporary folder
    return folder, write(folder)


def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="rows-", dir=util.get_temp_dir()))
