"""A model's chat template, and which parts of the text that it renders are learnt.

The model learns everything that it must generate after a prompt, up to and including the token that ends the
turn. Templates of reasoning models (Qwen3) omit thoughts of answers before the last question. Such a turn
without its thought is read but not learnt: after its prompt the model should have produced the thought first,
and the answer alone would teach it to skip thinking. A turn that never had a thought is learnt as rendered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mm_core.errors import CheckpointError
from mm_core.tasks.conversations.placed import Learnt
from mm_core.tasks.conversations.spans import THOUGHT_TAGS, Marks, Place, TurnContent, unused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
"""Turns in the format of chat templates."""


class Fault(Exception):
    """The error of a conversation; its dataset adds file and row."""

    def __init__(self, what: str, hint: str | None = None) -> None:
        super().__init__(what)
        self.hint = hint


class ChatTemplate:
    """Renders conversations, and finds what is learnt of them.

    Args:
        tokenizer: of the model.
        folder: of the model, for errors.
        template: in Jinja; None: the tokenizer's.
        own: further tokens of the model that a conversation's text must not contain.

    Raises:
        CheckpointError: the folder has no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        folder: str,
        template: str | None = None,
        own: Collection[str] = (),
    ) -> None:
        self.tokenizer, self._template, self._own = tokenizer, template, tuple(own)
        if not (template or tokenizer.chat_template):
            raise CheckpointError(
                "the tokenizer has no chat template",
                where=folder,
                accepted="chat_template.jinja, or `chat_template` in tokenizer_config.json",
                hint="use the folder of a model trained for conversations, or copy its chat template",
            )

    @cached_property
    def _special(self) -> tuple[str, ...]:
        """Special tokens, also those that the tokenizer knows by no name, such as the end of a turn."""
        added = self.tokenizer.added_tokens_decoder.values()
        return tuple(
            dict.fromkeys([*self.tokenizer.all_special_tokens, *(str(t) for t in added if t.special)])
        )

    @cached_property
    def structure(self) -> tuple[str, ...]:
        """Special tokens of the chat template or the model, which a conversation's text must not contain."""
        text = self.rendered([self.plain("user", "u"), self.plain("assistant", "a")])
        ends = {self.tokenizer.eos_token, self.tokenizer.pad_token, self.tokenizer.bos_token}
        special = [token for token in self._special if token in text or token in ends]
        free = {*THOUGHT_TAGS}  # allowed, also in folders that make them special tokens
        return (*(t for t in special if t not in free), *self._own)

    def plain(self, role: str, text: str) -> dict[str, Any]:
        """A message of text alone."""
        return {"role": role, "content": [{"type": "text", "text": text}] if self.takes_parts else text}

    def rendered(self, messages: Messages, prompt: bool = False, tools: Sequence[Any] | None = None) -> str:
        """Renders messages with the chat template.

        Args:
            messages: messages in the template's format.
            prompt: whether to add the head of the assistant's next turn.
            tools: declarations of tools.

        Raises:
            Fault: the template refuses the messages.
        """
        import jinja2  # a dependency of Transformers, which renders the template

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as fault:
            raise Fault(f"the chat template refuses the conversation: {fault}") from fault
        assert isinstance(text, str)
        return text

    def spans(
        self, messages: Messages, tools: Sequence[Any] | None = None, weights: Sequence[float] = ()
    ) -> tuple[list[Learnt], str]:
        """The parts of a conversation to learn, in characters, and its rendered text.

        Args:
            messages: messages in the template's format.
            tools: declarations of tools.
            weights: for each message, that of its loss if it is the assistant's; (): 1.

        Raises:
            Fault: the chat template changes the assistant's turns, or omits all of their thoughts.
        """
        text = self.rendered(messages, tools=tools)
        weights = weights or [1.0] * len(messages)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        calls = [number for number in turns if messages[number].get("tool_calls")]
        spoken = [number for number in turns if number not in calls]
        marks = Marks(text, [TurnContent.of(text_of(messages[number])) for number in spoken])
        marked = list(messages)
        for turn, number in enumerate(spoken):
            marked[number] = _saying(messages[number], marks.content(turn))
        places = marks.places(self.rendered(marked, tools=tools))
        if places is None:
            raise Fault(
                "the chat template changes a text of the assistant, omits it or repeats it",
                "put a thought before its answer, between <think> and </think>; or use another template",
            )
        found = {n: self._learnt(place) for n, place in zip(spoken, places, strict=True) if place is not None}
        called = {number: self._called(messages, number, text, tools) for number in calls}
        found |= {number: span for number, span in called.items() if span is not None}
        if turns and not found:
            raise Fault(
                "the chat template omits the thoughts of all assistant turns, so nothing is left to learn",
                "end the row with an answer, whose thought the template keeps; or use another template",
            )
        return [(*found[number], weights[number]) for number in sorted(found) if weights[number]], text

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

    def _called(
        self, messages: Messages, number: int, text: str, tools: Sequence[Any] | None
    ) -> tuple[int, int] | None:
        """The span of a turn that calls tools: what stands where a mark alone would; None if the template
        omits its thought."""
        turn = messages[number]
        content, mark = TurnContent.of(text_of(turn)), unused(text)
        *thought, answer = content.words
        bare = _saying({**turn, "tool_calls": None}, content.marked([*thought, mark]))
        marked = self.rendered([*messages[:number], bare, *messages[number + 1 :]], tools=tools)
        before, _, behind = marked.partition(mark)
        start, end = self._learnt(Place(len(before), len(text) - len(behind), "", before, behind))
        shown = text[start:end]
        parts = [answer.strip(), *(call["function"]["name"] for call in turn["tool_calls"])]
        if not (text.startswith(before) and text.endswith(behind) and all(part in shown for part in parts)):
            raise Fault(
                f"the chat template omits or rewrites the tool calls of turn {number + 1}",
                "use a template with tools, or remove the turn",
            )
        return (start, end) if all(part.strip() in before[start:] for part in thought) else None

    @cached_property
    def head(self) -> str:
        """Text that the chat template adds for generation: the head of the assistant's turn; "" if it adds
        none."""
        asked = [self.plain("user", "u")]
        bare, prompted = self.rendered(asked), self.rendered(asked, prompt=True)
        return prompted[len(bare) :] if prompted.startswith(bare) else ""

    @cached_property
    def head_differs(self) -> bool:
        """Whether an answer follows another head in a training row than in a prompt."""
        try:
            asked = [self.plain("user", "u")]
            answered = self.rendered([*asked, self.plain("assistant", "\ue000")])
            heads = (self.head, self.head.partition(THOUGHT_TAGS[0])[0])
        except Fault:  # each row reports it
            return False
        before = answered.partition("\ue000")[0]
        ends = (before.rfind(head) + len(head) for head in heads if head in before)
        if (end := next(ends, None)) is None:
            return bool(self.head)
        # The last token of the prompt may be another one in the row: a line break before an empty thought.
        prompt, row = self.tokenizer([before[:end], answered], add_special_tokens=False)["input_ids"]
        return bool(row[: len(prompt)] != prompt)

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the chat template renders a content that is a list of parts (Qwen3's own template does
        not)."""
        asked = [{"role": "user", "content": [{"type": "text", "text": "\ue000"}]}]
        try:
            return "\ue000" in self.rendered(asked)
        except Fault:
            self.rendered([{"role": "user", "content": "u"}])  # raises the error of a template without any
            return False

    def _ending(self, behind: str) -> int:
        """Number of characters through the token that ends a turn, if only white space precedes it; else
        0."""
        gap = len(behind) - len(behind.lstrip())
        begins = [token for token in self._special if behind.startswith(token, gap)]
        token = max(begins, key=len, default="")
        return 0 if not token or self.head.lstrip().startswith(token) else gap + len(token)


def _saying(message: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    """The message with another text: a template may render a text otherwise than a list of parts."""
    whole = isinstance(message["content"], str)
    return {**message, "content": text if whole else [{"type": "text", "text": text}]}


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message of the assistant."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
