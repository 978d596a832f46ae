"""The dataset `text_rows`: texts of a table, tokenized by data workers."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mm_core.builtin.configs.data import TextRowsConfig
from mm_core.contracts import IGNORED_LABEL, Randomness, TextBatch
from mm_core.data.datasets import Sample
from mm_core.data.datasets.text_questions import TextQuestions
from mm_core.data.datasets.text_table import TextRow, read_texts
from mm_core.data.rows.packed_rows import PackedRows
from mm_core.errors import DataError, RunWarning, plural
from mm_core.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextRowsDataset:
    """The dataset `text_rows`: texts of a table with their labels, as `TextBatch` for the task `pretrained`.

    A sample is {"ids": tokens, "types": segments of a pair or None, "labels": the class, the number, or a
    label for each token (-100 for tokens of the prompt), "id": its position in the file}. A batch is padded
    to its longest row. The arguments are the fields of `TextRowsConfig`.

    Raises:
        DataError: in the constructor if the table cannot be read, lacks a column, contains unknown labels, or
            has no usable row; for a sample if its row is broken.
        CheckpointError: the tokenizer's folder contains no tokenizer.
    """

    def __init__(self, file: str | Path, tokenizer: str | Path, **others: Any) -> None:
        wanted = TextRowsConfig(str(file), str(tokenizer), **others)
        self.wanted, self.file = wanted, Path(file)
        if wanted.trust_remote_code:
            what = f"text_rows.trust_remote_code is on: Python files in {wanted.tokenizer} are executed"
            warnings.warn(what, RunWarning, stacklevel=2)
        _ = self._tokenizer  # an error in its folder is one of the constructor
        sizes = array("q")
        self.rows = PackedRows(self._read(sizes), TextRow)
        self._places = _part(len(self.rows), wanted)
        if not len(self._places):
            none = f"part {list(wanted.part)} of {plural(len(self.rows), 'row')} contains no row"
            raise DataError(none, where=str(self.file), hint="widen `part`, or use more rows")
        self._sizes = torch.frombuffer(sizes, dtype=torch.int64)[self._places]

    def __len__(self) -> int:
        return len(self._places)

    def lengths(self) -> Tensor:
        """The length of each sample in bytes of text, which grows with its tokens: int64 [N]."""
        return self._sizes

    def class_names(self) -> tuple[str, ...]:
        """Names of the dataset's classes, which the task compares with its own."""
        return self.wanted.labels

    def __getitem__(self, index: int) -> Sample:
        """The tokens and labels of a text row.

        Raises:
            DataError: the row cannot be used.
        """
        row = self.rows[int(self._places[index])]
        if row.fault is not None:
            raise DataError(row.fault, where=f"{self.file}, {row.place}")
        sample = self._learnt(row) if self.wanted.label is None else self._labelled(row)
        if not sample["ids"]:
            raise DataError(
                "the tokenizer finds no tokens in the text",
                where=f"{self.file}, {row.place}",
                hint="correct the text, remove the row, or use the tokenizer of another model",
            )
        return {**sample, "id": f"{self.file.name}, {row.place}"}

    def collate(self, samples: Sequence[Sample]) -> TextBatch:
        """Collates text samples, with their `key` and `weight`, into a batch padded on the right."""
        rows = [sample["ids"] for sample in samples]
        inputs = {
            "input_ids": self._padded(rows, self._tokenizer.pad_token_id),
            "attention_mask": self._padded([[1] * len(row) for row in rows], 0),
        }
        if self.wanted.pair is not None and samples[0]["types"] is not None:
            inputs["token_type_ids"] = self._padded([sample["types"] for sample in samples], 0)
        labels = [sample["labels"] for sample in samples]
        if self.wanted.label is None:
            inputs["labels"] = self._padded(labels, IGNORED_LABEL)
        else:
            kind = torch.int64 if self.wanted.label_type == "class" else torch.float32
            inputs["labels"] = torch.tensor(labels, dtype=kind)
        return TextBatch(
            keys=[sample["key"] for sample in samples],
            sample_weights=torch.tensor([sample["weight"] for sample in samples], dtype=torch.float32),
            ids=[sample["id"] for sample in samples],
            inputs=inputs,
        )

    @classmethod
    def conversing(cls, file: str | Path, tokenizer: str | Path, **others: Any) -> TextQuestions:
        """Makes prompts in the format of the dataset's rows, without reading the rows.

        Raises:
            ContractError: the rows have labels, so the run trains a classifier.
        """
        wanted = TextRowsConfig(str(file), str(tokenizer), **others)
        return TextQuestions(wanted, open_tokenizer(wanted.tokenizer, wanted.trust_remote_code))

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_tokenizer"}

    # -- reading -------------------------------------------------------------------------------

    def _read(self, sizes: array[int]) -> Iterator[TextRow]:
        """Every row of the table; appends the size of each to `sizes`."""
        for row in read_texts(self.wanted):
            sizes.append(len(row.text.encode()) + len((row.other or "").encode()))
            yield row

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return open_tokenizer(self.wanted.tokenizer, self.wanted.trust_remote_code)

    # -- tokens --------------------------------------------------------------------------------

    def _labelled(self, row: TextRow) -> Sample:
        tokenizer, longest = self._tokenizer, self.wanted.max_length
        types = row.other is not None and "token_type_ids" in tokenizer.model_input_names
        found = tokenizer(
            row.text, row.other, truncation=True, max_length=longest, return_token_type_ids=types
        )
        segments = found["token_type_ids"] if types else None
        return {"ids": found["input_ids"], "types": segments, "labels": row.label}

    def _learnt(self, row: TextRow) -> Sample:
        """Tokens of prompt and text. An end token follows the text, unless it fills the maximum length."""
        tokenizer, longest = self._tokenizer, self.wanted.max_length
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        before: list[int] = []
        if row.other is not None:
            before = tokenizer(row.other + self.wanted.separator, verbose=False)["input_ids"]
            before = before[:-1] if before[-1:] == end else before
            if len(before) >= longest:
                raise DataError(
                    f"the prompt has {plural(len(before), 'token')}, so max_length {longest} "
                    "leaves no room for text",
                    where=f"{self.file}, {row.place}",
                    hint="shorten the prompt, or raise max_length of the dataset",
                )
        special = row.other is None
        found = tokenizer(row.text, add_special_tokens=special, truncation=True, max_length=longest)
        ids = found["input_ids"]
        if ids and ids[-1:] != end:
            ids = ids + end
        learnt = ids[: longest - len(before)]
        return {"ids": before + learnt, "types": None, "labels": [IGNORED_LABEL] * len(before) + learnt}

    def _padded(self, rows: Sequence[Sequence[int]], value: int) -> Tensor:
        """Rows as one tensor, int64 [B,L], filled with `value`."""
        padded = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)
        missing = -padded.shape[1] % self.wanted.pad_to_multiple
        return torch.nn.functional.pad(padded, (0, missing), value=value)


def _part(count: int, wanted: TextRowsConfig) -> Tensor:
    """int64: the row numbers of the configured part of the shuffled table, in the table's order."""
    shuffled = torch.randperm(count, generator=Randomness(wanted.split_seed).generator("split"))
    first, end = (round(share * count) for share in wanted.part)
    return shuffled[first:end].sort().values
