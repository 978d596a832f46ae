"""Prompts in the format of the dataset `text_rows`: a prompt, and the text that follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mm_core.builtin.configs.data import TextRowsConfig
from mm_core.contracts import Question, Turn
from mm_core.data.rows.json_rows import kind_of
from mm_core.data.rows.tables import Cells, read_table
from mm_core.errors import ContractError, DataError, plural

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TextQuestions:
    """Turns prompts into model inputs in the format of `text_rows`. Satisfies `Conversing`.

    Inputs are `input_ids` and `attention_mask` [1,L].

    Raises:
        ContractError: in the constructor, if the rows have labels: the run trains a classifier.
    """

    wanted: TextRowsConfig
    tokenizer: PreTrainedTokenizerBase

    def __post_init__(self) -> None:
        if self.wanted.label is not None:
            raise ContractError(
                "the run's model classifies rows, so it cannot answer prompts with text",
                where="data.train.label",
                hint="run `mm eval --predictions FILE` for the class of each row",
            )

    def prompt(self, turns: Sequence[Turn]) -> Mapping[str, Tensor]:
        """The model inputs of a prompt in the format of text rows: one turn, without images.

        Raises:
            DataError: there are more turns, or images.
        """
        if any(turn.images for turn in turns):
            raise DataError(
                "the run was trained on text rows, so its prompts cannot contain images",
                where=str(turns[-1].images or turns[0].images),
                hint="remove the images",
            )
        if len(turns) > 1:
            raise DataError(
                "the run was trained on single prompts, not on conversations of several turns",
                accepted="one prompt at a time",
                hint="in mm chat, start again with /new",
            )
        return self._inputs(turns[0].text, "the prompt")

    def questions(self, file: Path) -> Sequence[Callable[[], Question]]:
        """The prompts in a file of text rows with the dataset's own columns; `text` after a prompt is its
        reference answer, and may be left out."""
        columns = [self.wanted.text, *([] if self.wanted.prompt is None else [self.wanted.prompt])]
        answers = [] if self.wanted.prompt is None else [self.wanted.text]
        rows = read_table(file, columns, self.wanted.quotes, optional=answers)
        return [partial(self._question, file, cells) for cells in rows]

    def _question(self, file: Path, cells: Cells) -> Question:
        name = f"{file.name}, {cells.place}"
        if cells.fault is not None:
            raise DataError(cells.fault, where=name)
        asked = cells.values[-1]
        if not isinstance(asked, str) or not asked.strip():
            raise DataError(
                f"the prompt is {'empty' if isinstance(asked, str) else kind_of(asked)}",
                where=name,
                accepted="a text that is not empty",
                hint="add the prompt to this row, or remove the row",
            )
        text = cells.values[0] if self.wanted.prompt is not None else None
        references = (text,) if isinstance(text, str) and text else ()
        return Question(name, asked, self._inputs(asked, name), references)

    def _inputs(self, asked: str, where: str) -> Mapping[str, Tensor]:
        separator = self.wanted.separator if self.wanted.prompt is not None else ""
        tokens = self.tokenizer(asked + separator, verbose=False)["input_ids"]
        if tokens[-1:] == [self.tokenizer.eos_token_id]:
            tokens = tokens[:-1]
        if not 0 < len(tokens) < self.wanted.max_length:
            raise DataError(
                f"the prompt has {plural(len(tokens), 'token')}",
                where=where,
                accepted=f"1 to {plural(self.wanted.max_length - 1, 'token')}: fewer than max_length",
            )
        ids = torch.tensor([tokens])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
