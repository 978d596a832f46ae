"""Reads rows of conversations from JSON and Parquet files.

Four styles are read: `conversations` of {"from", "value"}, the format of LLaVA's, InternVL's and ShareGPT's
data (https://internvl.readthedocs.io/en/latest/get_started/chat_data_format.html); `messages` of {"role",
"content"}, the input format of chat templates and of OpenAI; the same with lists `images` and `videos` beside
them, as for ms-swift; and its `query` and `response` with a `history`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mm_core.data.media.image_headers import InMemory
from mm_core.data.rows.annotations import inside
from mm_core.data.rows.json_rows import RowFile, kind_of
from mm_core.data.rows.tables import read_table
from mm_core.errors import DataError, plural
from mm_core.tasks.conversations.rows.boxes import Box, read_boxes
from mm_core.tasks.conversations.rows.data_urls import Held, held_columns
from mm_core.tasks.conversations.rows.turns import (
    ACCEPTED,
    VALID,
    Medium,
    Named,
    Picture,
    RowFault,
    RowTurn,
    is_unicode,
    read_files,
    read_tools,
    read_turn,
)

MEDIA_COLUMNS = ("image", "images", "video", "videos")
_COLUMNS = (
    *("conversations", "messages", "query", "response", "history", "system", "tools", "answers", "objects"),
    *MEDIA_COLUMNS,
)
"""Columns of a Parquet file that are read, where it has them."""


@dataclass(frozen=True)
class RawRow:
    """An unchecked row of a conversations file.

    Attributes:
        source: number of its file.
        place: position in the file, for messages.
        value: the parsed JSON, or the DataError for a line that is not JSON.
    """

    source: int
    place: str
    value: object


@dataclass(frozen=True)
class Conversation:
    """A checked conversation about images and videos.

    Attributes:
        turns: turns in order.
        media: paths of images and videos, or images in the row itself, in the order of their placeholders.
        answers: reference answers for evaluation; () if the row has none.
        tools: declarations of the tools that the assistant may call.
        boxes: those of the marks in the texts, in order.
    """

    turns: tuple[RowTurn, ...]
    media: tuple[tuple[Medium, Named], ...]
    answers: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    boxes: tuple[Box, ...] = ()

    def asked(self) -> Conversation:
        """The conversation up to the assistant's next answer. The assistant's last turn, if any, becomes a
        reference answer."""
        if self.turns[-1].role != "assistant":
            return self
        return replace(self, turns=self.turns[:-1], answers=self.answers or self.turns[-1].texts)


def read_rows(file: Path, source: int) -> Iterator[RawRow]:
    """Reads the unchecked rows of a conversations file: a JSON list, JSONL or Parquet.

    Args:
        file: the file.
        source: number of the file.

    Raises:
        DataError: the file is none of these.
    """
    if file.suffix.lower() == ".parquet":
        held = held_columns(str(file), MEDIA_COLUMNS)
        columns = [name for name in _COLUMNS if name not in held]
        for number, cells in enumerate(read_table(file, columns, optional=columns)):
            named = zip(columns, cells.values, strict=False)
            row: dict[str, object] = {name: value for name, value in named if value is not None}
            row |= {name: Held(str(file), name, number) for name in held}
            fault = cells.fault and DataError(cells.fault, where=f"{file}, {cells.place}")
            yield RawRow(source, cells.place, fault or row)
        return
    for place, value in RowFile(file, "file of conversations", ACCEPTED).json_values():
        yield RawRow(source, place, value)


def conversation(value: object, where: str, learnt: bool = True) -> Conversation:
    """Checks a row of JSON and returns its conversation.

    Args:
        value: the parsed JSON of the row, or its DataError.
        where: file and row, for errors.
        learnt: whether the row must contain a turn of the assistant.

    Raises:
        DataError: the row is not a conversation, a role is unknown, or placeholders do not match the files.
    """
    if isinstance(value, DataError):
        raise value
    try:
        found = _conversation(value, learnt)
    except RowFault as fault:
        raise DataError(str(fault), where=where, accepted=fault.accepted) from None
    named = tuple(
        (kind, replace(one, name=f"{where}, {kind} {n} ({one.name})") if isinstance(one, InMemory) else one)
        for n, (kind, one) in enumerate(found.media, 1)
    )
    return replace(found, media=named)


def kinds_of(row: RawRow) -> list[str]:
    """The kinds of a row's images and videos, such as `image .png`, before any file is opened."""
    try:
        media = conversation(row.value, row.place).media
    except DataError:
        return ["cannot be read"]
    suffixes = [Path(one).suffix.lower() if isinstance(one, str) else "in the row" for _, one in media]
    return [f"{kind} {suffix}" for (kind, _), suffix in zip(media, suffixes, strict=True)] or ["text alone"]


def located(media: Iterable[tuple[Medium, Named]], folder: Path) -> list[tuple[Medium, Picture]]:
    """The images and videos of a conversation, with the files of those in a folder.

    Raises:
        DataError: as for `inside`.
    """
    return [(kind, inside(folder, each) if isinstance(each, str) else each) for kind, each in media]


def _conversation(value: object, learnt: bool) -> Conversation:
    if not isinstance(value, Mapping):
        raise RowFault(f"the row is {kind_of(value)}, not an object", ACCEPTED)
    style, given = _turns_of(value)
    own: list[tuple[Medium, Named]] = []
    keys = ("from", "value") if style == "conversations" else ("role", "content")
    turns = tuple(read_turn(turn, number, keys, own) for number, turn in enumerate(given, 1))
    if any(turn.role == "system" for turn in turns[1:]):
        raise RowFault("a turn after the first has the role system", "a system prompt only as the first turn")
    turns = _with_system(value.get("system"), turns)
    answers = _answers(value)
    if learnt and answers and turns[-1].role == "user":
        turns += (RowTurn("assistant", answers[0]),)
    if learnt and not any(turn.role == "assistant" and turn.weight for turn in turns):
        raise RowFault(
            "no turn has the role assistant, so there is nothing to learn",
            "a turn of the assistant, or `answers` to the last question, of which the first is learnt",
        )
    if not learnt and not any(turn.role == "user" for turn in turns):
        raise RowFault("no turn has the role user, so there is nothing to answer", "a turn of the user")
    media = _media(value, turns, own)
    turns, boxes = read_boxes(value.get("objects"), turns, sum(kind == "image" for kind, _ in media))
    return Conversation(turns, media, answers, read_tools(value.get("tools")), boxes)


def _turns_of(row: Mapping[str, object]) -> tuple[str, Sequence[object]]:
    """The style of a row, and its turns."""
    known = [name for name in ("conversations", "messages", "query") if name in row]
    styles = [name for name in known if row[name] is not None] or known  # unions of data sets have nulls
    if len(styles) != 1:
        found = (
            " and ".join(styles)
            or f"neither `conversations` nor `messages`, but {', '.join(row) or 'nothing that is read'}"
        )
        raise RowFault(f"the row has {found}", ACCEPTED)
    given = row[styles[0]]
    if styles[0] == "query":
        history = row.get("history") or []
        if not isinstance(history, list) or not all(isinstance(h, list) and len(h) == 2 for h in history):
            raise RowFault("`history` is no list of [question, answer]", '[["question", "answer"], ..]')
        spoken = [*(text for pair in history for text in pair), given]
        spoken += [row["response"]] if row.get("response") is not None else []
        given = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(spoken)]
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise RowFault(f"`{styles[0]}` is not a list of turns, or is empty", ACCEPTED)
    return styles[0], given


def _with_system(system: object, turns: tuple[RowTurn, ...]) -> tuple[RowTurn, ...]:
    """The turns, with the system prompt of the row's field `system`."""
    if not isinstance(system, str | None):
        raise RowFault(f"`system` of the row is {kind_of(system)}, not a text", "a text")
    if system is None or not system.strip():
        return turns
    if not is_unicode(system):
        raise RowFault(
            "`system` of the row contains half of a surrogate pair, which is not a character", VALID
        )
    if turns[0].role != "system":
        return (RowTurn("system", system, from_field=True), *turns)
    if "".join(turns[0].texts).strip() != system.strip():
        raise RowFault("`system` of the row differs from its system turn", "one of them")
    return turns


def _answers(row: Mapping[str, object]) -> tuple[str, ...]:
    found = row.get("answers") or []
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not all(isinstance(answer, str) for answer in found):
        raise RowFault("`answers` is not a list of texts", "a list of all right answers")
    if not all(map(is_unicode, found)):
        raise RowFault("`answers` contains half of a surrogate pair, which is not a character", VALID)
    return tuple(found)


def _media(
    row: Mapping[str, object], turns: Sequence[RowTurn], own: Sequence[tuple[Medium, Named]]
) -> tuple[tuple[Medium, Named], ...]:
    """The file of each placeholder, in order."""
    shown = [found for turn in turns for found in turn.shown()]
    files = {}
    for kind in ("image", "video"):
        wanted = sum(found == kind and not named for found, named in shown)
        files[kind] = given = read_files(row, kind, wanted)
        if wanted != len(given):
            raise RowFault(
                f"the conversation has placeholders for {plural(wanted, kind)}, "
                f"but the row lists {len(given)}",
                f"one <{kind}> for each file of `{kind}`, in the same order",
            )
    named, listed = iter(own), {kind: iter(given) for kind, given in files.items()}
    return tuple(next(named) if itself else (kind, next(listed[kind])) for kind, itself in shown)
