"""Protocols of answers in words: what a dataset makes of a conversation, and what a task answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

OnText = Callable[[str], None]
"""Is told each piece of an answer as soon as it is there; the pieces joined are the answer."""


@dataclass(frozen=True)
class Turn:
    """What one side says. images: files that are shown before the text."""

    role: Literal["system", "user", "assistant"]
    text: str
    images: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Question:
    """A row of a file that asks something.

    id: what a person would call it. text: what is asked. inputs: as `Conversing.prompt`. references: answers
    that would be right; () where the row holds none.
    """

    id: str
    text: str
    inputs: Mapping[str, Tensor]
    references: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decoding:
    """How an answer is made. max_new_tokens: at most; None leaves it to the task. temperature: 0 takes the
    likeliest token each time. top_p: of the likeliest tokens, the share of probability that is drawn from.
    seed: answer i is drawn from (seed, i)."""

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class Conversing(Protocol):
    """Makes of conversations what a model generates from, as the dataset lays out its rows."""

    def prompt(self, turns: Sequence[Turn]) -> Mapping[str, Tensor]:
        """Inputs by the names that the model's `forward` has for them, a batch of one, of a conversation
        whose next turn is the assistant's. They have the same names, and run the same modules, for every
        conversation. DataError for one that cannot be laid out, or a file that cannot be read."""

    def questions(self, file: Path) -> Sequence[Callable[[], Question]]:
        """The rows of a file in the dataset's own style, each read when it is called: DataError for a row
        that cannot be, and at once for a file."""


@runtime_checkable
class SupportsConversing(Protocol):
    """A dataset whose model can be asked, without the rows that it was trained on."""

    @classmethod
    def conversing(cls, **fields: Any) -> Conversing:
        """fields: those that the class is called with. ContractError where they lay out no questions."""


@runtime_checkable
class SupportsAnswer(Protocol):
    """A task that answers in words, where others make clips."""

    def check_answers(self) -> None:
        """ContractError, before any weights are read, for a model that generates no text."""

    def check_question(self, question: Mapping[str, Tensor]) -> None:
        """DataError for a question, a batch of one, that the model cannot answer: it is too long, say."""

    def answer(
        self,
        questions: Sequence[Mapping[str, Tensor]],
        decoding: Decoding,
        numbers: Sequence[int],
        on_text: OnText | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> list[str]:
        """The answers to questions, each a batch of one, which have these numbers. Called under no_grad with
        all modules on the device, by all ranks at once where several share the model. What is asked beside a
        question, here or on another rank, changes nothing of its answer.

        on_text: is told the answer to the first. stopped: asked after each token; once it says true, the
        answers end here, and no rank goes on alone.
        """
