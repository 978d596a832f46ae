"""Protocols of answers in words: how a dataset lays out a conversation, and how a task answers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

OnText = Callable[[str], None]
"""Callback that receives each piece of an answer as soon as it is generated; joined, they are the answer."""


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation with a model."""

    role: Literal["system", "user", "assistant"]
    text: str
    images: tuple[Path, ...] = ()  # image files placed before the text


@dataclass(frozen=True)
class Question:
    """A question to a model, from a row of a file.

    Attributes:
        id: name of the row for reports.
        text: the text of the question.
        inputs: the model's inputs, as from `Conversing.prompt`.
        references: right answers; () if the row has none.
    """

    id: str
    text: str
    inputs: Mapping[str, Tensor]
    references: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decoding:
    """How the tokens of an answer are sampled.

    Attributes:
        max_new_tokens: most tokens per answer; None: as the task sets it.
        temperature: sampling temperature; 0 always takes the most likely token.
        top_p: sample from the most likely tokens whose probabilities sum to this value.
        seed: answer i is drawn from (seed, i).
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class Conversing(Protocol):
    """Turns conversations into model inputs, laid out like the dataset's rows."""

    def prompt(self, turns: Sequence[Turn]) -> Mapping[str, Tensor]:
        """The model inputs of a conversation whose next turn is the assistant's, as a batch of one.

        The names are the argument names of the model's `forward`. They are the same for every conversation,
        and so are the modules that run.

        Raises:
            DataError: the conversation cannot be laid out, or a file cannot be read.
        """

    def questions(self, file: Path) -> Sequence[Callable[[], Question]]:
        """The questions in a file in the dataset's format; each function reads its row when called.

        Raises:
            DataError: the file cannot be read. For a row that cannot be read, its function raises it.
        """


@runtime_checkable
class GivesBoxes(Protocol):
    """Capability of a `Conversing` whose model writes boxes and points on images."""

    def boxes(self, turns: Sequence[Turn], answer: str) -> Mapping[Path, Sequence[tuple[float, ...]]]:
        """The boxes (x1, y1, x2, y2) and points (x, y) in an answer, by image file, in its pixels.

        Args:
            turns: the conversation before the answer.
            answer: the text that the model wrote.
        """


@runtime_checkable
class SupportsConversing(Protocol):
    """Capability of a dataset class that lays out questions for its model, without reading its rows."""

    @classmethod
    def conversing(cls, **fields: Any) -> Conversing:
        """Creates what turns conversations into model inputs for this dataset class.

        Args:
            fields: the fields that the class is called with.

        Raises:
            ContractError: with these fields the dataset cannot lay out questions.
        """


@runtime_checkable
class SupportsAnswer(Protocol):
    """Capability of a task that answers in words instead of making clips."""

    def check_answers(self) -> None:
        """Checks that the task's model can generate text, before any weights are read.

        Raises:
            ContractError: it cannot.
        """

    def check_question(self, question: Mapping[str, Tensor]) -> None:
        """Checks that the task's model can answer a question, given as a batch of one.

        Raises:
            DataError: it cannot, e.g. because the question is too long.
        """

    def answer(
        self,
        questions: Sequence[Mapping[str, Tensor]],
        decoding: Decoding,
        numbers: Sequence[int],
        on_text: OnText | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> list[str]:
        """Generates the answers to questions.

        Called under no_grad with all modules on the device, and by all ranks at once when they share the
        model. Other questions, here or on another rank, must not change the answer to a question.

        Args:
            questions: the questions, each a batch of one.
            decoding: how tokens are sampled.
            numbers: the number of each question, which seeds its sampling.
            on_text: receives the pieces of the first answer.
            stopped: called after each token; when it returns true, generation stops on all ranks.
        """
