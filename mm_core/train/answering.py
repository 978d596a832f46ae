"""Answers in words from a trained run: one process holds all of the model; several share it as they do in
training, and the rows of a file among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mm_core.config.load import load_config
from mm_core.config.schema import RunConfig
from mm_core.contracts import (
    AnswersInWords,
    Conversing,
    ConversingDataset,
    Decoding,
    Heard,
    Question,
    Turn,
)
from mm_core.device import current_device
from mm_core.errors import ContractError, DataError, MMError
from mm_core.plan import build_task
from mm_core.plugin.building import target_of
from mm_core.plugin.registry import get_registry
from mm_core.train.adapter_runs import adapters_in
from mm_core.train.agreement import Ranks
from mm_core.train.checkpoint_reading import checkpoint_at
from mm_core.train.sampling import Weights, Which, among_ranks, load_as_rank


@dataclass(frozen=True)
class Answer:
    """What was said to a row of a file. error: why it could not be asked."""

    row: int
    id: str = ""
    prompt: str = ""
    text: str = ""
    references: tuple[str, ...] = ()
    error: str | None = None

    def to_mapping(self) -> dict[str, Any]:
        """For JSON: of a row that could not be asked, the reason alone."""
        if self.error is not None:
            return {"row": self.row, "error": self.error}
        found: dict[str, Any] = {"row": self.row, "id": self.id, "prompt": self.prompt, "text": self.text}
        return {**found, "references": [*self.references]} if self.references else found


@dataclass
class Speaker:
    """A run's model that answers; all ranks call the same methods in the same order."""

    task: AnswersInWords
    conversing: Conversing
    device: torch.device
    ranks: Ranks

    def say(
        self, turns: Sequence[Turn], decoding: Decoding, number: int = 0, heard: Heard | None = None
    ) -> str:
        """The assistant's next turn. Several ranks work on it together, and each is told it.
        DataError for a conversation that can not be laid out."""
        return self._answer(self.conversing.prompt(turns), decoding, number, heard)

    def rows(self, file: Path, decoding: Decoding) -> Iterator[Answer]:
        """The answers to the rows of a file, in their order; among several ranks, on the first of them alone.
        A row that can not be read is there with the reason."""
        questions = self.conversing.questions(file)
        count = self.ranks.count
        for first in range(0, len(questions), count):
            number = first + self.ranks.rank
            mine = self._row(questions[number], number, decoding) if number < len(questions) else None
            if mine is None:
                self._fill(decoding)
            yield from (answer for answer in self.ranks.gather_first(mine) if answer is not None)

    def _row(self, read: Callable[[], Question], number: int, decoding: Decoding) -> Answer:
        try:
            question = read()
        except DataError as fault:
            self._fill(decoding)
            return Answer(number, error=str(fault))
        text = self._answer(question.inputs, decoding, number)
        return Answer(number, question.id, question.text, text, question.references)

    def _fill(self, decoding: Decoding) -> None:
        """Other ranks answer meanwhile, and hold a part of the model here."""
        if self.ranks.count > 1:
            self.say([Turn("user", "?")], decoding)

    def _answer(
        self, inputs: Mapping[str, Tensor], decoding: Decoding, number: int, heard: Heard | None = None
    ) -> str:
        moved = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        return self.task.answer([moved], decoding, [number], heard)[0]


@contextmanager
def speaker(
    run: str | Path,
    *,
    weights: Weights = "auto",
    checkpoint: Which = "latest",
    overrides: Sequence[str] = (),
) -> Iterator[Speaker]:
    """Opens a run for questions, for the length of the block. Called as the rank that the environment names.

    Args:
        run: a run's folder, `DIR@STEP`, or one of its checkpoints.
        weights: `ema`, `model`, or `auto`: the average where the checkpoint holds one.
        checkpoint: `latest` or `best`, of the complete ones.
        overrides: `key.path=value` over the run's config: where folders are that have moved.

    Raises:
        MMError: no checkpoint, a task that makes no text, a dataset that lays out no conversations.
    """
    source = checkpoint_at(run, checkpoint)
    config = load_config(source / "config.yaml", overrides, spare_environment=True)
    conversing = conversing_of(config)
    with among_ranks():
        task, ranks = build_task(config, adapters_in(source)), Ranks.current()
        _check(task, config)
        evaluating = load_as_rank(task, config, source, weights)
        assert isinstance(task, AnswersInWords)
        with evaluating:
            yield Speaker(task, conversing, current_device(), ranks)


def answer(
    run: str | Path,
    prompt: str,
    *,
    images: Sequence[str | Path] = (),
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    heard: Heard | None = None,
    weights: Weights = "auto",
    checkpoint: Which = "latest",
    overrides: Sequence[str] = (),
) -> str:
    """What a run's model says to a prompt, after these images. `speaker` opens a run for several questions.

    Args:
        images: files that are shown before the prompt.
        max_new_tokens: of the answer; None takes the task's own, else 512.
        temperature: 0 takes the likeliest token each time. top_p: of the likeliest tokens, the share of
            probability that is drawn from. seed: of what is drawn.
        heard: is told each piece of the answer as soon as it is there.
        run, weights, checkpoint, overrides: as of `speaker`.
    """
    decoding = checked(Decoding(max_new_tokens, temperature, top_p, seed))
    with speaker(run, weights=weights, checkpoint=checkpoint, overrides=overrides) as opened:
        return opened.say([Turn("user", prompt, tuple(map(Path, images)))], decoding, heard=heard)


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
    target = get_registry(config.plugins.path).resolve("task", config.task.type).load_target()
    return isinstance(target, type) and issubclass(target, AnswersInWords)


def conversing_of(config: RunConfig) -> Conversing:
    """What lays out questions as the rows that the run was trained on. ContractError where nothing does."""
    dataset = config.data.train
    target, fields = target_of(dataset)
    if not isinstance(target, ConversingDataset):
        raise ContractError(
            f"the run was trained on {dataset.type}, which lays out no questions in words",
            where="data.train.type",
            accepted="a dataset whose class has `conversing`: text_rows, say",
        )
    return target.conversing(**fields)


def _check(task: nn.Module, config: RunConfig) -> None:
    if not isinstance(task, AnswersInWords):
        raise ContractError(
            f"the task {config.task.type} does not answer in words",
            where="task.type",
            accepted="a task that does: pretrained, say",
        )
    task.check_answers()
