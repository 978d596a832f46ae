"""Finds the assistant's words in the text that a chat template produces.

The template renders the conversation twice: unchanged, and with a mark in place of each text of the
assistant. The text between the marks comes from the template. It must be the same around the real words, so
a template that rewrites a turn is detected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

_OPEN, _CLOSE = "<think>", "</think>"
THOUGHT_TAGS = (_OPEN, _CLOSE)
"""Tags around a thought: tokens of Qwen3, which the data may contain."""

_CHANGES: tuple[Callable[[str], str], ...] = (
    str,
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip("\n"),
    lambda text: text.strip("\n"),
    str.lstrip,
    str.rstrip,
    str.strip,
)
"""Changes that templates make to a text: they strip white space."""


@dataclass(frozen=True)
class TurnContent:
    """The content of an assistant's turn, split into words and the text around them.

    The content is around[0] + words[0] + around[1] + words[1] + ... + around[-1].

    Attributes:
        around: tags and white space around the words.
        words: a thought and an answer, or the complete content.
    """

    around: tuple[str, ...]
    words: tuple[str, ...]

    @classmethod
    def of(cls, content: str) -> TurnContent:
        """Splits the content of an assistant's turn into thought and answer. A thought is the text before the
        only `</think>`, with or without `<think>`; white space alone is not a thought."""
        before, closed, answer = content.partition(_CLOSE)
        blank, opened, thought = before.rpartition(_OPEN)
        if not closed or blank.strip() or any(tag in blank + answer for tag in THOUGHT_TAGS):
            return cls(("", ""), (content,))
        if not thought.strip():
            return cls((before + closed, ""), (answer,))
        return cls((blank + opened, closed, ""), (thought, answer))

    def marked(self, marks: Sequence[str]) -> str:
        """The content of the assistant's turn, with marks in place of its words."""
        return "".join(chain(*zip_longest(self.around, marks, fillvalue="")))


@dataclass(frozen=True)
class Place:
    """Position of an assistant's turn in the template's text.

    Attributes:
        start: first character of its words.
        end: end of its words.
        opening: text of the turn itself before its words.
        before: text before the words, back to the words of the previous turn.
        behind: text after the words, up to the words of the next turn.
    """

    start: int
    end: int
    opening: str
    before: str
    behind: str


def unused(text: str) -> str:
    """A character that is not in a text."""
    return next(mark for mark in map(chr, range(0xE000, 0x110000)) if mark not in text)


class Marks:
    """Marks that replace the words of the assistant's turns and occur nowhere else in the text.

    Args:
        text: the conversation, rendered by the template.
        turns: contents of the assistant's turns.
    """

    def __init__(self, text: str, turns: Sequence[TurnContent]) -> None:
        self._text, self._turns = text, turns
        self._edge = unused(text)
        self._shape = re.compile(f"{self._edge}([0-9]+)[.]([0-9]+){self._edge}")

    def content(self, turn: int) -> str:
        """Content of one of the assistant's turns, with marks in place of its words."""
        content = self._turns[turn]
        return content.marked([f"{self._edge}{turn}.{n}{self._edge}" for n in range(len(content.words))])

    def places(self, marked: str) -> list[Place | None] | None:
        """Positions of the assistant's turns in the template's text.

        Args:
            marked: the conversation with marks, rendered by the template.

        Returns:
            The position of each turn; None for a turn whose thought the template omits. None instead of the
            list if the template changes a turn in any other way, except for stripping white space.
        """
        found = [(int(match[1]), int(match[2])) for match in self._shape.finditer(marked)]
        around = self._shape.split(marked)[::3]  # without the numbers in the marks
        ends = self._ends(found, around)
        if ends is None:
            return None
        places: list[Place | None] = []
        for turn, content in enumerate(self._turns):
            numbers = [place for place, (of, _) in enumerate(found) if of == turn]
            shown = [found[place][1] for place in numbers]
            every = list(range(len(content.words)))
            if shown not in (every, every[-1:]):
                return None
            first, last = numbers[0], numbers[-1]
            whole = Place(ends[first][0], ends[last][1], content.around[0], around[first], around[last + 1])
            places.append(whole if shown == every else None)
        return places if found == sorted(found) else None

    def _ends(self, found: Sequence[tuple[int, int]], around: Sequence[str]) -> list[tuple[int, int]] | None:
        """[start, end) of the words of each mark; None if the text does not consist of these words and the
        template's parts."""
        if not self._text.startswith(around[0]):
            return None
        ends, place = [], len(around[0])
        for (turn, number), behind in zip(found, around[1:], strict=True):
            words = next(self._shown(self._turns[turn].words[number], place, behind), None)
            if words is None:
                return None
            ends.append((place, place + len(words)))
            place += len(words) + len(behind)
        return ends if place == len(self._text) else None

    def _shown(self, words: str, place: int, behind: str) -> Iterator[str]:
        for change in _CHANGES:
            if self._text.startswith(change(words) + behind, place):
                yield change(words)
