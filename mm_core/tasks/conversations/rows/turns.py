"""Turns of conversations in the styles of data sets, checked one by one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mm_core.data.media.image_headers import InMemory
from mm_core.data.rows.annotations import escapes
from mm_core.data.rows.json_rows import kind_of
from mm_core.tasks.conversations.rows.data_urls import Held, decoded

Medium = Literal["image", "video"]
Picture = Path | InMemory
"""The file of an image or video, or the bytes of an image."""

Named = str | InMemory
"""The path of an image or video in a row, or an image in the row itself."""

MEDIA: Mapping[str, Medium] = {"image": "image", "video": "video"}

ROLES = {
    **{"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"},
    **{"tool": "tool", "function": "tool", "tool_response": "tool", "observation": "tool"},
    **{"tool_call": "assistant", "function_call": "assistant"},
}
"""Roles in the data -> roles in chat templates."""

PLACEHOLDER = re.compile("<(image|video)>")

NOTHING: tuple[object, ...] = (None, "", "[]", "{}", [], {})
"""Values of a column in rows that do not use it."""

VALID = "valid Unicode text"

ACCEPTED = (
    'rows {"image": "a.jpg" (or a list), "video": .., "conversations": [{"from": "human", "value": '
    '"<image>\\nWhat is this?"}, {"from": "gpt", "value": ".."}]}, or "messages" of {"role", "content"}'
)

_CALLING = ("tool_call", "function_call")
_URL = re.compile(r"(?i)(https?|ftp|file|s3|gs|data)(?=:)")
_PATHS = ("path", "url", "image", "video")
"""Fields in which a part of a turn may name its file."""

_WEIGHTS = ("weight", "loss_scale", "loss", "train")
"""Fields of a turn that hold the weight of its loss, or whether it is learnt."""

_CALLS = '[{"type": "function", "function": {"name": "..", "arguments": {..}}}]'


class RowFault(Exception):
    """The error of a row; `conversation` adds its file and row."""

    def __init__(self, what: str, accepted: str | None = None) -> None:
        super().__init__(what)
        self.accepted = accepted


@dataclass(frozen=True)
class RowTurn:
    """One turn of a conversation.

    Attributes:
        role: system, user, assistant or tool.
        content: a text with placeholders, or a list of parts in the format of chat templates.
        from_field: whether it comes from the row's field `system` instead of its list of turns.
        calls: the calls of tools in a turn of the assistant, in the format of chat templates.
        weight: factor of the loss of a turn of the assistant; 0: it is not learnt.
    """

    role: str
    content: str | tuple[Mapping[str, str], ...]
    from_field: bool = False
    calls: tuple[Mapping[str, Any], ...] = ()
    weight: float = 1.0

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts in this turn of the conversation, without images and videos."""
        if isinstance(self.content, str):
            return (self.content,)
        return tuple(part["text"] for part in self.content if part["type"] == "text")

    def shown(self) -> Iterator[tuple[Medium, bool]]:
        """The images and videos of the turn, in order: kind, and whether the part names its file itself."""
        whole = self.content
        for part in ({"type": "text", "text": whole},) if isinstance(whole, str) else whole:
            if part["type"] == "text":
                yield from ((MEDIA[match[1]], False) for match in PLACEHOLDER.finditer(part["text"]))
            else:
                yield MEDIA[part["type"]], bool(part["named"])


def read_turn(turn: object, number: int, keys: tuple[str, str], own: list[tuple[Medium, Named]]) -> RowTurn:
    """A checked turn of a row; appends files that its parts name to `own`. RowFault if it is none."""
    if not isinstance(turn, Mapping) or keys[0] not in turn:
        raise RowFault(f"turn {number} needs both `{keys[0]}` and `{keys[1]}`", ACCEPTED)
    role, content = turn[keys[0]], turn.get(keys[1])
    if not isinstance(role, str) or role not in ROLES:
        raise RowFault(f"turn {number} has the unknown role {role!r}", ", ".join(ROLES))
    calls = _calls(content if role in _CALLING else turn.get("tool_calls"), number)
    if role in _CALLING or (calls and content is None):
        content = ""
    elif keys[1] not in turn:
        raise RowFault(f"turn {number} needs both `{keys[0]}` and `{keys[1]}`", ACCEPTED)
    if isinstance(content, list):
        content = tuple(_part(part, number, own) for part in content)
    elif not isinstance(content, str):
        raise RowFault(
            f"the content of turn {number} is {kind_of(content)}, not a text", "a text, or a list of parts"
        )
    made = RowTurn(ROLES[role], content, calls=calls, weight=_weight(turn, number))
    if made.role == "assistant":
        thought = _thinking(turn.get("reasoning_content"), number)
        if any(made.shown()) or PLACEHOLDER.search(thought):
            raise RowFault(
                f"turn {number} is the assistant's, but has an image or a video",
                "images and videos in user turns",
            )
        made = RowTurn(made.role, thought + "".join(made.texts), calls=calls, weight=made.weight)
    elif calls:
        raise RowFault(
            f"turn {number} calls a tool, but is of the role {role}", "tool calls of the assistant"
        )
    if not all(map(is_unicode, made.texts)):
        raise RowFault(f"turn {number} contains half of a surrogate pair, which is not a character", VALID)
    return made


def _calls(given: object, number: int) -> tuple[Mapping[str, Any], ...]:
    """The calls of tools of a turn, with their arguments as objects; a text is parsed as JSON."""
    given = _parsed(given, f"the tool call of turn {number}") if isinstance(given, str) and given else given
    if given in NOTHING:
        return ()
    found = []
    for call in given if isinstance(given, list) else [given]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowFault(f"a tool call of turn {number} names no function", _CALLS)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _parsed(arguments, f"the arguments of a tool call of turn {number}")
        if not isinstance(arguments, Mapping):
            raise RowFault(
                f"the arguments of a tool call of turn {number} are {kind_of(arguments)}, not an object",
                _CALLS,
            )
        found.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return tuple(found)


def read_tools(given: object) -> tuple[Mapping[str, Any], ...]:
    """The declarations of tools of a row, from a list or its JSON. RowFault if it is neither."""
    if given in NOTHING:
        return ()
    given = _parsed(given, "`tools` of the row") if isinstance(given, str) else given
    if not isinstance(given, list) or not all(isinstance(tool, Mapping) for tool in given):
        raise RowFault("`tools` of the row is no list of objects", '[{"type": "function", "function": {..}}]')
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in given)


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as fault:
        raise RowFault(f"{what} is not JSON: {fault}", _CALLS) from None


def _weight(turn: Mapping[str, object], number: int) -> float:
    key = next((key for key in _WEIGHTS if turn.get(key) is not None), None)
    value = 1.0 if key is None else turn[key]
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise RowFault(
            f"`{key}` of turn {number} is {value!r}",
            "a number from 0 (read only); 1 is the weight of turns without it",
        )
    return float(value)


def _thinking(thought: object, number: int) -> str:
    """A thought from a separate field, in the form that it has inside a content."""
    if not isinstance(thought, str | None):
        raise RowFault(f"`reasoning_content` of turn {number} is {kind_of(thought)}, not a text", "a text")
    return f"<think>\n{thought.strip()}\n</think>\n\n" if thought and thought.strip() else ""


def _part(part: object, number: int, own: list[tuple[Medium, Named]]) -> Mapping[str, str]:
    given = part if isinstance(part, Mapping) else {}
    kind = given.get("type")
    if kind == "text" and isinstance(given.get("text"), str):
        return {"type": "text", "text": given["text"]}
    if kind == "image_url":  # of OpenAI's format: a text, or {"url": text, "detail": ..}
        named = given.get("image_url")
        own.append(("image", read_file("image", named.get("url") if isinstance(named, Mapping) else named)))
        return {"type": "image", "named": "yes"}
    if kind not in ("image", "video"):
        raise RowFault(
            f"turn {number} has a part of unknown type",
            'parts {"type": "text" | "image" | "image_url" | "video", ..}',
        )
    path = next((given[name] for name in _PATHS if given.get(name) is not None), None)
    if path is not None:
        own.append((kind, read_file(kind, path)))
    return {"type": kind, "named": "yes" if path is not None else ""}


def read_files(row: Mapping[str, object], kind: str, wanted: int) -> list[Named]:
    """The files of a kind that a row lists, as `image` or `images`: a path or a list. RowFault if not.

    Without placeholders, bytes that a file holds are not read."""
    found: list[Named] = []
    for key in (kind, f"{kind}s"):
        value = row.get(key)
        if isinstance(value, Held):
            try:
                value = value.value() if wanted else None
            except ValueError as fault:
                raise RowFault(f"`{key}` of the row cannot be read again: {fault}") from None
        if value not in NOTHING:
            paths: Sequence[object] = value if isinstance(value, list) else [value]
            found += [read_file(kind, path) for path in paths if path not in NOTHING]
    return found


def read_file(kind: str, path: object) -> Named:
    """A path below the folder, or the image of a data URL or of a column of images. RowFault for others."""
    given: Mapping[str, Any] = path if isinstance(path, Mapping) else {"bytes": path}
    if kind == "image" and isinstance(given.get("bytes"), bytes):
        return InMemory(str(given.get("path") or "of the row"), given["bytes"])
    if isinstance(path, Mapping):
        path = path.get("path") or path.get("url")
    if kind == "image" and isinstance(path, str) and path.lstrip()[:5].lower() == "data:":
        try:
            return InMemory(*decoded(path.strip()))
        except ValueError as fault:
            what = f"the data URL {path[:60]!r} holds no image: {fault}"
            raise RowFault(what, "the path of a file, or data:image/png;base64,...") from None
    if not isinstance(path, str) or not path:
        raise RowFault(f"{path!r} is not a path to an image or video", "a relative path")
    if scheme := _URL.match(path):
        raise RowFault(
            f"{path[:60]!r} is a URL ({scheme[1].lower()}:), which is not read", "the path of a file"
        )
    if how := escapes(path):
        raise RowFault(f"the path {path!r} {how}", "a relative path below `folder` of the source")
    if not is_unicode(path):
        raise RowFault(
            f"the path {path!r} contains half of a surrogate pair, which is not a character", VALID
        )
    return path


def is_unicode(text: str) -> bool:
    """Whether a text is valid Unicode. JSON can also contain a single surrogate, which has no token."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
