"""Turns questions of `mm sample` and `mm chat` into model inputs, in the form of the dataset's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mm_core.contracts import Question, Turn
from mm_core.errors import DataError, plural
from mm_core.tasks.conversations.chat import Chat, Files
from mm_core.tasks.conversations.processor import Encoded
from mm_core.tasks.conversations.rows.reading import Conversation, RawRow, conversation, located, read_rows
from mm_core.tasks.conversations.rows.turns import PLACEHOLDER, RowTurn
from mm_core.tasks.conversations.template import Fault


@dataclass(frozen=True)
class QuestionInputs:
    """Turns questions about images into a model's inputs, by its processor and chat template. Satisfies
    `Conversing`.

    Inputs are `input_ids`, `attention_mask` [1,L], and the tensors of images. For a question without
    images, a masked blank picture precedes the conversation, so that the same modules run for every question.
    """

    chat: Chat

    def prompt(self, turns: Sequence[Turn]) -> Mapping[str, Tensor]:
        """Model inputs for a conversation that awaits an answer. Images of a turn precede its text, or
        replace `<image>` in it.

        Raises:
            DataError: a file cannot be read, placeholders do not match the images, or the conversation is too
                long for an answer.
        """
        media: Files = [("image", path) for turn in turns for path in turn.images]
        if not turns[-1].text.strip() and not turns[-1].images:
            raise DataError("the prompt has no text and no image", accepted="a text, an image, or both")
        asked = Conversation(tuple(_placed(turn) for turn in turns), ())
        return self._inputs(asked, media, "the conversation")

    def boxes(self, turns: Sequence[Turn], answer: str) -> Mapping[Path, Sequence[tuple[float, ...]]]:
        """The boxes and points in an answer, by image file, in its pixels."""
        images = [path for turn in turns for path in turn.images]
        found = self.chat.boxes_in(answer, images)
        return {images[-1]: found} if found else {}

    def questions(self, file: Path) -> Sequence[Callable[[], Question]]:
        """Questions from a file with rows in the dataset's format; paths are relative to the file's
        folder. The assistant's last turn is a reference answer, and so are `answers`."""
        return [partial(self._question, file, row) for row in read_rows(file, 0)]

    def _question(self, file: Path, row: RawRow) -> Question:
        name = f"{file.name}, {row.place}"
        read = conversation(row.value, name, learnt=False)
        media = located(read.media, file.parent)
        try:
            asked = self.chat.filled(read, self.chat.processor.shown(media)).asked()
        except Fault as fault:
            raise DataError(str(fault), where=name, hint=fault.hint) from None
        question = next("".join(turn.texts) for turn in reversed(asked.turns) if turn.role == "user")
        if not question.strip() and not asked.media:
            raise DataError(
                "the row has no question and no image",
                where=name,
                accepted="a text of the user, an image, or both",
            )
        return Question(name, question, self._inputs(asked, media, name), asked.answers)

    def _inputs(self, asked: Conversation, media: Files, where: str) -> Mapping[str, Tensor]:
        found = self.chat.prompt(asked, media, where)
        parts: list[Encoded] = [found]
        if not found.vision and (blank := self.chat.processor.blank) is not None:
            parts = [blank, found]
        names = [name for name in dict.fromkeys(n for part in parts for n in part.tokens) if name != "labels"]
        inputs = {name: torch.cat([part.of(name) for part in parts])[None] for name in names}
        seen = [torch.full((len(part),), int(part is found)) for part in parts]
        vision = self.chat.processor.joined([[part.vision for part in parts if part.vision]])
        return {**inputs, "attention_mask": torch.cat(seen)[None], **vision}


def _placed(turn: Turn) -> RowTurn:
    """The turn with placeholders for its images. DataError if the text's placeholders do not match them."""
    found = [match[1] for match in PLACEHOLDER.finditer(turn.text)]
    if not found:
        return RowTurn(turn.role, "<image>\n" * len(turn.images) + turn.text)
    if found != ["image"] * len(turn.images):
        hint = "videos can be used only in rows of a file" if "video" in found else None
        raise DataError(
            f"the text contains {' '.join(f'<{kind}>' for kind in found)}, but the turn has "
            f"{plural(len(turn.images), 'image')}",
            where=turn.text,
            accepted="one <image> for each image, or none: images then precede the text",
            hint="start a new conversation: the model itself wrote the placeholder"
            if turn.role == "assistant"
            else hint,
        )
    return RowTurn(turn.role, turn.text)
