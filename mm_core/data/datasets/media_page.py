"""The page of `mm data inspect --page`: what the sources of a run contain, with contact sheets."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from io import BytesIO
from pathlib import Path

from PIL import Image
from torch import Tensor

from mm_core.contracts import Dataset
from mm_core.data.datasets.media_report import BUCKET_COLUMNS, Bucketed, Found, inspected, spread
from mm_core.data.datasets.media_text import MediaTextDataset
from mm_core.data.media.frames import read_frames
from mm_core.data.rows.annotations import inside
from mm_core.data.rows.media_rows import MediaRow, further_files
from mm_core.errors import DataError, plural
from mm_core.report.page import document

_SHOWN = 12  # samples of a source
_SIDE, _GAP = 160, 4  # of a picture, and between pictures, in pixels
_LETTERS = 240  # of a caption
_REMARK = '<p class="remark">{}</p>'
_SOURCES = ("source", "images", "clips", "samples per epoch", "left out", "sizes of files, by their headers")


def render(
    title: str, splits: Mapping[str, tuple[Dataset, Sequence[Found]]], buckets: Mapping[str, Bucketed]
) -> str:
    """The page as HTML text: one file that loads nothing.

    Args:
        title: of the page.
        splits: the dataset of each split, and what `inspect` has found in it.
        buckets: what the split has in buckets, if its samples are in any.

    Raises:
        ContractError: a dataset is not `media_text`.
    """
    parts = [f"<h1>{escape(title)}</h1>"]
    for split, (dataset, found) in splits.items():
        media = inspected(dataset)
        parts.append(f"<h2>data.{escape(split)}</h2>{_table(_SOURCES, _sources(found))}")
        if (bucketed := buckets.get(split)) is not None:
            parts.append(_table(BUCKET_COLUMNS, bucketed.table()))
            parts += [_REMARK.format(escape(each)) for each in bucketed.remarks()]
        for number, source in enumerate(found):
            parts.append(f'<p class="prompt">{escape(source.source)}</p>')
            parts += [_REMARK.format(escape(each)) for each in source.remarks()]
            figures = "".join(_figure(media, place) for place in spread(media, number, _SHOWN))
            parts.append(f'<div class="shots samples">{figures}</div>')
    return document(f"{title}: mm data inspect", f"<main>{''.join(parts)}</main>")


def _sources(found: Sequence[Found]) -> list[tuple[str, ...]]:
    return [
        (
            source.source,
            *(f"{count:,}" for count in (source.images, source.clips, source.samples)),
            f"{sum(source.left_out.values()):,}",
            "; ".join(f"{size} ({count})" for size, count in source.sizes.items()) or "unknown",
        )
        for source in found
    ]


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _figure(dataset: MediaTextDataset, place: int) -> str:
    """A row as an HTML figure: pictures of its files and its fields, or the reason why it has none."""
    row = dataset.rows[place]
    try:
        caption = dataset.caption(row, None)
        size = dataset.size_of(place)
        shown = "".join(_sheets(dataset, row))
    except DataError as fault:
        caption, size, shown = "", "", _REMARK.format(escape(fault.what))
    if len(caption) > _LETTERS:
        caption = caption[:_LETTERS] + " ..."
    more = f" (and {plural(len(row.captions) - 1, 'caption')} more)" if len(row.captions) > 1 else ""
    fields = zip(dataset.further.fields(row), row.fields, strict=True)
    numbers = "".join(f" {each.name} {float(cell):g}" for each, cell in fields if each.kind == "number")
    about = f'<span class="faint">{escape(row.path)} {escape(size + numbers)}</span>'
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
