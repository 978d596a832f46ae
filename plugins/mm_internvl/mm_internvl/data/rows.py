"""Rows of conversations: what a JSON file says, checked turn by turn.

Two styles are read: `conversations` of {"from", "value"} as LLaVA and InternVL publish their data
(https://internvl.readthedocs.io/en/latest/get_started/chat_data_format.html), and `messages` of {"role",
"content"} as chat templates take them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from mm_core.data import RowFile, kind_of
from mm_core.errors import DataError

Medium = Literal["image", "video"]
_MEDIA: Mapping[str, Medium] = {"image": "image", "video": "video"}

ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
"""What data calls those who speak -> what chat templates call them."""

PLACEHOLDER = re.compile("<(image|video)>")

ACCEPTED = (
    'rows {"image": "a.jpg" (or a list), "video": .., "conversations": [{"from": "human", "value": '
    '"<image>\\nWhat is this?"}, {"from": "gpt", "value": ".."}]}, or "messages" of {"role", "content"}'
)


@dataclass(frozen=True)
class RawRow:
    """A row as its file has it. source: number of its file. place: where in it, for people. value: what JSON
    makes of it, or the DataError of a line that is not JSON."""

    source: int
    place: str
    value: object


@dataclass(frozen=True)
class RowTurn:
    """What one side says: a text with placeholders, or parts as a chat template takes them. apart: it is the
    row's `system`, and no turn of its list."""

    role: str
    content: str | tuple[Mapping[str, str], ...]
    apart: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything in it that a person or a model wrote."""
        if isinstance(self.content, str):
            return (self.content,)
        return tuple(part["text"] for part in self.content if part["type"] == "text")


@dataclass(frozen=True)
class Conversation:
    """Turns, and the files that they show, in the order of their placeholders. answers: all that an
    evaluation takes for right; () where the row names none."""

    turns: tuple[RowTurn, ...]
    media: tuple[tuple[Medium, str], ...]
    answers: tuple[str, ...] = ()

    def asked(self) -> Conversation:
        """Up to where the assistant is to go on: without what it says last, which is an answer."""
        if self.turns[-1].role != "assistant":
            return self
        return replace(self, turns=self.turns[:-1], answers=self.answers or self.turns[-1].texts)


def read_rows(file: Path, source: int) -> Iterator[RawRow]:
    """Every row of a JSON list or of JSONL, unchecked. DataError for a file that is neither."""
    for place, value in RowFile(file, "file of conversations", ACCEPTED).json_values():
        yield RawRow(source, place, value)


def conversation(value: object, where: str, learnt: bool = True) -> Conversation:
    """A row's conversation. learnt: it has to hold something that the assistant says.

    Raises:
        DataError: a row that is none, an unknown role, placeholders that do not fit the files.
    """
    if isinstance(value, DataError):
        raise value
    try:
        return _conversation(value, learnt)
    except _Fault as fault:
        raise DataError(str(fault), where=where, accepted=fault.accepted) from None


class _Fault(Exception):
    """What is wrong with a row; `conversation` adds where it stands."""

    def __init__(self, what: str, accepted: str | None = None) -> None:
        super().__init__(what)
        self.accepted = accepted


def _conversation(value: object, learnt: bool) -> Conversation:
    if not isinstance(value, Mapping):
        raise _Fault(f"{kind_of(value)} instead of a row", ACCEPTED)
    styles = [name for name in ("conversations", "messages") if name in value]
    if len(styles) != 1:
        found = (
            " and ".join(styles)
            or f"neither `conversations` nor `messages`, but {', '.join(value) or 'nothing'}"
        )
        raise _Fault(f"the row has {found}", ACCEPTED)
    if used := next((key for key in _OF_TOOLS_ROW if value.get(key) not in _NOTHING), None):
        raise _Fault(f"the row has `{used}`, which the model would not be shown", _NO_TOOLS)
    said = value[styles[0]]
    if not isinstance(said, Sequence) or isinstance(said, str) or not said:
        raise _Fault(f"`{styles[0]}` is no list of turns", ACCEPTED)
    own: list[tuple[Medium, str]] = []
    keys = ("from", "value") if styles[0] == "conversations" else ("role", "content")
    turns = tuple(_turn(turn, number, keys, own) for number, turn in enumerate(said, 1))
    if any(turn.role == "system" for turn in turns[1:]):
        raise _Fault("a system prompt stands behind the first turn")
    turns = _with_system(value.get("system"), turns)
    answers = _answers(value)
    if learnt and answers and turns[-1].role == "user":
        turns += (RowTurn("assistant", answers[0]),)
    if learnt and not any(turn.role == "assistant" for turn in turns):
        raise _Fault(
            "no turn is the assistant's, so there is nothing to learn",
            "a turn of the assistant, or `answers` to the last question, of which the first is learnt",
        )
    if not learnt and not any(turn.role == "user" for turn in turns):
        raise _Fault("no turn is the user's, so there is nothing to answer")
    return Conversation(turns, _media(value, turns, own), answers)


_NOTHING: tuple[object, ...] = (None, "", "[]", "{}", [], {})
"""What columns hold in rows that do not use them."""

_OF_TOOLS_ROW, _OF_TOOLS_TURN = ("tools", "functions"), ("tool_calls", "function_call")
_ROLES_OF_TOOLS = ("tool", "function", "function_call", "tool_call", "tool_response", "observation")
_NO_TOOLS = "conversations without tools"


def _with_system(system: object, turns: tuple[RowTurn, ...]) -> tuple[RowTurn, ...]:
    """With a system prompt that the row holds beside its turns."""
    if not isinstance(system, str | None):
        raise _Fault(f"`system` of the row is {kind_of(system)}, not text")
    if system is None or not system.strip():
        return turns
    if not _is_unicode(system):
        raise _Fault("`system` of the row holds half of a surrogate pair, which is no character")
    if turns[0].role != "system":
        return (RowTurn("system", system, apart=True), *turns)
    if "".join(turns[0].texts).strip() != system.strip():
        raise _Fault("`system` of the row and its system turn say different things", "one of them")
    return turns


def _answers(row: Mapping[str, object]) -> tuple[str, ...]:
    found = row.get("answers", [])
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not all(isinstance(answer, str) for answer in found):
        raise _Fault("`answers` is no list of texts", "all answers that are right, of which any will do")
    if not all(map(_is_unicode, found)):
        raise _Fault("`answers` holds half of a surrogate pair, which is no character")
    return tuple(found)


def _turn(turn: object, number: int, keys: tuple[str, str], own: list[tuple[Medium, str]]) -> RowTurn:
    """own: gains the files that parts of the turn name themselves."""
    if isinstance(turn, Mapping):
        _check_tools(turn, number, keys[0])
    if not isinstance(turn, Mapping) or not set(keys) <= set(turn):
        raise _Fault(f"turn {number} has no `{keys[0]}` and `{keys[1]}`", ACCEPTED)
    role, content = turn[keys[0]], turn[keys[1]]
    if not isinstance(role, str) or role not in ROLES:
        raise _Fault(f"turn {number} has the unknown role {role!r}", ", ".join(ROLES))
    if isinstance(content, list):
        content = tuple(_part(part, number, own) for part in content)
    elif not isinstance(content, str):
        raise _Fault(f"turn {number} says {kind_of(content)}, not text")
    made = RowTurn(ROLES[role], content)
    if made.role == "assistant":
        thought = _thinking(turn.get("reasoning_content"), number)
        if any(_shown(made)) or PLACEHOLDER.search(thought):
            raise _Fault(f"turn {number}, which is the assistant's, shows an image or a video")
        made = RowTurn(made.role, thought + "".join(made.texts))
    if not all(map(_is_unicode, made.texts)):
        raise _Fault(f"turn {number} holds half of a surrogate pair, which is no character")
    return made


def _check_tools(turn: Mapping[str, object], number: int, role: str) -> None:
    """Fault for a turn that calls tools, or that is one's."""
    if used := next((key for key in _OF_TOOLS_TURN if turn.get(key) not in _NOTHING), None):
        raise _Fault(f"turn {number} has `{used}`, which the model would not be shown", _NO_TOOLS)
    if turn.get(role) in _ROLES_OF_TOOLS:
        raise _Fault(f"turn {number} has the role {turn[role]!r}, which is that of a tool", _NO_TOOLS)


def _thinking(thought: object, number: int) -> str:
    """A thought that a row keeps apart, as it stands in the content of others."""
    if not isinstance(thought, str | None):
        raise _Fault(f"turn {number} thinks {kind_of(thought)}, not text")
    return f"<think>\n{thought.strip()}\n</think>\n\n" if thought and thought.strip() else ""


_PATHS = ("path", "url", "image", "video")


def _part(part: object, number: int, own: list[tuple[Medium, str]]) -> Mapping[str, str]:
    said = part if isinstance(part, Mapping) else {}
    kind = said.get("type")
    if kind == "text" and isinstance(said.get("text"), str):
        return {"type": "text", "text": said["text"]}
    if kind not in ("image", "video"):
        raise _Fault(f"turn {number} has a part that is no text, image or video")
    path = next((said[name] for name in _PATHS if name in said), None)
    if path is not None:
        own.append((kind, _path(path)))
    return {"type": kind, "named": "yes" if path is not None else ""}


def _shown(turn: RowTurn) -> Iterator[tuple[Medium, bool]]:
    """What a turn shows, in order: its kind, and whether the part names its file itself."""
    whole = turn.content
    for part in ({"type": "text", "text": whole},) if isinstance(whole, str) else whole:
        if part["type"] == "text":
            yield from ((_MEDIA[match[1]], False) for match in PLACEHOLDER.finditer(part["text"]))
        else:
            yield _MEDIA[part["type"]], bool(part["named"])


def _media(
    row: Mapping[str, object], turns: Sequence[RowTurn], own: Sequence[tuple[Medium, str]]
) -> tuple[tuple[Medium, str], ...]:
    """The file of each placeholder, in order."""
    shown = [found for turn in turns for found in _shown(turn)]
    files = {kind: iter(_files(row, kind)) for kind in ("image", "video")}
    for kind in ("image", "video"):
        wanted = sum(found == kind and not named for found, named in shown)
        given = len(_files(row, kind))
        if wanted != given:
            raise _Fault(
                f"the conversation shows {wanted} {kind}{'s' * (wanted != 1)} and the row lists {given}",
                f"one <{kind}> for each file of `{kind}`, in the same order",
            )
    named = iter(own)
    return tuple(next(named) if itself else (kind, next(files[kind])) for kind, itself in shown)


def _files(row: Mapping[str, object], kind: str) -> list[str]:
    found: list[str] = []
    for key in (kind, f"{kind}s"):
        value = row.get(key)
        found += [_path(path) for path in (value if isinstance(value, list) else [value]) if path is not None]
    return found


def _path(path: object) -> str:
    if not isinstance(path, str) or not path:
        raise _Fault(f"{path!r} is no path of an image or video")
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise _Fault(f"the path {path!r} leads outside the folder")
    if not _is_unicode(path):
        raise _Fault(f"the path {path!r} holds half of a surrogate pair, which is no character")
    return path


def _is_unicode(text: str) -> bool:
    """Whether there is a file or a token for it: JSON can also write a surrogate alone."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
