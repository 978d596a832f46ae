"""Answers in words from a trained run: one process holds all of the model; several share it as they do in
training. The rows of a file they share too; what one person asks, the first of them answers."""

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
from mm_core.config.sections import RunConfig
from mm_core.contracts import (
    Conversing,
    Decoding,
    OnText,
    Question,
    SupportsAnswer,
    SupportsConversing,
    Turn,
)
from mm_core.device import current_device
from mm_core.errors import ContractError, DataError, MMError, PeerError
from mm_core.inference.sample import among_ranks, load_as_rank
from mm_core.loading.run_adapters import task_of
from mm_core.runtime.launch.rank_process import out_of_memory
from mm_core.runtime.ranks import Ranks

T = TypeVar("T")
Inputs = Mapping[str, Tensor]

_SAY, _DONE, _FAILED = "say", "done", "failed"
"""What the first rank tells the others: take part in an answer; all is said; it has failed."""

_POOL = 4
"""Batches that a rank lays out before it puts rows of like length together."""


@dataclass(frozen=True)
class Answer:
    """What was said to a row of a file. error: why it could not be asked."""

    row: int
    id: str = ""
    prompt: str = ""
    text: str = ""
    references: tuple[str, ...] = ()
    error: str | None = None

    def to_mapping(self) -> dict[str, object]:
        """For JSON: of a row that could not be asked, the reason alone."""
        if self.error is not None:
            return {"row": self.row, "error": self.error}
        found: dict[str, object] = {"row": self.row, "id": self.id, "prompt": self.prompt, "text": self.text}
        return {**found, "references": [*self.references]} if self.references else found


@dataclass
class AnswerSession:
    """A run's model that answers. All ranks call `rows` and `led`."""

    task: SupportsAnswer
    conversing: Conversing
    device: torch.device
    ranks: Ranks
    _saying: bool = field(default=False, init=False)

    # -- one conversation ----------------------------------------------------------------------

    def say(
        self,
        turns: Sequence[Turn],
        decoding: Decoding,
        number: int = 0,
        on_text: OnText | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> str:
        """The assistant's next turn; among several ranks, called within `led` alone. DataError for a
        conversation that cannot be laid out, or answered.

        on_text: is told each piece of it as soon as it is there. stopped: asked after each token whether this
        is enough.
        """
        _check_text(turns)
        inputs = self.conversing.prompt(turns)
        self.task.check_question(inputs)
        self._saying = True
        self.ranks.from_first((_SAY, None))
        (text,) = self._answer([inputs], decoding, [number], on_text, stopped)
        self._saying = False
        return text

    def run_on_first_rank(self, work: Callable[[], T]) -> T:
        """What `work` gives on the first rank, on every rank. Meanwhile the others take part in each `say` of
        it. Where it fails, the first rank raises the fault and the others a PeerError."""
        if self.ranks.rank:
            return cast(T, self._follow())
        try:
            given = work()
        except BaseException:
            if not self._saying:  # else the others are in the midst of an answer, and hear nothing
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
        """Other ranks answer meanwhile, and hold a part of the model here: forwards go on until all end."""
        if self.ranks.count > 1:
            self._answer([self.conversing.prompt([Turn("user", "?")])], Decoding(max_new_tokens=1), [0])

    # -- rows of a file ------------------------------------------------------------------------

    def rows(self, file: Path, decoding: Decoding, batch_size: int = 1) -> Iterator[Answer]:
        """The answers to the rows of a file, in their order; among several ranks, on the first of them alone.
        A row that cannot be read, or answered, is there with the reason.

        batch_size: rows that a rank answers together, of like length. What they are answered does not depend
        on it, but for rounding.
        """
        questions = self.conversing.questions(file)
        if not questions:
            raise DataError("the file has no rows, so there is nothing to answer", where=str(file))
        count = self.ranks.count
        pool = count * batch_size * (_POOL if batch_size > 1 else 1)
        for first in range(0, len(questions), pool):
            numbers = range(first, min(first + pool, len(questions)))
            rounds = math.ceil(len(numbers) / (count * batch_size))
            mine = self._share(questions, numbers[self.ranks.rank :: count], decoding, batch_size, rounds)
            found = [answer for answers in self.ranks.gather_first(mine) for answer in answers]
            yield from sorted(found, key=lambda answer: answer.row)

    def _share(
        self,
        questions: Sequence[Callable[[], Question]],
        numbers: Sequence[int],
        decoding: Decoding,
        size: int,
        rounds: int,
    ) -> list[Answer]:
        """The answers to the rows of these numbers, in `rounds` generations: as many as on other ranks."""
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
            if (said := out_of_memory(fault)) is None:
                raise
            tokens = sum(each["input_ids"].numel() for each in questions)
            raise MMError(
                said.what,
                where=f"{len(questions)} prompt{'s' * (len(questions) != 1)} of {tokens} tokens in all",
                hint="a smaller --batch-size, fewer tiles, or more ranks (--nproc) that share the model",
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
    """Opens a run for questions, for the length of the block. Called as the rank that the environment names.

    Args:
        run: a run's folder, `DIR@STEP`, or one of its checkpoints.
        weights: `ema`, `model`, or `auto`: the average where the checkpoint holds one.
        checkpoint: `latest` or `best`, of the complete ones.
        overrides: `key.path=value` over the run's config: where folders are that have moved.
        patient: ranks wait for the first one as long as a person thinks.
        allow_code: code that the run names runs, also where this user has not trained with it.

    Raises:
        MMError: no checkpoint, a task that makes no text, a dataset that lays out no conversations.
    """
    stored = stored_run(run, checkpoint, overrides, allow_code)
    source, config = stored.checkpoint, stored.config
    check_words(config)
    conversing = conversing_of(config)
    with among_ranks(patient):
        task, ranks = task_of(config, source), Ranks.current()
        assert isinstance(task, SupportsAnswer)
        task.check_answers()
        with load_as_rank(task, config, source, weights).evaluating():
            yield AnswerSession(task, conversing, current_device(), ranks)


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
    """What a run's model says to a prompt, after these images. For several questions, `answer_session`.

    Args:
        images: files that are shown before the prompt.
        max_new_tokens: of the answer; None takes the task's own, else 512.
        temperature: 0 takes the likeliest token each time. top_p: of the likeliest tokens, the share of
            probability that is drawn from. seed: of what is drawn.
        on_text: is told each piece of the answer as soon as it is there.
        run, weights, checkpoint, overrides, allow_code: as of `answer_session`.
    """
    decoding = checked(Decoding(max_new_tokens, temperature, top_p, seed))
    with answer_session(
        run, weights=weights, checkpoint=checkpoint, overrides=overrides, allow_code=allow_code
    ) as opened:
        turns = [Turn("user", prompt, tuple(map(Path, images)))]
        return opened.run_on_first_rank(lambda: opened.say(turns, decoding, on_text=on_text))


def _check_text(turns: Sequence[Turn]) -> None:
    """DataError for what a terminal or a pipe gave that is no text: no tokenizer takes it."""
    for turn in turns:
        try:
            turn.text.encode()
        except UnicodeEncodeError as fault:
            raise DataError(
                f"what the {turn.role} says is not UTF-8 text (character {fault.start + 1})",
                where=turn.text.encode(errors="backslashreplace").decode(),
            ) from None


def checked(decoding: Decoding) -> Decoding:
    """The same. MMError for figures that make no answer."""
    ranges = {
        "max_new_tokens": (decoding.max_new_tokens is None or decoding.max_new_tokens >= 1, "1 or more"),
        "temperature": (0 <= decoding.temperature < float("inf"), "0, which is greedy, or more"),
        "top_p": (0 < decoding.top_p <= 1, "more than 0, up to 1"),
    }
    for name, (right, accepted) in ranges.items():
        if not right:
            raise MMError(f"{name} is {getattr(decoding, name)}", accepted=accepted)
    return decoding


def makes_words(config: RunConfig) -> bool:
    """Whether the run's task answers in words, seen from its class."""
    target = config.registry.resolve("task", config.task.type).load_target()
    return isinstance(target, type) and issubclass(target, SupportsAnswer)


def check_words(config: RunConfig) -> None:
    """ContractError for a run whose task makes no words."""
    if not makes_words(config):
        raise ContractError(
            f"the task {config.task.type} does not answer in words",
            where="task.type",
            accepted="a task that does: pretrained, say",
            hint="mm sample makes the clips of a run that makes clips",
        )


def conversing_of(config: RunConfig) -> Conversing:
    """What lays out questions as the rows that the run was trained on. ContractError where nothing does."""
    dataset = config.data.train
    target, fields = config.registry.target_of(dataset)
    if not isinstance(target, SupportsConversing):
        raise ContractError(
            f"the run was trained on {dataset.type}, which lays out no questions in words",
            where="data.train.type",
            accepted="a dataset whose class has `conversing`: text_rows, say",
        )
    return target.conversing(**fields)
