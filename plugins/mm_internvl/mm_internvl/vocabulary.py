"""What a model's folder says of conversations: its chat template, and the tokens that stand for pictures.

Learnt is what the model has to write after the prompt of a generation: from there to the token that ends the
turn, that one included. Templates of models that think (Qwen3's) show no thoughts of answers before the last
question, so that a model does not read them. A turn without its thought is read and not learnt: after its
prompt the model would have had to think first, and learning the answer there would teach it not to. A turn
that had no thought of its own is learnt as it is shown.
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
from mm_internvl.data.spans import THOUGHT_TAGS, Marks, Place, Said
from mm_internvl.data.tiling import tokens_of_tile

_PICTURE_TOKENS = {
    "start_image": "<img>",
    "end_image": "</img>",
    "context_image": "<IMG_CONTEXT>",
    "video": "<video>",
}
NEEDED = ("start_image", "end_image", "context_image")
"""Names of the tokens before, behind and in the place of a picture."""


class Fault(Exception):
    """What is wrong with a conversation; `Chat` adds where it stands."""

    def __init__(self, what: str, hint: str | None = None) -> None:
        super().__init__(what)
        self.hint = hint


class Vocabulary:
    """What is known of a folder's tokenizer: its template, and the tokens of images."""

    def __init__(self, folder: str) -> None:
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
        ids = {name: self.tokenizer.convert_tokens_to_ids(self.names[name]) for name in NEEDED}
        if missing := [self.names[n] for n in NEEDED if ids[n] in (None, self.tokenizer.unk_token_id)]:
            raise CheckpointError(
                f"the tokenizer knows no {', '.join(missing)}, so it is none of InternVL's",
                where=folder,
                accepted="the folder of an InternVL model in the layout of Transformers",
            )
        self.start, self.end, self.context = (int(ids[name]) for name in NEEDED)
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
        ends = {self.tokenizer.eos_token, self.tokenizer.pad_token, self.tokenizer.bos_token}
        special = [token for token in self.tokenizer.all_special_tokens if token in text or token in ends]
        free = {*THOUGHT_TAGS}  # tokens of their own where a folder makes them special
        return (*(t for t in special if t not in free), *self._around(), self.names["context_image"])

    def rendered(self, messages: Sequence[Mapping[str, Any]], prompt: bool = False) -> str:
        """What the chat template makes of messages; prompt: with the head of the assistant's next turn."""
        import jinja2  # with Transformers, where the template is rendered

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt
            )
        except (jinja2.TemplateError, TypeError) as fault:
            raise Fault(f"the chat template refuses the conversation: {fault}") from fault
        assert isinstance(text, str)
        return text

    def spans(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[int, int]], str]:
        """([start, end) in characters of each thing to learn, the conversation's text)."""
        text = self.rendered(messages)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        marks = Marks(text, [Said.of(messages[number]["content"]) for number in turns])
        marked = list(messages)
        for turn, number in enumerate(turns):
            marked[number] = {**messages[number], "content": marks.content(turn)}
        places = marks.places(self.rendered(marked))
        if places is None:
            raise Fault(
                "the chat template changes what the assistant says, or shows it more or less than once",
                "a thought stands before its answer, between <think> and </think>; else use another template",
            )
        shown = [place for place in places if place is not None]
        if turns and not shown:
            raise Fault(
                "the chat template leaves out the thought of everything that the assistant says",
                "end the row with an answer, whose thought a template keeps, or use another template",
            )
        return [self._learnt(place) for place in shown], text

    def _learnt(self, place: Place) -> tuple[int, int]:
        start = place.start
        # A turn may have no part in the thought that the head opens, or that it forbids by an empty one.
        for head in (self.head, self.head.partition(THOUGHT_TAGS[0])[0]):
            if head and head in place.before:
                # What the template puts between the head and the words, the model has to write as well.
                start -= len(place.before) - place.before.rfind(head) - len(head)
                break
        else:
            start -= len(place.opening) if place.before.endswith(place.opening) else 0
        return start, place.end + self._ending(place.behind)

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
        except Fault:
            return False

    def _ending(self, behind: str) -> int:
        """Characters up to and with the token that ends a turn, where only white space is before it."""
        gap = len(behind) - len(behind.lstrip())
        begins = [token for token in self.tokenizer.all_special_tokens if behind.startswith(token, gap)]
        token = max(begins, key=len, default="")
        return 0 if not token or self.head.lstrip().startswith(token) else gap + len(token)


def message_of(turn: RowTurn, known: Vocabulary) -> dict[str, Any]:
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
