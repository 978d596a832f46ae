"""Text answers from a stored run. A single process holds the complete model; several ranks shard it as in
training, and share the rows of a file. Prompts of a conversation are read by the first rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from mm_core.checkpoint.reading import StoredRun, Weights, Which, stored_run
from mm_core.contracts import (
    Conversing,
    DataRanks,
    Decoding,
    OnText,
    Question,
    SupportsAnswer,
    SupportsConversing,
    Turn,
)
from mm_core.errors import ContractError, DataError, MMError, PeerError, plural
from mm_core.inference.sample import among_ranks, load_as_rank
from mm_core.plan import build_task
from mm_core.plugin.registry import Registry
from mm_core.runtime.launch.rank_process import out_of_memory
from mm_core.runtime.ranks import Ranks
from mm_core.schema.fields import ComponentConfig

T = TypeVar("T")
Inputs = Mapping[str, Tensor]

_ANSWER, _DONE, _FAILED = "answer", "done", "failed"
"""Messages of the first rank to the others: take part in an answer; the work is done; it has failed."""

_POOL = 4
"""Batches that a rank reads at a time, to group rows of similar length."""


@dataclass(frozen=True)
class Answer:
    """The answer of a stored run to one row of a file.

    Attributes:
        row: number of the row.
        id: its position in the file.
        prompt: the row's prompt.
        text: the answer.
        references: correct answers, if the row contains them.
        error: the reason why the row has no answer.
    """

    row: int
    id: str = ""
    prompt: str = ""
    text: str = ""
    references: tuple[str, ...] = ()
    error: str | None = None

    def to_mapping(self) -> dict[str, object]:
        """The answer as a mapping for JSON; only the error for a row without an answer."""
        if self.error is not None:
            return {"row": self.row, "error": self.error}
        found: dict[str, object] = {"row": self.row, "id": self.id, "prompt": self.prompt, "text": self.text}
        return {**found, "references": [*self.references]} if self.references else found


@dataclass
class AnswerSession:
    """An opened stored run that answers prompts. All ranks call `rows` and `run_on_first_rank` together."""

    task: SupportsAnswer
    conversing: Conversing
    device: torch.device
    ranks: Ranks
    data_ranks: DataRanks = field(default_factory=DataRanks)
    _answering: bool = field(default=False, init=False)

    # -- one conversation ----------------------------------------------------------------------

    def answer(
        self,
        turns: Sequence[Turn],
        decoding: Decoding,
        number: int = 0,
        on_text: OnText | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> str:
        """Answers the last turn of a conversation; on several ranks, call it only in `run_on_first_rank`.

        Args:
            turns: the conversation.
            decoding: temperature, top_p, seed and length.
            number: of the answer, which seeds its draws.
            on_text: receives each new piece of the answer.
            stopped: called after each token; True ends the answer.

        Raises:
            DataError: the conversation does not fit the model or the data format.
        """
        _check_text(turns)
        inputs = self.conversing.prompt(turns)
        self.task.check_question(inputs)
        self._answering = True
        self.ranks.from_first((_ANSWER, None))
        (text,) = self._answer([inputs], decoding, [number], on_text, stopped)
        self._answering = False
        return text

    def run_on_first_rank(self, work: Callable[[], T]) -> T:
        """Runs work that answers prompts on the first rank, while other ranks take part in each `answer`.

        A collective call; returns the first rank's result on every rank.

        Args:
            work: called on the first rank.

        Raises:
            PeerError: on the other ranks, if the work fails; the first rank raises the error itself.
        """
        if self.ranks.rank:
            return cast(T, self._follow())
        try:
            given = work()
        except BaseException:
            if not self._answering:  # otherwise the other ranks are in a forward, and receive no message
                self.ranks.from_first((_FAILED, None))
            raise
        self.ranks.from_first((_DONE, given))
        return given

    def _follow(self) -> Any:
        while True:
            kind, given = self.ranks.from_first((_FAILED, None))
            if kind == _DONE:
                return given
            if kind == _FAILED:
                raise PeerError("the first rank has failed")
            self._idle_generation()

    def _idle_generation(self) -> None:
        """Takes part in the answers of other ranks: forwards of a sharded model need every rank."""
        if self.ranks.count > 1:
            self._answer([self.conversing.prompt([Turn("user", "?")])], Decoding(max_new_tokens=1), [0])

    # -- rows of a file ------------------------------------------------------------------------

    def rows(self, file: Path, decoding: Decoding, batch_size: int = 1) -> Iterator[Answer]:
        """Answers the rows of a file, in order; a collective call, which yields on the first rank only.

        A row that cannot be read or answered yields an answer with the error.

        Args:
            file: of rows in the format of the run's dataset.
            decoding: temperature, top_p, seed and length.
            batch_size: rows of similar length that a rank answers together; it changes answers only by
                rounding.

        Raises:
            DataError: the file has no rows, or cannot be read.
        """
        questions = self.conversing.questions(file)
        if not questions:
            raise DataError(
                "the file has no rows, so there is nothing to answer",
                where=str(file),
                hint="add rows in the format of the run's dataset, or use --prompt",
            )
        shares = self.data_ranks
        pool = shares.count * batch_size * (_POOL if batch_size > 1 else 1)
        for first in range(0, len(questions), pool):
            numbers = range(first, min(first + pool, len(questions)))
            rounds = math.ceil(len(numbers) / (shares.count * batch_size))
            mine = self._share(questions, numbers[shares.rank :: shares.count], decoding, batch_size, rounds)
            everyone = self.ranks.gather_first(mine if shares.leads else [])
            found = [answer for answers in everyone for answer in answers]
            yield from sorted(found, key=lambda answer: answer.row)

    def _share(
        self,
        questions: Sequence[Callable[[], Question]],
        numbers: Sequence[int],
        decoding: Decoding,
        size: int,
        rounds: int,
    ) -> list[Answer]:
        """The answers to this rank's rows, in `rounds` generations, the same number as on other ranks."""
        answers: list[Answer] = []
        read: list[tuple[int, Question]] = []
        for number in numbers:
            try:
                question = questions[number]()
                self.task.check_question(question.inputs)
                read.append((number, question))
            except DataError as fault:
                answers.append(Answer(number, error=str(fault)))
        read.sort(key=lambda each: each[1].inputs["input_ids"].shape[1])
        for first in range(0, rounds * size, size):
            if not (batch := read[first : first + size]):
                self._idle_generation()
                continue
            texts = self._answer(
                [each.inputs for _, each in batch], decoding, [number for number, _ in batch]
            )
            answers += [
                Answer(number, each.id, each.text, text, each.references)
                for (number, each), text in zip(batch, texts, strict=True)
            ]
        return answers

    # -- the model -----------------------------------------------------------------------------

    def _answer(
        self,
        questions: Sequence[Inputs],
        decoding: Decoding,
        numbers: Sequence[int],
        on_text: OnText | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> list[str]:
        moved = [{name: tensor.to(self.device) for name, tensor in each.items()} for each in questions]
        try:
            return self.task.answer(moved, decoding, numbers, on_text, stopped)
        except (RuntimeError, MemoryError) as fault:
            if (report := out_of_memory(fault)) is None:
                raise
            tokens = sum(each["input_ids"].numel() for each in questions)
            raise MMError(
                report.what,
                where=f"{plural(len(questions), 'prompt')} with {plural(tokens, 'token')} in total",
                hint="use a smaller --batch-size, fewer image tiles, or more ranks (--nproc)",
            ) from fault


@contextmanager
def answer_session(
    run: str | Path | StoredRun,
    *,
    weights: Weights = "auto",
    checkpoint: Which = "latest",
    overrides: Sequence[str] = (),
    patient: bool = False,
    allow_code: bool = False,
) -> Iterator[AnswerSession]:
    """A context with a stored run opened to answer prompts; call it on each rank that was launched.

    Args:
        run: a run's folder, `DIR@STEP`, or one of its checkpoints.
        weights: `ema`, `model`, or `auto`: the average if the checkpoint contains one.
        checkpoint: `latest` or `best` complete checkpoint.
        overrides: `key.path=value` to override the run's config, for example paths of moved folders.
        patient: whether ranks wait for the first one without a timeout, for a person at a prompt.
        allow_code: whether code named by the run may be executed if this user has not trained with it.

    Raises:
        MMError: no checkpoint, a task that generates no text, or a dataset without a format for prompts.
    """
    stored = stored_run(run, checkpoint, overrides, allow_code)
    source, config = stored.checkpoint, stored.config
    check_words(config.registry, config.task)
    conversing = conversing_of(config.registry, config.data.train)
    with among_ranks(patient) as ranks:
        task = build_task(config, source.adapters)
        assert isinstance(task, SupportsAnswer)
        task.check_answers()
        engine = load_as_rank(task, config, ranks, source, weights)
        with engine.evaluating():
            yield AnswerSession(task, conversing, engine.device, ranks, engine.data_ranks)


def answer(
    run: str | Path,
    prompt: str,
    *,
    images: Sequence[str | Path] = (),
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    on_text: OnText | None = None,
    weights: Weights = "auto",
    checkpoint: Which = "latest",
    overrides: Sequence[str] = (),
    allow_code: bool = False,
) -> str:
    """Answers one prompt, with optional images, by the model of a stored run; see `answer_session` for more.

    Args:
        run: a run's folder, `DIR@STEP`, or one of its checkpoints.
        prompt: the text.
        images: files of images before the prompt.
        max_new_tokens: maximum length of the answer; None takes the task's value, else 512.
        temperature: 0 always takes the most likely token.
        top_p: tokens are drawn from the most likely ones with this total probability.
        seed: of the draws.
        on_text: receives each new piece of the answer.
        weights: see `answer_session`.
        checkpoint: see `answer_session`.
        overrides: see `answer_session`.
        allow_code: see `answer_session`.

    Raises:
        MMError: see `answer_session`; or the prompt does not fit the model.
    """
    decoding = checked(Decoding(max_new_tokens, temperature, top_p, seed))
    with answer_session(
        run, weights=weights, checkpoint=checkpoint, overrides=overrides, allow_code=allow_code
    ) as opened:
        turns = [Turn("user", prompt, tuple(map(Path, images)))]
        return opened.run_on_first_rank(lambda: opened.answer(turns, decoding, on_text=on_text))


def _check_text(turns: Sequence[Turn]) -> None:
    """DataError for input of a terminal or a pipe that is not text: no tokenizer accepts it."""
    for turn in turns:
        try:
            turn.text.encode()
        except UnicodeEncodeError as fault:
            raise DataError(
                f"the {'prompt' if turn.role == 'user' else turn.role + ' text'} is not valid UTF-8 "
                f"(character {fault.start + 1})",
                where=turn.text.encode(errors="backslashreplace").decode(),
                hint="type the text again, or set the terminal or the file to UTF-8",
            ) from None


def checked(decoding: Decoding) -> Decoding:
    """Checks the decoding settings of an answer, and returns them.

    Raises:
        MMError: a value is out of range.
    """
    ranges = {
        "max_new_tokens": (decoding.max_new_tokens is None or decoding.max_new_tokens >= 1, "1 or more"),
        "temperature": (0 <= decoding.temperature < float("inf"), "0 (greedy) or more"),
        "top_p": (0 < decoding.top_p <= 1, "more than 0, at most 1"),
    }
    for name, (right, accepted) in ranges.items():
        if not right:
            raise MMError(f"{name} is {getattr(decoding, name)}", where=f"decoding.{name}", accepted=accepted)
    return decoding


def makes_words(registry: Registry, task: ComponentConfig) -> bool:
    """Whether the task of a stored run answers prompts with text, judged by its class."""
    target = registry.resolve("task", task.type).load_target()
    return isinstance(target, type) and issubclass(target, SupportsAnswer)


def check_words(registry: Registry, task: ComponentConfig) -> None:
    """Checks that the task of a stored run answers prompts with text.

    Raises:
        ContractError: it does not.
    """
    if not makes_words(registry, task):
        raise ContractError(
            f"the task {task.type} does not answer prompts with text",
            where="task.type",
            accepted="a task that does, such as pretrained",
            hint="use `mm sample` for runs that generate clips",
        )


def conversing_of(registry: Registry, dataset: ComponentConfig) -> Conversing:
    """The prompt format of a stored run: that of the dataset it was trained on.

    Raises:
        ContractError: the dataset has no format for prompts.
    """
    target, fields = registry.target_of(dataset)
    if not isinstance(target, SupportsConversing):
        raise ContractError(
            f"the run was trained on {dataset.type}, which has no format for prompts",
            where="data.train.type",
            accepted="a dataset whose class has `conversing`, such as text_rows",
            hint="answer prompts with a run that was trained on such a dataset",
        )
    return target.conversing(**fields)
