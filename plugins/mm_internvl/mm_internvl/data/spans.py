"""Where in a template's text the assistant speaks.

A template is shown the conversation twice: as it is, and with a mark in the place of each thing that the
assistant says. What stands between the marks is the template's own; that it is the same around the real words
is checked, so a template that rewrites a turn is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

_OPEN, _CLOSE = "<think>", "</think>"
THOUGHT_TAGS = (_OPEN, _CLOSE)
"""What a thought stands between; tokens of Qwen3's, which everybody may say."""

_CHANGES: tuple[Callable[[str], str], ...] = (
    str,
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip("\n"),
    lambda text: text.strip("\n"),
    str.lstrip,
    str.rstrip,
    str.strip,
)
"""What templates do to words: they take white space off."""


@dataclass(frozen=True)
class Said:
    """What the assistant says in a turn, in words and what is around them: a thought and an answer, or all
    in one. As it is written: around[0] + words[0] + around[1] + words[1] + ... + around[-1]."""

    around: tuple[str, ...]
    words: tuple[str, ...]

    @classmethod
    def of(cls, content: str) -> Said:
        """A thought is what stands before the one `</think>`, behind `<think>` or without; one of white space
        is none."""
        before, closed, answer = content.partition(_CLOSE)
        blank, opened, thought = before.rpartition(_OPEN)
        if not closed or blank.strip() or any(tag in blank + answer for tag in THOUGHT_TAGS):
            return cls(("", ""), (content,))
        if not thought.strip():
            return cls((before + closed, ""), (answer,))
        return cls((blank + opened, closed, ""), (thought, answer))

    def marked(self, marks: Sequence[str]) -> str:
        """The content with marks for words."""
        return "".join(chain(*zip_longest(self.around, marks, fillvalue="")))


@dataclass(frozen=True)
class Place:
    """Of a turn that the template shows whole: start, end of its words, in characters. opening: what the
    turn itself writes before them. before, behind: the text around them, up to the words of other turns."""

    start: int
    end: int
    opening: str
    before: str
    behind: str


class Marks:
    """Marks for the words of the assistant's turns, which stand nowhere in a text.

    Args:
        text: what the template makes of the conversation.
        turns: what the assistant says.
    """

    def __init__(self, text: str, turns: Sequence[Said]) -> None:
        self._text, self._turns = text, turns
        self._edge = next(mark for mark in map(chr, range(0xE000, 0x110000)) if mark not in text)
        self._shape = re.compile(f"{self._edge}([0-9]+)[.]([0-9]+){self._edge}")

    def content(self, turn: int) -> str:
        """A turn with marks for its words."""
        said = self._turns[turn]
        return said.marked([f"{self._edge}{turn}.{n}{self._edge}" for n in range(len(said.words))])

    def places(self, marked: str) -> list[Place | None] | None:
        """Where each turn stands in the text; None for one whose thought the template leaves out.

        marked: what the template makes of the marked conversation. None for all, where it does anything else
        to a turn than that, or than taking white space off its words.
        """
        found = [(int(match[1]), int(match[2])) for match in self._shape.finditer(marked)]
        around = self._shape.split(marked)[::3]  # without what the marks say
        ends = self._ends(found, around)
        if ends is None:
            return None
        places: list[Place | None] = []
        for turn, said in enumerate(self._turns):
            numbers = [place for place, (of, _) in enumerate(found) if of == turn]
            shown = [found[place][1] for place in numbers]
            every = list(range(len(said.words)))
            if shown not in (every, every[-1:]):
                return None
            first, last = numbers[0], numbers[-1]
            whole = Place(ends[first][0], ends[last][1], said.around[0], around[first], around[last + 1])
            places.append(whole if shown == every else None)
        return places if found == sorted(found) else None

    def _ends(self, found: Sequence[tuple[int, int]], around: Sequence[str]) -> list[tuple[int, int]] | None:
        """[start, end) of the words of each mark; None where the text is not these words between those
        parts of the template's own."""
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
