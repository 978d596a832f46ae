"""The dataset `text_rows`: texts of a table, tokenized where they are read."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mm_core.builtin.configs.data import TextRowsConfig
from mm_core.contracts import IGNORED_LABEL, Randomness, TextBatch
from mm_core.data.datasets import Sample
from mm_core.data.datasets.text_labels import Labels
from mm_core.data.datasets.text_questions import TextQuestions
from mm_core.data.rows.captions import half_character
from mm_core.data.rows.json_rows import kind_of
from mm_core.data.rows.packed_rows import PackedRows
from mm_core.data.rows.tables import Cells, read_table
from mm_core.errors import DataError, RunWarning
from mm_core.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TextRow:
    """A row of the table. other: its prompt, or the second text of a pair. fault: why it cannot be used."""

    place: str
    text: str = ""
    other: str | None = None
    label: float | None = None
    fault: str | None = None


class TextRowsDataset:
    """Rows of text and what is to be learnt of them, as `TextBatch` for the task `pretrained`.

    A sample is {"ids": tokens, "types": segments of a pair or None, "labels": the class, the number, or a
    label for each token (-100 for those of the prompt), "id": its place in the file}. A batch is padded to
    its longest row. Fields are those of `TextRowsConfig`.

    Raises:
        DataError: in the constructor for a table that cannot be read, a column that it does not have, labels
            that are no classes, and where no row is left; per sample for broken rows.
        CheckpointError: for a folder without a tokenizer.
    """

    def __init__(self, file: str | Path, tokenizer: str | Path, **others: Any) -> None:
        wanted = TextRowsConfig(str(file), str(tokenizer), **others)
        self.wanted, self.file = wanted, Path(file)
        if wanted.trust_remote_code:
            what = f"text_rows.trust_remote_code is on: Python files of {wanted.tokenizer} are run"
            warnings.warn(what, RunWarning, stacklevel=2)
        self._tokenizer: PreTrainedTokenizerBase | None = open_tokenizer(
            wanted.tokenizer, wanted.trust_remote_code
        )
        sizes = array("q")
        self.rows = PackedRows(self._read(sizes), TextRow)
        self._places = _part(len(self.rows), wanted)
        if not len(self._places):
            none = f"part {list(wanted.part)} of {len(self.rows)} rows holds none"
            raise DataError(none, where=str(self.file))
        self._sizes = torch.frombuffer(sizes, dtype=torch.int64)[self._places]

    def __len__(self) -> int:
        return len(self._places)

    def lengths(self) -> Tensor:
        """[N] int64: bytes of each row's text, which grow as its tokens do."""
        return self._sizes

    def class_names(self) -> tuple[str, ...]:
        """`labels`, for the task to compare with its own."""
        return self.wanted.labels

    def __getitem__(self, index: int) -> Sample:
        """The tokens and labels of a row. DataError for one that cannot be used."""
        row = self.rows[int(self._places[index])]
        if row.fault is not None:
            raise DataError(row.fault, where=f"{self.file}, {row.place}")
        sample = self._learnt(row) if self.wanted.label is None else self._labelled(row)
        if not sample["ids"]:
            raise DataError("the tokenizer makes no tokens of the text", where=f"{self.file}, {row.place}")
        return {**sample, "id": f"{self.file.name}, {row.place}"}

    def collate(self, samples: Sequence[Sample]) -> TextBatch:
        """Samples, to which the loader has added `key` and `weight`, padded on the right."""
        rows = [sample["ids"] for sample in samples]
        inputs = {
            "input_ids": self._padded(rows, self._open().pad_token_id),
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
        """What lays out questions as the rows are, without any of them. ContractError for rows of classes."""
        wanted = TextRowsConfig(str(file), str(tokenizer), **others)
        return TextQuestions(wanted, open_tokenizer(wanted.tokenizer, wanted.trust_remote_code))

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_tokenizer": None}

    # -- reading -------------------------------------------------------------------------------

    def _read(self, sizes: array[int]) -> Iterator[TextRow]:
        """Every row of the table, those that cannot be used too, so that a split does not move when they are
        mended. DataError for labels that are no classes, and where nothing can be used."""
        wanted, labels = self.wanted, Labels(self.wanted)
        other = wanted.prompt if wanted.label is None else wanted.pair
        columns = [column for column in (wanted.text, other, wanted.label) if column is not None]
        first: TextRow | None = None
        usable = False
        for cells in read_table(self.file, columns, wanted.quotes):
            row = _row(cells, other is not None, labels)
            first, usable = first or row, usable or row.fault is None
            sizes.append(len(row.text.encode()) + len((row.other or "").encode()))
            yield row
        labels.check(self.file)
        if not usable:
            assert first is not None
            raise DataError(
                f"none of the {len(sizes)} rows can be used; {first.place}: {first.fault}",
                where=str(self.file),
                hint="data.<split>.text, prompt, pair and label name the columns",
            )

    def _open(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            self._tokenizer = open_tokenizer(self.wanted.tokenizer, self.wanted.trust_remote_code)
        return self._tokenizer

    # -- tokens --------------------------------------------------------------------------------

    def _labelled(self, row: TextRow) -> Sample:
        tokenizer, longest = self._open(), self.wanted.max_length
        types = row.other is not None and "token_type_ids" in tokenizer.model_input_names
        found = tokenizer(
            row.text, row.other, truncation=True, max_length=longest, return_token_type_ids=types
        )
        segments = found["token_type_ids"] if types else None
        return {"ids": found["input_ids"], "types": segments, "labels": row.label}

    def _learnt(self, row: TextRow) -> Sample:
        """A text is followed by the token that ends it, unless it fills the whole length."""
        tokenizer, longest = self._open(), self.wanted.max_length
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        before: list[int] = []
        if row.other is not None:
            before = tokenizer(row.other + self.wanted.separator, verbose=False)["input_ids"]
            before = before[:-1] if before[-1:] == end else before
            if len(before) >= longest:
                raise DataError(
                    f"the prompt has {len(before)} tokens, and max_length {longest} leaves none to learn",
                    where=f"{self.file}, {row.place}",
                )
        special = row.other is None
        found = tokenizer(row.text, add_special_tokens=special, truncation=True, max_length=longest)
        ids = found["input_ids"]
        if ids and ids[-1:] != end:
            ids = ids + end
        learnt = ids[: longest - len(before)]
        return {"ids": before + learnt, "types": None, "labels": [IGNORED_LABEL] * len(before) + learnt}

    def _padded(self, rows: Sequence[Sequence[int]], value: int) -> Tensor:
        """[B,L] int64."""
        padded = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)
        missing = -padded.shape[1] % self.wanted.pad_to_multiple
        return torch.nn.functional.pad(padded, (0, missing), value=value)


def _part(count: int, wanted: TextRowsConfig) -> Tensor:
    """int64: the rows from one share of the shuffled table to another, in the table's order."""
    shuffled = torch.randperm(count, generator=Randomness(wanted.split_seed).generator("split"))
    first, end = (round(share * count) for share in wanted.part)
    return shuffled[first:end].sort().values


def _row(cells: Cells, other: bool, labels: Labels) -> TextRow:
    if cells.fault is not None:
        return TextRow(cells.place, fault=cells.fault)
    text, *rest = cells.values
    second = rest.pop(0) if other else None
    for value in (text, *([second] if other else [])):
        if not isinstance(value, str) or not value.strip():
            found = "empty" if isinstance(value, str) else kind_of(value)
            return TextRow(cells.place, fault=f"the text is {found}")
        if half := half_character(value):
            return TextRow(cells.place, fault=f"the text holds {half}, half of a character")
    number, fault = labels.read(rest[0], cells.place) if rest else (None, None)
    return TextRow(cells.place, text, second, number, fault)
