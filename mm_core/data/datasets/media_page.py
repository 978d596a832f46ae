"""The page of `mm data inspect --page`: what the sources of a run contain, with pictures and texts."""

from __future__ import annotations

import base64
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mm_core.contracts import Dataset, SupportsPictures, SupportsRendered
from mm_core.data.datasets.media_report import BUCKET_COLUMNS, Bucketed, Found, inspected, spread
from mm_core.data.datasets.media_sizes import named_size
from mm_core.data.datasets.media_text import MediaTextDataset
from mm_core.data.media.frames import read_frames
from mm_core.data.rows.annotations import inside
from mm_core.data.rows.media_rows import MediaRow, further_files
from mm_core.errors import DataError, PartsError, plural
from mm_core.report.page import document, table

ROWS_OF_MEDIA, ROWS_OF_TEXTS = 12, 3
"""Rows of a source that a page shows, where nothing is asked for."""

_LOOKED, _LOOKED_TEXTS = 20_000, 2_000  # rows of a dataset that are searched for kinds; texts are parsed
_SIDE, _GAP = 160, 4  # of a picture, and between pictures, in pixels
_REMARK = '<p class="remark">{}</p>'
_SOURCES = ("source", "images", "clips", "samples per epoch", "left out", "height x width (files probed)")
_LEGEND = '<p class="faint">{}; learnt: <mark>so</mark></p>'


def render(
    title: str,
    splits: Mapping[str, tuple[Dataset, Sequence[Found]]],
    buckets: Mapping[str, Bucketed],
    rows: int | None = None,
) -> str:
    """The page as HTML text: one file that loads nothing.

    Beside evenly spread rows it shows at least one of each source, medium, file format and bucket.

    Args:
        title: of the page.
        splits: the dataset of each split, and what `inspect` has found in it; nothing of texts.
        buckets: what the split has in buckets, if its samples are in any.
        rows: how many of each source it shows; None: `ROWS_OF_MEDIA`, or `ROWS_OF_TEXTS`.

    Raises:
        ContractError: a dataset is neither `media_text` nor renders texts.
    """
    parts = [f"<h1>{escape(title)}</h1>"]
    for split, (dataset, found) in splits.items():
        parts.append(f"<h2>data.{escape(split)}</h2>")
        if isinstance(dataset, SupportsRendered):
            parts += _texts(dataset, ROWS_OF_TEXTS if rows is None else rows)
        else:
            shown = ROWS_OF_MEDIA if rows is None else rows
            parts += _media(inspected(dataset), found, buckets.get(split), shown)
    return document(f"{title}: mm data inspect", f"<main>{''.join(parts)}</main>")


def _media(
    dataset: MediaTextDataset, found: Sequence[Found], bucketed: Bucketed | None, count: int
) -> Iterator[str]:
    """What a split of images and clips has, in HTML."""
    yield table(_SOURCES, _sources(found))
    if bucketed is not None:
        yield table(BUCKET_COLUMNS, bucketed.table())
        yield from (_REMARK.format(escape(each)) for each in bucketed.remarks())
    places = torch.full((len(dataset.rows),), -1) if bucketed is None else bucketed.of_row
    kinds: set[Hashable] = set()
    for number, source in enumerate(found):
        yield f'<p class="prompt">{escape(source.source)}</p>'
        yield from (_REMARK.format(escape(each)) for each in source.remarks())
        chosen = _chosen(dataset, number, places, count, kinds)
        figures = (_figure(dataset, row, _bucket(bucketed, row)) for row in chosen)
        yield f'<div class="shots samples">{"".join(figures)}</div>'


def _chosen(
    dataset: MediaTextDataset, source: int, places: Tensor, count: int, kinds: set[Hashable]
) -> list[int]:
    """Rows of a source: some, one of each medium and suffix, and of each bucket that is not in `kinds`."""
    rows = dataset.rows.of_source(source)

    def kinds_of(row: int) -> Iterator[Hashable]:
        yield "bucket", int(places[row])
        path = dataset.rows[row].path
        yield source, bool(dataset.rows.facts["image"][row]), path[path.rfind(".") :].lower()

    # Buckets and media are known of all rows, names only of those that are read.
    facts = 2 * places[rows.start : rows.stop].numpy() + dataset.rows.facts["image"][rows.start : rows.stop]
    firsts = [rows[int(place)] for place in np.unique(facts, return_index=True)[1]]
    searched = firsts + spread(rows, _LOOKED // len(dataset.sources))
    return _covering(spread(rows, count), searched, kinds_of, kinds)


def _covering(
    shown: list[int],
    searched: Iterable[int],
    kinds_of: Callable[[int], Iterable[Hashable]],
    kinds: set[Hashable],
) -> list[int]:
    """Rows that are shown, and the first ones with kinds that these and `kinds` lack."""
    for row in shown:
        kinds |= {*kinds_of(row)}
    for row in searched:
        if not kinds.issuperset(own := {*kinds_of(row)}):
            shown = [*shown, row]
            kinds |= own
    return sorted(shown)


def _bucket(bucketed: Bucketed | None, row: int) -> str:
    if bucketed is None:
        return ""
    place = int(bucketed.of_row[row])
    return (
        ", in no bucket" if place < 0 else f", bucket {' x '.join(map(str, bucketed.buckets[place][0].size))}"
    )


def _texts(dataset: Any, count: int) -> Iterator[str]:
    """Rows of texts in HTML, with what is learnt marked."""
    size = len(dataset)
    yield _LEGEND.format(plural(size, "row"))
    pictured = dataset if isinstance(dataset, SupportsPictures) else None
    contents = partial(lru_cache(_LOOKED)(pictured.contents)) if pictured else lambda row: ()
    by_source: dict[str, list[int]] = {}
    searched = spread(range(size), _LOOKED_TEXTS)
    for row in searched:
        for source in {source for source, _ in contents(row)}:
            by_source.setdefault(source, []).append(row)
    shown = {row for rows in by_source.values() for row in spread(rows, count)}
    for row in _covering([*(shown or spread(searched, count))], searched, contents, set()):
        about = "; ".join(": ".join(each) for each in contents(row))
        yield f'<section class="card"><p class="faint">row {row + 1:,} {escape(about)}</p>'
        yield from _text(dataset, pictured, row)
        yield "</section>"


def _text(dataset: Any, pictured: SupportsPictures | None, row: int) -> Iterator[str]:
    """A row of texts, with its pictures, and why it, or a part of it, cannot be read."""
    pieces: Sequence[tuple[str, bool]] = ()
    pictures: Sequence[tuple[str, Tensor]] = ()
    fault: DataError | None = None
    try:
        pieces = dataset.rendered(row)
        pictures = pictured.pictures(row) if pictured else ()
        fault = dataset[row].get("missing")
    except DataError as error:
        fault = error
    for part in fault.faults.values() if isinstance(fault, PartsError) else filter(None, [fault]):
        yield _REMARK.format(escape(str(part)))
    figures = (
        f"<figure>{_sheet(_some(frames), name)}"
        f"<figcaption>{escape(name)} {named_size(count, height, width, count == 1)}</figcaption></figure>"
        for name, frames in pictures
        for count, height, width, _ in [frames.shape]
    )
    yield f'<div class="shots samples">{"".join(figures)}</div>'
    marked = (f"<mark>{escape(text)}</mark>" if learnt else escape(text) for text, learnt in pieces)
    yield f'<p class="chat">{"".join(marked)}</p>'


def _some(frames: Tensor) -> Tensor:
    """The first, the middle and the last frame; fewer of a short clip."""
    return frames[sorted({0, len(frames) // 2, len(frames) - 1})]


def _sources(found: Sequence[Found]) -> list[tuple[str, ...]]:
    return [
        (
            source.source,
            *(f"{count:,}" for count in (source.images, source.clips, source.samples)),
            f"{sum(source.left_out.values()):,}",
            source.probed(),
        )
        for source in found
    ]


def _figure(dataset: MediaTextDataset, place: int, bucket: str) -> str:
    """A row as an HTML figure: pictures of its files and its fields, or the reason why it has none."""
    row = dataset.rows[place]
    try:
        caption = dataset.caption(row, None)
        size = dataset.size_of(place)
        shown = "".join(_sheets(dataset, row))
    except DataError as fault:
        caption, size, shown = "", "", _REMARK.format(escape(fault.what))
    more = f" (and {plural(len(row.captions) - 1, 'caption')} more)" if len(row.captions) > 1 else ""
    fields = zip(dataset.further.fields(row), row.fields, strict=True)
    numbers = "".join(f" {each.name} {float(cell):g}" for each, cell in fields if each.kind == "number")
    about = f'<span class="faint">{escape(row.path)} {escape(size + numbers + bucket)}</span>'
    return f"<figure>{shown}<figcaption>{escape(caption + more)}<br>{about}</figcaption></figure>"


def _sheets(dataset: MediaTextDataset, row: MediaRow) -> Iterator[str]:
    """What a row shows, in HTML: its own file (DataError if it cannot be read), then those of its fields."""
    with dataset.opened(row) as path:
        photo = dataset.photo(row, path)
        yield _sheet(_moments(dataset, path) if photo is None else photo, row.path)
    for field, name, _ in further_files(row, dataset.further.fields(row)):
        try:
            path = inside(dataset.sources[row.source].folder, name)
            still = photo is not None or field.kind == "images"
            shown = _sheet(dataset.further.photo(path) if still else _moments(dataset, path), name)
        except DataError as fault:
            shown = _REMARK.format(escape(fault.what))
        yield f'<span class="faint">{escape(field.name)}</span>{shown}'


def _moments(dataset: MediaTextDataset, path: Path) -> Tensor:
    """The first, the middle and the last frame of a clip, uint8 [F,Y,X,3]."""
    info = dataset.reader.probe(path)
    numbers = sorted({0, info.num_frames // 2, info.num_frames - 1})
    return read_frames(dataset.reader, path, [(number + 0.5) / info.fps for number in numbers])


def _sheet(frames: Tensor, name: str) -> str:
    """Small pictures side by side, as a JPEG in HTML."""
    pictures = [Image.fromarray(frame.contiguous().numpy()) for frame in frames]
    for picture in pictures:
        picture.thumbnail((_SIDE, _SIDE))
    width, height = pictures[0].size
    sheet = Image.new("RGB", (len(pictures) * (width + _GAP) - _GAP, height), "white")
    for number, picture in enumerate(pictures):
        sheet.paste(picture, (number * (width + _GAP), 0))
    content = BytesIO()
    sheet.save(content, "JPEG", quality=80)
    address = base64.b64encode(content.getvalue()).decode()
    return f'<img alt="{escape(name)}" src="data:image/jpeg;base64,{address}">'
