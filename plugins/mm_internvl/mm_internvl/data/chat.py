"""Tokenizes conversations with the tokenizer's own chat template, and labels the tokens to learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mm_core.contracts import IGNORED_LABEL
from mm_core.errors import DataError, plural
from mm_internvl.data.rows import PLACEHOLDER, Conversation, Medium, RowTurn
from mm_internvl.vocabulary import NEEDED, Fault, Vocabulary, message_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Shown:
    """An image or video of a conversation, as the model takes it.

    Attributes:
        kind: image or video.
        tiles: number of tiles of each picture: one picture for an image, one per frame for a video.
    """

    kind: Medium
    tiles: tuple[int, ...]


@dataclass(frozen=True)
class Tokens:
    """The tokens of a conversation, up to `max_length`.

    Attributes:
        ids: token ids [L] int64.
        labels: labels [L] int64; -100 where nothing is learnt.
        shown: number of images and videos within these tokens.
        whole: whether nothing was cut off.
    """

    ids: Tensor
    labels: Tensor
    shown: int
    whole: bool


@dataclass
class Chat:
    """The tokenizer and chat template of an InternVL folder, opened on first use.

    Args:
        folder: folder of the model.
        max_length: largest number of tokens in a conversation; longer ones are cut.
        system: system prompt for conversations without one.

    Raises (on first use):
        CheckpointError: the folder has no tokenizer, no chat template, or no tokens for images.
    """

    folder: str
    max_length: int
    system: str | None = None

    def __getstate__(self) -> dict[str, object]:
        return asdict(self)  # without the vocabulary

    def check(self) -> None:
        """Opens the model's tokenizer and chat template.

        Raises:
            CheckpointError: the folder has no tokenizer, no chat template, or no tokens for images.
        """
        _ = self._vocabulary

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the InternVL folder, as a Transformers object."""
        return self._vocabulary.tokenizer

    @property
    def tokens_of_blank(self) -> list[int]:
        """Token ids of an image with one tile."""
        known = self._vocabulary
        return [known.start, *[known.context] * known.tile, known.end]

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self.folder)

    def tokens(self, conversation: Conversation, shown: Sequence[Shown], where: str) -> Tokens:
        """Tokenizes a conversation, up to `max_length`, and labels the tokens of the assistant.

        Args:
            conversation: turns of the conversation.
            shown: its images and videos.
            where: file and row, for errors.

        Raises:
            DataError: a text contains special tokens of the template, the template rewrites a turn, the cut
                falls inside an image, or nothing before the cut is learnt.
        """
        known = self._vocabulary
        try:
            text, spans = self._laid_out(known, conversation.turns, [medium.kind for medium in shown])
            text, spans = _with_pictures(known, text, spans, shown)
            ids, labels, blocks = _expanded(known, text, spans, shown)
            kept = self._kept(len(ids), blocks, shown)
        except Fault as fault:
            raise DataError(str(fault), where=where, hint=fault.hint) from None
        length = min(len(ids), self.max_length)
        labels[0] = IGNORED_LABEL  # no token precedes it, also in a packed row
        if not bool((labels[:length] != IGNORED_LABEL).any()):
            raise DataError(
                f"nothing to learn: the first {length} of {plural(len(ids), 'token')} contain no text of the "
                "assistant",
                where=where,
                hint="raise max_length of the dataset, or split the conversation",
            )
        return Tokens(ids[:length].clone(), labels[:length].clone(), kept, whole=length == len(ids))

    def prompt(self, turns: Sequence[RowTurn], shown: Sequence[Shown], where: str) -> Tensor:
        """Tokens [L] int64 of a conversation, up to the assistant's next answer.

        Args:
            turns: turns of the conversation.
            shown: its images and videos.
            where: file and row, for errors.

        Raises:
            DataError: as for `tokens`; or the conversation has `max_length` tokens or more.
        """
        known = self._vocabulary
        try:
            text = self._rendered(known, turns, [medium.kind for medium in shown])
            text, _ = _with_pictures(known, text, (), shown)
            ids, _, _ = _expanded(known, text, (), shown)
        except Fault as fault:
            raise DataError(str(fault), where=where, hint=fault.hint) from None
        if len(ids) >= self.max_length:
            raise DataError(
                f"the conversation has {plural(len(ids), 'token')}, and max_length {self.max_length} leaves"
                " no room for an answer",
                where=where,
                hint="raise max_length of the dataset, lower max_tiles or frames, or start a new chat",
            )
        return ids

    def _begun(self, turns: Sequence[RowTurn]) -> dict[str, RowTurn]:
        """The turns by their names in messages, with the system prompt of the row or the dataset."""
        begun = {}
        if turns[0].from_field:
            begun["`system` of the row"], turns = turns[0], turns[1:]
        elif self.system is not None and turns[0].role != "system":
            begun["`system` of the dataset"] = RowTurn("system", self.system)
        return {**begun, **{f"turn {number}": turn for number, turn in enumerate(turns, 1)}}

    def _rendered(self, known: Vocabulary, turns: Sequence[RowTurn], kinds: Sequence[Medium]) -> str:
        """The template's text for a conversation that awaits an answer."""
        begun = self._begun(turns)
        self._check_words(known, begun)
        messages = {name: message_of(turn, known) for name, turn in begun.items()}
        text = known.rendered([*messages.values()], prompt=True)
        self._check_pictures(known, text, kinds)
        _check_other_turns(messages, text)
        return text

    def _kept(self, length: int, blocks: Sequence[tuple[int, int]], shown: Sequence[Shown]) -> int:
        """Number of images and videos before the cut."""
        if length <= self.max_length:
            return len(blocks)
        for number, (start, end) in enumerate(blocks):
            if start < self.max_length < end:
                raise Fault(
                    f"the row has {plural(length, 'token')}, and max_length {self.max_length} would cut "
                    f"through {shown[number].kind} {number + 1}",
                    "raise max_length of the dataset, set share_tiles, lower max_tiles or frames, or "
                    "split the conversation",
                )
        return sum(end <= self.max_length for _, end in blocks)

    def _laid_out(
        self, known: Vocabulary, turns: Sequence[RowTurn], kinds: Sequence[Medium]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The template's text, with one placeholder for each image and video, and the spans to learn."""
        begun = self._begun(turns)
        self._check_words(known, begun)
        messages = {name: message_of(turn, known) for name, turn in begun.items()}
        spans, text = known.spans([*messages.values()])
        self._check_pictures(known, text, kinds)
        _check_other_turns(messages, text)
        return text, spans

    def _check_words(self, known: Vocabulary, turns: Mapping[str, RowTurn]) -> None:
        for name, turn in turns.items():
            words = "".join(PLACEHOLDER.sub("", text) for text in turn.texts)
            if own := next((token for token in known.structure if token in words), None):
                pictures = own in known.names.values()
                raise Fault(
                    f"{name} contains {own!r}, which is a special token "
                    + ("for images" if pictures else "of the chat template"),
                    "write <image> where an image belongs, and spell the token's name differently"
                    if pictures
                    else "spell it differently in the data",
                )

    def _check_pictures(self, known: Vocabulary, text: str, kinds: Sequence[Medium]) -> None:
        found = [known.kind_of(match[0]) for match in known.pictures.finditer(text)]
        if found != list(kinds):
            raise Fault(
                f"the chat template outputs {plural(len(found), 'image')} and videos, but the conversation "
                f"has {len(kinds)}",
                "use the template of InternVL's Transformers folders, which outputs each once, in order",
            )


def _check_other_turns(messages: Mapping[str, Mapping[str, Any]], text: str) -> None:
    """Raises Fault if the template omits or rewrites a turn that is not the assistant's."""
    for name, message in messages.items():
        content = message["content"]
        parts = [{"text": content}] if isinstance(content, str) else content
        role = message["role"]
        if role != "assistant" and any(part.get("text", "").strip() not in text for part in parts):
            raise Fault(
                f"the chat template omits or rewrites {name}, a turn of the {role}",
                "use another template, or remove the turn",
            )


def _with_pictures(
    known: Vocabulary, text: str, spans: Sequence[tuple[int, int]], shown: Sequence[Shown]
) -> tuple[str, list[tuple[int, int]]]:
    """The text with each picture as `<img><IMG_CONTEXT></img>`, with frames of a video numbered as in
    Transformers' processor; and the spans, moved accordingly."""
    start, end, context = (known.names[name] for name in NEEDED)
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
    known: Vocabulary, text: str, spans: Sequence[tuple[int, int]], shown: Sequence[Shown]
) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """Token ids, labels, and [start, end) of each image and video in tokens, with every tile at full
    length."""
    # Not verbose: max_length cuts what exceeds the tokenizer's own length, so no warning is needed.
    found = known.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = torch.tensor(found["input_ids"], dtype=torch.int64)
    begins = torch.tensor([start for start, _ in found["offset_mapping"]], dtype=torch.int64)
    learnt = torch.zeros(len(ids), dtype=torch.bool)
    for start, end in spans:
        learnt |= (begins >= start) & (begins < end)
    labels = torch.where(learnt, ids, IGNORED_LABEL)
    repeats = torch.ones_like(ids)
    places = (ids == known.context).nonzero().flatten()
    tiles = torch.tensor([count for medium in shown for count in medium.tiles], dtype=torch.int64)
    assert len(places) == len(tiles), "each picture is one token before its tiles are expanded"
    repeats[places] = tiles * known.tile
    ends = repeats.cumsum(0)
    blocks, first = [], 0
    for medium in shown:
        last = first + len(medium.tiles) - 1
        # `<img>` precedes the first tile, `</img>` follows the last.
        blocks.append((int(ends[places[first] - 1]) - 1, int(ends[places[last] + 1])))
        first = last + 1
    return ids.repeat_interleave(repeats), labels.repeat_interleave(repeats), blocks
