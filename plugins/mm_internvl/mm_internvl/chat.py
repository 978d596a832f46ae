"""Conversations as tokens, by the tokenizer's own chat template, with a label for each token that is learnt.

The template is rendered twice: as the conversation is, and with a mark in the place of each thing that the
assistant says. What stands between the marks is the template's own; that it is the same around the real words
is checked, so a template that rewrites a turn is noticed. Learnt is what the model has to write after the
prompt of a generation: from there to the token that ends the turn, that one included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mm_core.errors import CheckpointError, DataError
from mm_core.tokenizer import open_tokenizer
from mm_internvl.rows import PLACEHOLDER, Conversation, Medium, Turn
from mm_internvl.tiling import tokens_of_tile

IGNORED = -100
"""The label of what is not learnt."""

_AS_GIVEN: tuple[Callable[[str], str], ...] = (str, str.strip, lambda text: text.lstrip("\n"))
"""What templates do to the words of a turn."""


@dataclass(frozen=True)
class Shown:
    """An image or video of a conversation: tiles of each of its pictures (one for an image, else frames)."""

    kind: Medium
    tiles: tuple[int, ...]


@dataclass(frozen=True)
class Tokens:
    """ids, labels: [L] int64. shown: how many of the conversation's images and videos are within."""

    ids: Tensor
    labels: Tensor
    shown: int


@dataclass
class Chat:
    """The tokenizer and template of a model's folder, opened where they are first used.

    Args:
        folder: the model's.
        max_length: tokens of a conversation; longer ones are cut.
        system: prompt of conversations that have none.

    Raises (on first use):
        CheckpointError: a folder without a tokenizer, a chat template, or the tokens of images.
    """

    folder: str
    max_length: int
    system: str | None = None
    _known: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "max_length": self.max_length, "system": self.system, "_known": {}}

    def check(self) -> None:
        """Opens the folder. CheckpointError for one that will not do."""
        _ = self._vocabulary

    @property
    def tokenizer(self) -> Any:
        """Transformers' tokenizer."""
        return self._vocabulary.tokenizer

    @property
    def tokens_of_blank(self) -> list[int]:
        """Ids of an image of one tile."""
        known = self._vocabulary
        return [known.start, *[known.context] * known.tile, known.end]

    @property
    def _vocabulary(self) -> _Vocabulary:
        if "vocabulary" not in self._known:
            self._known["vocabulary"] = _Vocabulary(self.folder)
        found: _Vocabulary = self._known["vocabulary"]
        return found

    def tokens(self, conversation: Conversation, shown: Sequence[Shown], where: str) -> Tokens:
        """The conversation's tokens, up to `max_length`, and what is to be learnt of them.

        shown: its images and videos. where: for errors.

        Raises:
            DataError: words that are the template's own tokens, a turn that the template rewrites, an image
                at the cut, nothing to learn before it.
        """
        known = self._vocabulary
        turns = self._begun(conversation.turns)
        try:
            text, spans = self._laid_out(known, turns, [medium.kind for medium in shown])
            text, spans = _with_pictures(known, text, spans, shown)
            ids, labels, blocks = _expanded(known, text, spans, shown)
            kept = self._kept(len(ids), blocks, shown)
        except _Fault as fault:
            raise DataError(str(fault), where=where, hint=fault.hint) from None
        length = min(len(ids), self.max_length)
        labels[0] = IGNORED  # nothing comes before it, in a packed row as little as alone
        if not bool((labels[:length] != IGNORED).any()):
            raise DataError(
                f"of {len(ids)} tokens, the first {length} hold nothing that the assistant says",
                where=where,
                hint="raise max_length of the dataset, or split the conversation",
            )
        return Tokens(ids[:length].clone(), labels[:length].clone(), kept)

    def prompt(self, turns: Sequence[Turn], shown: Sequence[Shown], where: str) -> Tensor:
        """[L] int64: the tokens of turns, up to where the assistant goes on. DataError as of `tokens`, and
        for more of them than `max_length`."""
        known = self._vocabulary
        try:
            text = self._rendered(known, self._begun(turns), [medium.kind for medium in shown])
            text, _ = _with_pictures(known, text, (), shown)
            ids, _, _ = _expanded(known, text, (), shown)
        except _Fault as fault:
            raise DataError(str(fault), where=where, hint=fault.hint) from None
        if len(ids) >= self.max_length:
            raise DataError(
                f"the conversation has {len(ids)} tokens, and max_length {self.max_length} leaves no room "
                "for an answer",
                where=where,
                hint="raise max_length of the dataset, lower max_tiles or frames, or begin anew",
            )
        return ids

    def _begun(self, turns: Sequence[Turn]) -> tuple[Turn, ...]:
        if self.system is not None and turns[0].role != "system":
            return (Turn("system", self.system), *turns)
        return tuple(turns)

    def _rendered(self, known: _Vocabulary, turns: Sequence[Turn], kinds: Sequence[Medium]) -> str:
        """The template's text of turns that are to be answered."""
        self._check_words(known, turns)
        messages = [_message(turn, known) for turn in turns]
        text = known.rendered(messages, prompt=True)
        self._check_pictures(known, text, kinds)
        _check_said(messages, text)
        return text

    def _kept(self, length: int, blocks: Sequence[tuple[int, int]], shown: Sequence[Shown]) -> int:
        """How many images and videos lie before the cut."""
        if length <= self.max_length:
            return len(blocks)
        for number, (start, end) in enumerate(blocks):
            if start < self.max_length < end:
                raise _Fault(
                    f"the row has {length} tokens, and cutting it at {self.max_length} would go through "
                    f"{shown[number].kind} {number + 1}",
                    "raise max_length of the dataset, lower max_tiles or frames, or split the conversation",
                )
        return sum(end <= self.max_length for _, end in blocks)

    def _laid_out(
        self, known: _Vocabulary, turns: Sequence[Turn], kinds: Sequence[Medium]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The template's text, each image and video one placeholder in it, and the spans to learn."""
        self._check_words(known, turns)
        messages = [_message(turn, known) for turn in turns]
        spans, text = known.spans(messages)
        self._check_pictures(known, text, kinds)
        _check_said(messages, text)
        return text, spans

    def _check_words(self, known: _Vocabulary, turns: Sequence[Turn]) -> None:
        for number, turn in enumerate(turns, 1):
            words = "".join(PLACEHOLDER.sub("", text) for text in turn.texts)
            if own := next((token for token in known.structure if token in words), None):
                raise _Fault(
                    f"turn {number} says {own!r}, which is a token of the chat template's own",
                    "write it in another way",
                )

    def _check_pictures(self, known: _Vocabulary, text: str, kinds: Sequence[Medium]) -> None:
        found = [known.kind_of(match[0]) for match in known.pictures.finditer(text)]
        if found != list(kinds):
            raise _Fault(
                f"the chat template shows {len(found)} images and videos of the conversation's {len(kinds)}",
                "a template of InternVL's Transformers folders shows each of them once, in order",
            )


class _Fault(Exception):
    """What is wrong with a conversation; `Chat.tokens` adds where it stands."""

    def __init__(self, what: str, hint: str | None = None) -> None:
        super().__init__(what)
        self.hint = hint


class _Vocabulary:
    """What is known of a folder's tokenizer: its template, and the tokens of images."""

    def __init__(self, folder: str) -> None:
        import re

        self.folder = folder
        self.tokenizer = open_tokenizer(folder)
        if not self.tokenizer.chat_template:
            raise CheckpointError(
                "the tokenizer has no chat template",
                where=folder,
                accepted="chat_template.jinja, or `chat_template` in tokenizer_config.json",
                hint="take the folder of a model that was trained to converse, or copy the template of one",
            )
        self.names = {
            name: str(getattr(self.tokenizer, f"{name}_token", None) or otherwise)
            for name, otherwise in _PICTURE_TOKENS.items()
        }
        ids = {name: self.tokenizer.convert_tokens_to_ids(self.names[name]) for name in _NEEDED}
        if missing := [self.names[n] for n in _NEEDED if ids[n] in (None, self.tokenizer.unk_token_id)]:
            raise CheckpointError(
                f"the tokenizer knows no {', '.join(missing)}, so it is none of InternVL's",
                where=folder,
                accepted="the folder of an InternVL model in the layout of Transformers",
            )
        self.start, self.end, self.context = (int(ids[name]) for name in _NEEDED)
        self.tile = tokens_of_tile(Path(folder))
        names = {*self.names.values(), "<image>", "<video>"}
        self.pictures = re.compile("|".join(re.escape(name) for name in sorted(names - self._around())))

    def _around(self) -> set[str]:
        return {self.names["start_image"], self.names["end_image"]}

    def kind_of(self, name: str) -> Medium:
        """What a placeholder of the template stands for."""
        return "video" if name in (self.names["video"], "<video>") else "image"

    @cached_property
    def structure(self) -> tuple[str, ...]:
        """Special tokens that mean something to the template or the model, and must not be said."""
        text = self.rendered([{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}])
        special = [token for token in self.tokenizer.all_special_tokens if token in text]
        return (*special, *self._around(), self.names["context_image"])

    def rendered(self, messages: Sequence[Mapping[str, Any]], prompt: bool = False) -> str:
        """What the chat template makes of messages; prompt: with the head of the assistant's next turn."""
        import jinja2  # with Transformers, where the template is rendered

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt
            )
        except (jinja2.TemplateError, TypeError) as fault:
            raise _Fault(f"the chat template refuses the conversation: {fault}") from fault
        assert isinstance(text, str)
        return text

    def spans(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[int, int]], str]:
        """([start, end) in characters of each thing to learn, the conversation's text)."""
        text = self.rendered(messages)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        edge = next(mark for mark in map(chr, range(0xE000, 0xF8FF)) if mark not in text)
        marked = [
            {**message, "content": f"{edge}{number}{edge}"} if number in turns else message
            for number, message in enumerate(messages)
        ]
        around = _split(self.rendered(marked), [f"{edge}{number}{edge}" for number in turns])
        for change in _AS_GIVEN:
            said = [change(messages[number]["content"]) for number in turns]
            if around is not None and text == _joined(around, said):
                return self._learnt(around, said), text
        raise _Fault(
            "the chat template changes what the assistant says, or shows it more or less than once",
            "leave out what it takes away (thoughts of earlier turns, say), or use another template",
        )

    def _learnt(self, around: Sequence[str], said: Sequence[str]) -> list[tuple[int, int]]:
        spans, place = [], 0
        for before, words, behind in zip(around, said, around[1:], strict=False):
            place += len(before)
            # What the template puts between the head and the words, the model has to write as well.
            start = (
                place - (len(before) - before.rfind(self.head) - len(self.head))
                if self.head in before
                else place
            )
            place += len(words)
            spans.append((start, place + self._ending(behind)))
        return spans

    @cached_property
    def head(self) -> str:
        """What a generation's prompt adds to a conversation; "" where the template has none."""
        asked = [{"role": "user", "content": "u"}]
        bare, prompted = self.rendered(asked), self.rendered(asked, prompt=True)
        return prompted[len(bare) :] if prompted.startswith(bare) else ""

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template shows a content that is a list, as Qwen3's own does not."""
        asked = [{"role": "user", "content": [{"type": "text", "text": "\ue000"}]}]
        try:
            return "\ue000" in self.rendered(asked)
        except _Fault:
            return False

    def _ending(self, behind: str) -> int:
        """Characters up to and with the token that ends a turn, where only white space is before it."""
        gap = len(behind) - len(behind.lstrip())
        begins = [token for token in self.tokenizer.all_special_tokens if behind.startswith(token, gap)]
        token = max(begins, key=len, default="")
        return 0 if not token or self.head.lstrip().startswith(token) else gap + len(token)


_PICTURE_TOKENS = {
    "start_image": "<img>",
    "end_image": "</img>",
    "context_image": "<IMG_CONTEXT>",
    "video": "<video>",
}
_NEEDED = ("start_image", "end_image", "context_image")


def _message(turn: Turn, known: _Vocabulary) -> dict[str, Any]:
    """A turn as the template takes it, placeholders as the tokens that they stand for."""
    names = {"image": known.names["context_image"], "video": known.names["video"]}

    def placed(text: str) -> str:
        return PLACEHOLDER.sub(lambda match: names[match[1]], text)

    if isinstance(turn.content, str):
        return {"role": turn.role, "content": placed(turn.content)}
    parts = [
        {"type": "text", "text": placed(part["text"])} if part["type"] == "text" else {"type": part["type"]}
        for part in turn.content
    ]
    if not known.takes_parts:  # as templates that do write them
        texts = (part["text"] if part["type"] == "text" else f"{names[part['type']]}\n" for part in parts)
        return {"role": turn.role, "content": "".join(texts)}
    return {"role": turn.role, "content": parts}


def _check_said(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """_Fault where the template leaves out or rewrites what somebody else than the assistant says."""
    for number, message in enumerate(messages, 1):
        content = message["content"]
        parts = [{"text": content}] if isinstance(content, str) else content
        if message["role"] != "assistant" and any(p.get("text", "").strip() not in text for p in parts):
            raise _Fault(
                f"the chat template does not show turn {number}, which is the {message['role']}'s, as it is",
                "use another template, or leave the turn out",
            )


def _split(text: str, marks: Sequence[str]) -> list[str] | None:
    """What stands around marks that come once each, in order; None otherwise."""
    parts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found:
            return None
        parts.append(before)
    return None if any(mark in text for mark in marks) else [*parts, text]


def _joined(around: Sequence[str], said: Sequence[str]) -> str:
    return "".join(part + words for part, words in zip(around, (*said, ""), strict=True))


def _with_pictures(
    known: _Vocabulary, text: str, spans: Sequence[tuple[int, int]], shown: Sequence[Shown]
) -> tuple[str, list[tuple[int, int]]]:
    """The text with each picture as `<img><IMG_CONTEXT></img>`, frames of a video numbered as Transformers'
    processor numbers them; and the spans where they are then."""
    start, end, context = (known.names[name] for name in _NEEDED)
    picture = f"{start}{context}{end}"
    parts, place, moved, shifts = [], 0, 0, []
    for match, medium in zip(known.pictures.finditer(text), shown, strict=True):
        frames = [f"Frame{number}: {picture}" for number in range(1, len(medium.tiles) + 1)]
        put = picture if medium.kind == "image" else "\n".join(frames)
        parts += [text[place : match.start()], put]
        place = match.end()
        moved += len(put) - len(match[0])
        shifts.append((place, moved))
    parts.append(text[place:])

    def shifted(at: int) -> int:
        return at + next((by for behind, by in reversed(shifts) if behind <= at), 0)

    return "".join(parts), [(shifted(a), shifted(b)) for a, b in spans]


def _expanded(
    known: _Vocabulary, text: str, spans: Sequence[tuple[int, int]], shown: Sequence[Shown]
) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """(ids, labels, [start, end) of each image and video in tokens), every tile at its full length."""
    found = known.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = torch.tensor(found["input_ids"], dtype=torch.int64)
    begins = torch.tensor([start for start, _ in found["offset_mapping"]], dtype=torch.int64)
    learnt = torch.zeros(len(ids), dtype=torch.bool)
    for start, end in spans:
        learnt |= (begins >= start) & (begins < end)
    labels = torch.where(learnt, ids, IGNORED)
    repeats = torch.ones_like(ids)
    places = (ids == known.context).nonzero().flatten()
    tiles = torch.tensor([count for medium in shown for count in medium.tiles], dtype=torch.int64)
    assert len(places) == len(tiles), "a picture is one token before its tiles are counted"
    repeats[places] = tiles * known.tile
    ends = repeats.cumsum(0)
    blocks, first = [], 0
    for medium in shown:
        last = first + len(medium.tiles) - 1
        # `<img>` stands before the first tile, `</img>` behind the last.
        blocks.append((int(ends[places[first] - 1]) - 1, int(ends[places[last] + 1])))
        first = last + 1
    return ids.repeat_interleave(repeats), labels.repeat_interleave(repeats), blocks
