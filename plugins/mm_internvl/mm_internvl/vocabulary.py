"""Chat template and image tokens from a model's folder, and which parts of a conversation are learnt.

The model learns everything that it must generate after a prompt, up to and including the token that ends the
turn. Templates of reasoning models (Qwen3) omit thoughts of answers before the last question. Such a turn
without its thought is read but not learnt: after its prompt the model should have produced the thought first,
and the answer alone would teach it to skip thinking. A turn that never had a thought is learnt as rendered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from mm_core.errors import CheckpointError
from mm_core.tokenizer import open_tokenizer
from mm_internvl.data.rows import PLACEHOLDER, Medium, RowTurn
from mm_internvl.data.spans import THOUGHT_TAGS, Marks, Place, TurnContent
from mm_internvl.data.tiling import tokens_of_tile

_PICTURE_TOKENS = {
    "start_image": "<img>",
    "end_image": "</img>",
    "context_image": "<IMG_CONTEXT>",
    "video": "<video>",
}
NEEDED = ("start_image", "end_image", "context_image")
"""Names of the tokens before, after and in place of a picture."""


class Fault(Exception):
    """The error of a conversation; `Chat` adds its file and row."""

    def __init__(self, what: str, hint: str | None = None) -> None:
        super().__init__(what)
        self.hint = hint


class Vocabulary:
    """The tokenizer of an InternVL folder, with its chat template and image tokens.

    Args:
        folder: folder of the model.

    Raises:
        CheckpointError: the folder has no tokenizer, no chat template, or no tokens for images.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.tokenizer = open_tokenizer(folder)
        if not self.tokenizer.chat_template:
            raise CheckpointError(
                "the tokenizer has no chat template",
                where=folder,
                accepted="chat_template.jinja, or `chat_template` in tokenizer_config.json",
                hint="use the folder of a model trained for conversations, or copy its chat template",
            )
        self.names = {
            name: str(getattr(self.tokenizer, f"{name}_token", None) or otherwise)
            for name, otherwise in _PICTURE_TOKENS.items()
        }
        ids = {name: self.tokenizer.convert_tokens_to_ids(self.names[name]) for name in NEEDED}
        if missing := [self.names[n] for n in NEEDED if ids[n] in (None, self.tokenizer.unk_token_id)]:
            raise CheckpointError(
                f"the tokenizer lacks {', '.join(missing)}, so it does not belong to an InternVL",
                where=folder,
                accepted="the folder of an InternVL model in Transformers' layout",
            )
        self.start, self.end, self.context = (int(ids[name]) for name in NEEDED)
        self.tile = tokens_of_tile(Path(folder))
        names = {*self.names.values(), "<image>", "<video>"}
        self.pictures = re.compile("|".join(re.escape(name) for name in sorted(names - self._around())))

    def _around(self) -> set[str]:
        return {self.names["start_image"], self.names["end_image"]}

    def kind_of(self, name: str) -> Medium:
        """Whether a placeholder in the chat template's text marks an image or a video."""
        return "video" if name in (self.names["video"], "<video>") else "image"

    @cached_property
    def structure(self) -> tuple[str, ...]:
        """Special tokens of the chat template or the model, which a conversation's text must not contain."""
        text = self.rendered([{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}])
        ends = {self.tokenizer.eos_token, self.tokenizer.pad_token, self.tokenizer.bos_token}
        special = [token for token in self.tokenizer.all_special_tokens if token in text or token in ends]
        free = {*THOUGHT_TAGS}  # allowed, also in folders that make them special tokens
        return (*(t for t in special if t not in free), *self._around(), self.names["context_image"])

    def rendered(self, messages: Sequence[Mapping[str, Any]], prompt: bool = False) -> str:
        """Renders messages with the chat template.

        Args:
            messages: messages in the template's format.
            prompt: whether to add the head of the assistant's next turn.

        Raises:
            Fault: the template refuses the messages.
        """
        import jinja2  # a dependency of Transformers, which renders the template

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt
            )
        except (jinja2.TemplateError, TypeError) as fault:
            raise Fault(f"the chat template refuses the conversation: {fault}") from fault
        assert isinstance(text, str)
        return text

    def spans(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[int, int]], str]:
        """Spans [start, end) in characters of the parts of a conversation to learn, and its rendered text.

        Raises:
            Fault: the chat template changes the assistant's turns, or omits all of their thoughts.
        """
        text = self.rendered(messages)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        marks = Marks(text, [TurnContent.of(messages[number]["content"]) for number in turns])
        marked = list(messages)
        for turn, number in enumerate(turns):
            marked[number] = {**messages[number], "content": marks.content(turn)}
        places = marks.places(self.rendered(marked))
        if places is None:
            raise Fault(
                "the chat template changes a text of the assistant, omits it or repeats it",
                "put a thought before its answer, between <think> and </think>; or use another template",
            )
        shown = [place for place in places if place is not None]
        if turns and not shown:
            raise Fault(
                "the chat template omits the thoughts of all assistant turns, so nothing is left to learn",
                "end the row with an answer, whose thought the template keeps; or use another template",
            )
        return [self._learnt(place) for place in shown], text

    def _learnt(self, place: Place) -> tuple[int, int]:
        start = place.start
        # The head may open a thought, or forbid one with an empty thought; a turn need not contain that part.
        for head in (self.head, self.head.partition(THOUGHT_TAGS[0])[0]):
            if head and head in place.before:
                # The model must also generate the template's text between the head and the words.
                start -= len(place.before) - place.before.rfind(head) - len(head)
                break
        else:
            start -= len(place.opening) if place.before.endswith(place.opening) else 0
        return start, place.end + self._ending(place.behind)

    @cached_property
    def head(self) -> str:
        """Text that the chat template adds for generation: the head of the assistant's turn; "" if it adds
        none."""
        asked = [{"role": "user", "content": "u"}]
        bare, prompted = self.rendered(asked), self.rendered(asked, prompt=True)
        return prompted[len(bare) :] if prompted.startswith(bare) else ""

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the chat template renders a content that is a list of parts (Qwen3's own template does
        not)."""
        asked = [{"role": "user", "content": [{"type": "text", "text": "\ue000"}]}]
        try:
            return "\ue000" in self.rendered(asked)
        except Fault:
            return False

    def _ending(self, behind: str) -> int:
        """Number of characters through the token that ends a turn, if only white space precedes it; else
        0."""
        gap = len(behind) - len(behind.lstrip())
        begins = [token for token in self.tokenizer.all_special_tokens if behind.startswith(token, gap)]
        token = max(begins, key=len, default="")
        return 0 if not token or self.head.lstrip().startswith(token) else gap + len(token)


def message_of(turn: RowTurn, known: Vocabulary) -> dict[str, Any]:
    """Converts a turn of a conversation to a message for the chat template, with tokens in place of
    placeholders."""
    names = {"image": known.names["context_image"], "video": known.names["video"]}

    def placed(text: str) -> str:
        return PLACEHOLDER.sub(lambda match: names[match[1]], text)

    if isinstance(turn.content, str):
        return {"role": turn.role, "content": placed(turn.content)}
    parts = [
        {"type": "text", "text": placed(part["text"])} if part["type"] == "text" else {"type": part["type"]}
        for part in turn.content
    ]
    if not known.takes_parts:  # the same text that other templates render for parts
        texts = (part["text"] if part["type"] == "text" else f"{names[part['type']]}\n" for part in parts)
        return {"role": turn.role, "content": "".join(texts)}
    return {"role": turn.role, "content": parts}
