"""The page of `mm data inspect --page`: what the sources of a run contain, with contact sheets."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from io import BytesIO

from PIL import Image

from mm_core.contracts import Dataset
from mm_core.data.datasets.media_report import (
    BUCKET_COLUMNS,
    Bucketed,
    Found,
    inspected,
    spread,
)
from mm_core.data.datasets.media_text import MediaTextDataset
from mm_core.data.media.frames import read_frames
from mm_core.errors import DataError, plural
from mm_core.report.page import document

_SHOWN = 12  # samples of a source
_SIDE, _GAP = 160, 4  # of a picture, and between pictures, in pixels
_LETTERS = 240  # of a caption
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
            parts += [f'<p class="remark">{escape(each)}</p>' for each in bucketed.remarks()]
        for number, source in enumerate(found):
            parts.append(f'<p class="prompt">{escape(source.source)}</p>')
            for each in source.remarks():
                parts.append(f'<p class="remark">{escape(each)}</p>')
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
    """A row as an HTML figure: an image, three frames of a clip, or the reason why it has none."""
    row = dataset.rows[place]
    try:
        caption = dataset.caption(row, None)
        size = dataset.size_of(place)
        address = base64.b64encode(_sheet(dataset, place)).decode()
        shown = f'<img alt="{escape(row.path)}" src="data:image/jpeg;base64,{address}">'
    except DataError as fault:
        caption, size, shown = "", "", f'<p class="remark">{escape(fault.what)}</p>'
    if len(caption) > _LETTERS:
        caption = caption[:_LETTERS] + " ..."
    more = f" (and {plural(len(row.captions) - 1, 'caption')} more)" if len(row.captions) > 1 else ""
    about = f'<span class="faint">{escape(row.path)} {escape(size)}</span>'
    return f"<figure>{shown}<figcaption>{escape(caption + more)}<br>{about}</figcaption></figure>"


def _sheet(dataset: MediaTextDataset, place: int) -> bytes:
    """Small pictures of a row side by side, as JPEG."""
    row = dataset.rows[place]
    with dataset.opened(row) as path:
        frames = dataset.photo(row, path)
        if frames is None:
            info = dataset.reader.probe(path)
            numbers = sorted({0, info.num_frames // 2, info.num_frames - 1})
            frames = read_frames(dataset.reader, path, [(number + 0.5) / info.fps for number in numbers])
    pictures = [Image.fromarray(frame.contiguous().numpy()) for frame in frames]
    for picture in pictures:
        picture.thumbnail((_SIDE, _SIDE))
    width, height = pictures[0].size
    sheet = Image.new("RGB", (len(pictures) * (width + _GAP) - _GAP, height), "white")
    for number, picture in enumerate(pictures):
        sheet.paste(picture, (number * (width + _GAP), 0))
    content = BytesIO()
    sheet.save(content, "JPEG", quality=80)
    return content.getvalue()
