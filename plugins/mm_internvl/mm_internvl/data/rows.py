"""Reads rows of conversations from JSON files and checks them turn by turn.

Two styles are read: `conversations` of {"from", "value"}, the format of LLaVA's and InternVL's data
(https://internvl.readthedocs.io/en/latest/get_started/chat_data_format.html), and `messages` of {"role",
"content"}, the input format of chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from mm_core.data import InMemory, RowFile, inside, kind_of
from mm_core.errors import DataError, plural
from mm_internvl.data.data_urls import decoded

Medium = Literal["image", "video"]
Picture = Path | InMemory
"""The file of an image or video, or the bytes of an image."""

Named = str | InMemory
"""The path of an image or video in a row, or an image in the row itself."""

_MEDIA: Mapping[str, Medium] = {"image": "image", "video": "video"}

ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
"""Roles in the data -> roles in chat templates."""

PLACEHOLDER = re.compile("<(image|video)>")

_URL = re.compile(r"(?i)(https?|ftp|file|s3|gs|data)(?=:)")

_PATHS = ("path", "url", "image", "video")
"""Fields in which a part of a turn may name its file."""

_NOTHING: tuple[object, ...] = (None, "", "[]", "{}", [], {})
"""Values of a column in rows that do not use it."""

_OF_TOOLS_ROW, _OF_TOOLS_TURN = ("tools", "functions"), ("tool_calls", "function_call")
_ROLES_OF_TOOLS = ("tool", "function", "function_call", "tool_call", "tool_response", "observation")
_NO_TOOLS = "conversations without tools"
_VALID = "valid Unicode text"

ACCEPTED = (
    'rows {"image": "a.jpg" (or a list), "video": .., "conversations": [{"from": "human", "value": '
    '"<image>\\nWhat is this?"}, {"from": "gpt", "value": ".."}]}, or "messages" of {"role", "content"}'
)


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
class RowTurn:
    """One turn of a conversation.

    Attributes:
        role: system, user or assistant.
        content: a text with placeholders, or a list of parts in the format of chat templates.
        from_field: whether it comes from the row's field `system` instead of its list of turns.
    """

    role: str
    content: str | tuple[Mapping[str, str], ...]
    from_field: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts in this turn of the conversation, without images and videos."""
        if isinstance(self.content, str):
            return (self.content,)
        return tuple(part["text"] for part in self.content if part["type"] == "text")


@dataclass(frozen=True)
class Conversation:
    """A checked conversation about images and videos.

    Attributes:
        turns: turns in order.
        media: paths of images and videos, or images in the row itself, in the order of their placeholders.
        answers: reference answers for evaluation; () if the row has none.
    """

    turns: tuple[RowTurn, ...]
    media: tuple[tuple[Medium, Named], ...]
    answers: tuple[str, ...] = ()

    def asked(self) -> Conversation:
        """The conversation up to the assistant's next answer. The assistant's last turn, if any, becomes a
        reference answer."""
        if self.turns[-1].role != "assistant":
            return self
        return replace(self, turns=self.turns[:-1], answers=self.answers or self.turns[-1].texts)


def read_rows(file: Path, source: int) -> Iterator[RawRow]:
    """Reads the unchecked rows of a conversations file: a JSON list or JSONL.

    Args:
        file: the file.
        source: number of the file.

    Raises:
        DataError: the file is neither.
    """
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
    except _Fault as fault:
        raise DataError(str(fault), where=where, accepted=fault.accepted) from None
    named = tuple(
        (kind, replace(one, name=f"{where}, {kind} {n} ({one.name})") if isinstance(one, InMemory) else one)
        for n, (kind, one) in enumerate(found.media, 1)
    )
    return replace(found, media=named)


def located(media: Iterable[tuple[Medium, Named]], folder: Path) -> list[tuple[Medium, Picture]]:
    """The images and videos of a conversation, with the files of those in a folder.

    Raises:
        DataError: as for `inside`.
    """
    return [(kind, inside(folder, each) if isinstance(each, str) else each) for kind, each in media]


class _Fault(Exception):
    """The error of a row; `conversation` adds its file and row."""

    def __init__(self, what: str, accepted: str | None = None) -> None:
        super().__init__(what)
        self.accepted = accepted


def _conversation(value: object, learnt: bool) -> Conversation:
    if not isinstance(value, Mapping):
        raise _Fault(f"the row is {kind_of(value)}, not an object", ACCEPTED)
    styles = [name for name in ("conversations", "messages") if name in value]
    if len(styles) != 1:
        found = (
            " and ".join(styles)
            or f"neither `conversations` nor `messages`, but {', '.join(value) or 'nothing'}"
        )
        raise _Fault(f"the row has {found}", ACCEPTED)
    if used := next((key for key in _OF_TOOLS_ROW if value.get(key) not in _NOTHING), None):
        raise _Fault(f"the row has `{used}`, which this dataset cannot pass to the model", _NO_TOOLS)
    given = value[styles[0]]
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise _Fault(f"`{styles[0]}` is not a list of turns, or is empty", ACCEPTED)
    own: list[tuple[Medium, Named]] = []
    keys = ("from", "value") if styles[0] == "conversations" else ("role", "content")
    turns = tuple(_turn(turn, number, keys, own) for number, turn in enumerate(given, 1))
    if any(turn.role == "system" for turn in turns[1:]):
        raise _Fault("a turn after the first has the role system", "a system prompt only as the first turn")
    turns = _with_system(value.get("system"), turns)
    answers = _answers(value)
    if learnt and answers and turns[-1].role == "user":
        turns += (RowTurn("assistant", answers[0]),)
    if learnt and not any(turn.role == "assistant" for turn in turns):
        raise _Fault(
            "no turn has the role assistant, so there is nothing to learn",
            "a turn of the assistant, or `answers` to the last question, of which the first is learnt",
        )
    if not learnt and not any(turn.role == "user" for turn in turns):
        raise _Fault("no turn has the role user, so there is nothing to answer", "a turn of the user")
    return Conversation(turns, _media(value, turns, own), answers)


def _with_system(system: object, turns: tuple[RowTurn, ...]) -> tuple[RowTurn, ...]:
    """The turns, with the system prompt of the row's field `system`."""
    if not isinstance(system, str | None):
        raise _Fault(f"`system` of the row is {kind_of(system)}, not a text", "a text")
    if system is None or not system.strip():
        return turns
    if not _is_unicode(system):
        raise _Fault(
            "`system` of the row contains half of a surrogate pair, which is not a character", _VALID
        )
    if turns[0].role != "system":
        return (RowTurn("system", system, from_field=True), *turns)
    if "".join(turns[0].texts).strip() != system.strip():
        raise _Fault("`system` of the row differs from its system turn", "one of them")
    return turns


def _answers(row: Mapping[str, object]) -> tuple[str, ...]:
    found = row.get("answers", [])
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not all(isinstance(answer, str) for answer in found):
        raise _Fault("`answers` is not a list of texts", "a list of all right answers")
    if not all(map(_is_unicode, found)):
        raise _Fault("`answers` contains half of a surrogate pair, which is not a character", _VALID)
    return tuple(found)


def _turn(turn: object, number: int, keys: tuple[str, str], own: list[tuple[Medium, Named]]) -> RowTurn:
    """A checked turn. Appends files that parts of the turn name to `own`."""
    if isinstance(turn, Mapping):
        _check_tools(turn, number, keys[0])
    if not isinstance(turn, Mapping) or not set(keys) <= set(turn):
        raise _Fault(f"turn {number} needs both `{keys[0]}` and `{keys[1]}`", ACCEPTED)
    role, content = turn[keys[0]], turn[keys[1]]
    if not isinstance(role, str) or role not in ROLES:
        raise _Fault(f"turn {number} has the unknown role {role!r}", ", ".join(ROLES))
    if isinstance(content, list):
        content = tuple(_part(part, number, own) for part in content)
    elif not isinstance(content, str):
        raise _Fault(
            f"the content of turn {number} is {kind_of(content)}, not a text", "a text, or a list of parts"
        )
    made = RowTurn(ROLES[role], content)
    if made.role == "assistant":
        thought = _thinking(turn.get("reasoning_content"), number)
        if any(_shown(made)) or PLACEHOLDER.search(thought):
            raise _Fault(
                f"turn {number} is the assistant's, but has an image or a video",
                "images and videos in user turns",
            )
        made = RowTurn(made.role, thought + "".join(made.texts))
    if not all(map(_is_unicode, made.texts)):
        raise _Fault(f"turn {number} contains half of a surrogate pair, which is not a character", _VALID)
    return made


def _check_tools(turn: Mapping[str, object], number: int, role: str) -> None:
    """Raises Fault for a turn that calls a tool, or is a tool's."""
    if used := next((key for key in _OF_TOOLS_TURN if turn.get(key) not in _NOTHING), None):
        raise _Fault(f"turn {number} has `{used}`, which this dataset cannot pass to the model", _NO_TOOLS)
    if turn.get(role) in _ROLES_OF_TOOLS:
        raise _Fault(f"turn {number} has the role {turn[role]!r}, the role of a tool", _NO_TOOLS)


def _thinking(thought: object, number: int) -> str:
    """A thought from a separate field, in the form that it has inside a content."""
    if not isinstance(thought, str | None):
        raise _Fault(f"`reasoning_content` of turn {number} is {kind_of(thought)}, not a text", "a text")
    return f"<think>\n{thought.strip()}\n</think>\n\n" if thought and thought.strip() else ""


def _part(part: object, number: int, own: list[tuple[Medium, Named]]) -> Mapping[str, str]:
    given = part if isinstance(part, Mapping) else {}
    kind = given.get("type")
    if kind == "text" and isinstance(given.get("text"), str):
        return {"type": "text", "text": given["text"]}
    if kind == "image_url":  # of OpenAI's format: a text, or {"url": text, "detail": ..}
        named = given.get("image_url")
        own.append(("image", _file("image", named.get("url") if isinstance(named, Mapping) else named)))
        return {"type": "image", "named": "yes"}
    if kind not in ("image", "video"):
        raise _Fault(
            f"turn {number} has a part of unknown type",
            'parts {"type": "text" | "image" | "image_url" | "video", ..}',
        )
    path = next((given[name] for name in _PATHS if given.get(name) is not None), None)
    if path is not None:
        own.append((kind, _file(kind, path)))
    return {"type": kind, "named": "yes" if path is not None else ""}


def _shown(turn: RowTurn) -> Iterator[tuple[Medium, bool]]:
    """The images and videos of a turn, in order: kind, and whether the part names its file itself."""
    whole = turn.content
    for part in ({"type": "text", "text": whole},) if isinstance(whole, str) else whole:
        if part["type"] == "text":
            yield from ((_MEDIA[match[1]], False) for match in PLACEHOLDER.finditer(part["text"]))
        else:
            yield _MEDIA[part["type"]], bool(part["named"])


def _media(
    row: Mapping[str, object], turns: Sequence[RowTurn], own: Sequence[tuple[Medium, Named]]
) -> tuple[tuple[Medium, Named], ...]:
    """The file of each placeholder, in order."""
    shown = [found for turn in turns for found in _shown(turn)]
    files = {kind: iter(_files(row, kind)) for kind in ("image", "video")}
    for kind in ("image", "video"):
        wanted = sum(found == kind and not named for found, named in shown)
        given = len(_files(row, kind))
        if wanted != given:
            raise _Fault(
                f"the conversation has placeholders for {plural(wanted, kind)}, but the row lists {given}",
                f"one <{kind}> for each file of `{kind}`, in the same order",
            )
    named = iter(own)
    return tuple(next(named) if itself else (kind, next(files[kind])) for kind, itself in shown)


def _files(row: Mapping[str, object], kind: str) -> list[Named]:
    found: list[Named] = []
    for key in (kind, f"{kind}s"):
        value = row.get(key)
        if value not in _NOTHING:
            paths = value if isinstance(value, list) else [value]
            found += [_file(kind, path) for path in paths if path not in _NOTHING]
    return found


def _file(kind: str, path: object) -> Named:
    """A path below the folder, or the image of a data URL."""
    if kind == "image" and isinstance(path, str) and path.lstrip()[:5].lower() == "data:":
        try:
            return InMemory(*decoded(path.strip()))
        except ValueError as fault:
            what = f"the data URL {path[:60]!r} holds no image: {fault}"
            raise _Fault(what, "the path of a file, or data:image/png;base64,...") from None
    if not isinstance(path, str) or not path:
        raise _Fault(f"{path!r} is not a path to an image or video", "a relative path")
    if scheme := _URL.match(path):
        raise _Fault(
            f"{path[:60]!r} is a URL ({scheme[1].lower()}:), which is not read", "the path of a file"
        )
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise _Fault(f"the path {path!r} leads outside the folder", "a relative path below the folder")
    if not _is_unicode(path):
        raise _Fault(f"the path {path!r} contains half of a surrogate pair, which is not a character", _VALID)
    return path


def _is_unicode(text: str) -> bool:
    """Whether a text is valid Unicode. JSON can also contain a single surrogate, which has no token."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
