"""The tokens of conversations, up to the length of a row: for training, and up to the next answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mm_core.contracts import IGNORED_LABEL
from mm_core.errors import DataError, plural
from mm_core.tasks.conversations.media import Shown
from mm_core.tasks.conversations.placed import Learnt
from mm_core.tasks.conversations.processor import ChatProcessor, Encoded
from mm_core.tasks.conversations.rows.boxes import Numbers, boxes_in, with_boxes
from mm_core.tasks.conversations.rows.reading import Conversation
from mm_core.tasks.conversations.rows.turns import PLACEHOLDER, Medium, Picture, RowTurn
from mm_core.tasks.conversations.template import Fault

Files = Sequence[tuple[Medium, Picture]]
"""Images and videos of a conversation."""


@dataclass
class Chat:
    """Turns conversations into rows.

    Attributes:
        processor: of the model.
        max_length: largest number of tokens in a conversation; longer ones are cut.
        system: system prompt for conversations without one.
        boxes: how the model writes the numbers of boxes; None: rows have none.
    """

    processor: ChatProcessor
    max_length: int
    system: str | None = None
    boxes: Numbers | None = None

    def row(self, conversation: Conversation, files: Files, where: str, pixels: bool) -> tuple[Encoded, bool]:
        """A conversation of training, up to `max_length`, and whether nothing was cut off.

        A cut is never inside a picture: it is then before it.

        Args:
            conversation: turns of the conversation.
            files: its images and videos.
            where: file and row, for errors.
            pixels: whether pictures are read; else only their headers.

        Raises:
            DataError: a text contains special tokens of the template, the template rewrites a turn, a file
                cannot be read, or nothing before the cut is learnt.
        """
        try:
            shown = self.processor.shown(files)
            text, spans = self._laid_out(conversation, shown)
            found, whole = self._cut(text, spans, shown, files if pixels else None)
        except Fault as fault:
            raise DataError(str(fault), where=where, hint=fault.hint) from None
        labels = found.tokens["labels"]
        labels[0] = IGNORED_LABEL  # no token precedes it, also in a packed row
        if not bool((labels != IGNORED_LABEL).any()):
            raise DataError(
                f"nothing to learn: the first {plural(len(found), 'token')} contain no text of the assistant",
                where=where,
                hint="raise max_length of the dataset, or split the conversation",
            )
        return found, whole

    def prompt(self, asked: Conversation, files: Files, where: str) -> Encoded:
        """A conversation up to the assistant's next answer.

        Raises:
            DataError: as for `row`; or the conversation has `max_length` tokens or more.
        """
        try:
            shown = self.processor.shown(files)
            text, _ = self._laid_out(asked, shown, prompt=True)
            found = self.processor.encode(text, (), shown, [file for _, file in files])
        except Fault as fault:
            raise DataError(str(fault), where=where, hint=fault.hint) from None
        if len(found) >= self.max_length:
            raise DataError(
                f"the conversation has {plural(len(found), 'token')}, and max_length {self.max_length} leaves"
                " no room for an answer",
                where=where,
                hint="raise max_length of the dataset, use smaller images, or start a new chat",
            )
        return found

    def filled(self, conversation: Conversation, shown: Sequence[Shown]) -> Conversation:
        """A conversation with the numbers of its boxes in its texts. Fault if the config names no kind."""
        if not conversation.boxes:
            return conversation
        if self.boxes is None:
            raise Fault(
                "the row has boxes, but the config does not name how the model writes them",
                "set boxes of the dataset: pixels (of the image that the model sees), or relative_1000",
            )
        sizes = [each.sizes[0] for each in shown if each.kind == "image"]
        seen = sizes if self.boxes != "pixels" else [self.processor.seen(size, len(sizes)) for size in sizes]
        turns = with_boxes(conversation.turns, conversation.boxes, sizes, seen, self.boxes)
        return replace(conversation, turns=turns, boxes=())

    def boxes_in(self, text: str, images: Sequence[Picture]) -> list[tuple[float, ...]]:
        """The boxes and points in an answer, in pixels of the last image's file: answers name no image."""
        if self.boxes is None or not images:
            return []
        (shown,) = self.processor.shown([("image", images[-1])])
        (size,) = shown.sizes
        seen = self.processor.seen(size, len(images)) if self.boxes == "pixels" else size
        return boxes_in(text, size, seen, self.boxes)

    def _begun(self, turns: Sequence[RowTurn]) -> dict[str, RowTurn]:
        """The turns by their names in messages, with the system prompt of the row or the dataset."""
        begun = {}
        if turns[0].from_field:
            begun["`system` of the row"], turns = turns[0], turns[1:]
        elif self.system is not None and turns[0].role != "system":
            begun["`system` of the dataset"] = RowTurn("system", self.system)
        return {**begun, **{f"turn {number}": turn for number, turn in enumerate(turns, 1)}}

    def _laid_out(
        self, conversation: Conversation, shown: Sequence[Shown], prompt: bool = False
    ) -> tuple[str, list[Learnt]]:
        """The template's text, and the spans to learn; none of a prompt."""
        begun = self._begun(self.filled(conversation, shown).turns)
        named = self.processor.messages(begun, shown)
        template, messages = self.processor.template, [*named.values()]
        spans: list[Learnt] = []
        if prompt:
            text = template.rendered(messages, prompt=True, tools=conversation.tools)
        else:
            weights = [turn.weight for turn in begun.values()]
            spans, text = template.spans(messages, conversation.tools, weights)
        self._check(begun, named, text, shown)
        self._check_tools(named, text, conversation.tools, prompt)
        return text, spans

    def _cut(
        self, text: str, spans: Sequence[Learnt], shown: Sequence[Shown], files: Files | None
    ) -> tuple[Encoded, bool]:
        """The tokens that fit, and whether these are all."""
        most, processor = self.max_length, self.processor
        named = None if files is None else [file for _, file in files]
        found, count = processor.encode(text, spans, shown, named), None
        while (kept := sum(end <= most for _, end in found.blocks)) < len(found.blocks):
            text, count = text[: processor.places(text)[kept][0]], kept
            found = processor.encode(text, spans, shown, count=count)
        if named is not None and count:
            found = processor.encode(text, spans, shown, named, count)
        if len(found) <= most:
            return found, count is None
        return replace(
            found, tokens={name: each[:most].clone() for name, each in found.tokens.items()}
        ), False

    def _check(
        self,
        turns: Mapping[str, RowTurn],
        messages: Mapping[str, Mapping[str, Any]],
        text: str,
        shown: Sequence[Shown],
    ) -> None:
        """Raises Fault if the template omits a turn or a picture, or a turn has tokens of the template."""
        template = self.processor.template
        for name, turn in turns.items():
            words = "".join(PLACEHOLDER.sub("", spoken) for spoken in turn.texts) + str(turn.calls or "")
            if own := next((token for token in template.structure if token in words), None):
                raise Fault(
                    f"{name} contains {own!r}, which is a special token of the model",
                    "write <image> where an image belongs, and spell the token's name differently",
                )
        found, wanted = len(self.processor.places(text)), sum(each.count for each in shown)
        if found != wanted:
            raise Fault(
                f"the chat template outputs {plural(found, 'image')}, but the conversation has {wanted}",
                "use the template of the model's own folder, which outputs each once, in order",
            )
        for name, message in messages.items():
            content, role = message["content"], message["role"]
            parts = [{"text": content}] if isinstance(content, str) else content
            if role != "assistant" and any(part.get("text", "").strip() not in text for part in parts):
                raise Fault(
                    f"the chat template omits or rewrites {name}, a turn of the {role}",
                    "use another template, or remove the turn",
                )

    def _check_tools(
        self,
        messages: Mapping[str, Mapping[str, Any]],
        text: str,
        tools: Sequence[Any],
        prompt: bool = False,
    ) -> None:
        """Raises Fault if the template omits the tools of the row or a call of one."""
        omitted = next(
            (
                f"the tool calls of {name}"
                for name, message in messages.items()
                if any(call["function"]["name"] not in text for call in message.get("tool_calls", ()))
            ),
            "",
        )
        if not omitted and tools:
            same = self.processor.template.rendered([*messages.values()], prompt) == text
            omitted = "the `tools` of the row" if same else ""
        if omitted:
            raise Fault(f"the chat template omits {omitted}", "use a template with tools, or remove the row")
