"""The dataset `internvl/conversations`: conversations about images and videos, optionally packed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mm_core.contracts import IGNORED_LABEL, Randomness, TextBatch, VideoReader
from mm_core.data import Mixture, PackedRows, PyAVReader, check_folder
from mm_core.errors import ContractError, DataError, PartsError, RunWarning, plural
from mm_internvl.data.chat import Chat, Shown, Tokens
from mm_internvl.data.config import ConversationsConfig, Source
from mm_internvl.data.first_rows import some_usable
from mm_internvl.data.lengths import Lengths
from mm_internvl.data.pictures import Pictures
from mm_internvl.data.questions import QuestionInputs
from mm_internvl.data.rows import Conversation, Medium, Picture, RawRow, conversation, located
from mm_internvl.data.tiling import read_object, read_tiling
from mm_internvl.packing import Packs, check_support, positions


class Conversations:
    """The dataset of conversations about images and videos, for `InternVLForConditionalGeneration`.

    A sample is {"pieces": [{"input_ids", "labels": int64 [L]}, ...], "pixel_values": float32 [N,3,Y,X] of its
    tiles, "id"}. It has one piece; with `packing`, all conversations that share a row, without those that
    cannot be read ("missing": their PartsError). Labels are -100 except for the assistant's words. The inputs
    of a batch are `input_ids`, `labels`, `pixel_values` (at least one tile: see `collate`), and
    `attention_mask`, or `position_ids` for packed rows.

    Args: fields of `ConversationsConfig`.

    Raises:
        DataError: in the constructor: a file is not JSON or has no rows. Per sample: a row is no
            conversation; an image or video is missing, damaged, too large or outside its folder;
            placeholders do not match the files.
        CheckpointError: the folder has no tokenizer, no chat template, or no tokens for images.
    """

    def __init__(
        self, sources: Sequence[Source], processor: str, *, reader: VideoReader | None = None, **others: Any
    ) -> None:
        self.wanted = wanted = ConversationsConfig(tuple(sources), processor, **others)
        inputs = _question_inputs(wanted, PyAVReader() if reader is None else reader)
        self.chat, self.pictures, self.tiling = inputs.chat, inputs.pictures, inputs.pictures.tiling
        self.rows, self.order = _read(wanted.sources)
        facts: list[object] = [processor, wanted.max_length, asdict(self.tiling), wanted.frames]
        facts += [wanted.system, wanted.max_pixels, wanted.share_tiles]
        kept = None if wanted.lengths is None else Path(wanted.lengths)
        self._kept = Lengths(kept, wanted.sources, processor, facts)
        self.packs: Packs | None = None
        if wanted.packing:
            check_support()
            tokens, bad = self._tokens()
            self.packs = Packs(tokens, wanted.max_length, separate=bad)
        self._check_reach(processor)

    def __len__(self) -> int:
        return len(self.order) if self.packs is None else len(self.packs)

    def lengths(self) -> Tensor:
        """Token counts [N] int64 of the dataset's samples. The first call measures every row, from file
        headers only."""
        return self._tokens()[0] if self.packs is None else self.packs.sizes

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The sample at an index; with packing, its row for epoch 0 and seed 0."""
        return self._sample(index, 0, 0)

    def sample_at(self, index: int, rng: Randomness) -> dict[str, Any]:
        """The sample at an index. With packing, the run's seed and the epoch decide which conversations
        share a row."""
        return self._sample(index, rng.seed, int(rng.path[-2]))  # rng is at ("data", epoch, index)

    def collate(self, samples: Sequence[dict[str, Any]]) -> TextBatch:
        """Collates samples, with `key` and `weight` from the loader, into a batch.

        Without any image, a blank tile and its tokens are appended to the shortest row. They are masked
        and not learnt, but every rank then runs the same modules.
        """
        self.check_micro_batch(len(samples), {"packing": self.packs is not None})
        pieces = [list(sample["pieces"]) for sample in samples]
        pixels = torch.cat([sample["pixel_values"] for sample in samples])
        lengths = [sum(len(piece["input_ids"]) for piece in row) for row in pieces]
        seen = [torch.ones(length, dtype=torch.int64) for length in lengths]
        if not len(pixels):
            pixels = self.tiling.blank()
            blank = torch.tensor(self.chat.tokens_of_blank)
            row = lengths.index(min(lengths))
            pieces[row].append({"input_ids": blank, "labels": torch.full_like(blank, IGNORED_LABEL)})
            seen[row] = torch.cat([seen[row], torch.zeros_like(blank)])

        def padded(name: str, value: int) -> Tensor:
            rows = [torch.cat([piece[name] for piece in row]) for row in pieces]
            return pad_sequence(rows, batch_first=True, padding_value=value)

        inputs = {
            "input_ids": padded("input_ids", int(self.chat.tokenizer.pad_token_id)),
            "labels": padded("labels", IGNORED_LABEL),
            "pixel_values": pixels,
        }
        if self.packs is None:
            inputs["attention_mask"] = pad_sequence(seen, batch_first=True)
        else:
            inputs["position_ids"] = positions([len(piece["input_ids"]) for piece in pieces[0]])[None]
        weights = torch.tensor([sample["weight"] for sample in samples], dtype=torch.float32)
        keys, ids = [sample["key"] for sample in samples], [sample["id"] for sample in samples]
        references = None if self.packs is not None else [sample["answers"] for sample in samples]
        return TextBatch(keys, weights, ids, inputs=inputs, references=references)

    @classmethod
    def evaluated(cls, options: Mapping[str, object]) -> Mapping[str, object]:
        """Dataset options for evaluation: rows are answered one by one, so packing is off."""
        return {**options, "packing": False}

    @classmethod
    def check_micro_batch(cls, size: int, options: Mapping[str, object]) -> None:
        """Checks that a micro-batch has at most one packed row.

        Raises:
            ContractError: the micro-batch has several packed rows.
        """
        if options["packing"] and size > 1:
            raise ContractError(
                f"a micro-batch of {plural(size, 'packed row')} is not supported",
                where="train.micro_batch_size",
                accepted="1: a packed row is long, and FlashAttention takes one at a time",
                hint="set train.micro_batch_size: 1; for larger batches, raise max_length of the dataset",
            )

    @classmethod
    def conversing(cls, reader: VideoReader, **fields: Any) -> QuestionInputs:
        """Turns questions of `mm sample` and `mm chat` into model inputs, with this dataset's options but
        without its rows."""
        return _question_inputs(ConversationsConfig(**fields), reader)

    def _check_reach(self, folder: str) -> None:
        """Warns of conversations longer than the model's positions."""
        reach = _positions_of(read_object(Path(folder) / "config.json"))
        packed = self.packs is not None
        longest = self.chat.max_length if self.packs is None else int(self.packs.lengths.max())
        if reach is not None and longest > reach:
            what = f"conversations of {longest} tokens" if packed else f"max_length {longest} of the dataset"
            sentence = (
                f"{what} exceed{'' if packed else 's'} the {reach} positions that the model in {folder} was "
                f"made for: answers may get worse; lower max_length of the dataset to {reach}"
            )
            warnings.warn(sentence, RunWarning, stacklevel=3)

    # -- samples ---------------------------------------------------------------------------------

    def _sample(self, index: int, seed: int, epoch: int) -> dict[str, Any]:
        if self.packs is None:
            tokens, pixels, name, answers = self._conversation(int(self.order[index]))
            return {"pieces": [_piece(tokens)], "pixel_values": pixels, "id": name, "answers": answers}
        members = self.packs.members(index, seed, epoch)
        read, faults = self._together(members)
        if not read:
            raise PartsError(faults, len(members))
        total = sum(len(tokens.ids) for tokens, *_ in read)
        if total > self.packs.capacity:
            raise DataError(
                f"the conversations of a packed row have {plural(total, 'token')}, more than max_length "
                f"{self.packs.capacity}: images or videos have changed since their lengths were measured",
                where=", ".join(name for _, _, name, _ in read),
                hint="start again"
                if (kept := self.wanted.lengths) is None
                else f"delete {kept}, and start again",
            )
        return {
            "pieces": [_piece(tokens) for tokens, *_ in read],
            "pixel_values": torch.cat([pixels for _, pixels, *_ in read]),
            "id": ", ".join(name for _, _, name, _ in read),
            **({"missing": PartsError(faults, len(members))} if faults else {}),
        }

    def _together(self, members: Sequence[int]) -> tuple[list[_Read], dict[int, DataError]]:
        """The conversations that can be read, and the error of each of the others."""
        read, faults = [], {}
        for member in members:
            try:
                read.append(self._conversation(int(self.order[member])))
            except DataError as fault:
                faults[member] = fault
        return read, faults

    def _conversation(self, number: int) -> _Read:
        """Tokens of a row, pixels of the images and videos among them, its name, and the reference answers
        to its last question. Without reference answers, evaluation uses the labels."""
        row = self.rows[number]
        row_conversation, shown, tokens = self._measured(row)
        pixels = self.pictures.pixels(self._files(row, row_conversation), shown, tokens.shown)
        answered = tokens.whole and row_conversation.turns[-1].role == "assistant"
        return tokens, pixels, self._name(row), row_conversation.answers if answered else ()

    def _measured(self, row: RawRow) -> tuple[Conversation, list[Shown], Tokens]:
        """A row's conversation, its images and videos, and its tokens. Reads only the headers of images and
        videos."""
        name = self._name(row)
        row_conversation = conversation(row.value, name)
        shown = self.pictures.shown(self._files(row, row_conversation))
        return row_conversation, shown, self.chat.tokens(row_conversation, shown, name)

    def _tokens(self) -> tuple[Tensor, Tensor]:
        """Token counts [N] of an epoch's conversations, and [N] whether each cannot be read.

        Unreadable conversations count with the average length of the others, and are packed together. So
        their share of packed rows equals their share of conversations, and reading these rows reports the
        errors."""
        found = self._kept.of(self.rows, self._length)[self.order]
        bad = found == 0
        usual = self.chat.max_length if bad.all() else round(float(found[~bad].double().mean()))
        return found.masked_fill(bad, usual), bad

    def _length(self, row: RawRow) -> int:
        return len(self._measured(row)[2].ids)

    def _files(self, row: RawRow, row_conversation: Conversation) -> list[tuple[Medium, Picture]]:
        source = self.wanted.sources[row.source]
        folder = Path(source.annotations).parent if source.folder is None else Path(source.folder)
        return located(row_conversation.media, folder)

    def _name(self, row: RawRow) -> str:
        return f"{self.wanted.sources[row.source].annotations}, {row.place}"


_Read = tuple[Tokens, Tensor, str, tuple[str, ...]]
"""Result of `Conversations._conversation` for a row."""


def _question_inputs(wanted: ConversationsConfig, reader: VideoReader) -> QuestionInputs:
    """Builds chat template and tiling for conversations and questions. CheckpointError if the model's
    folder lacks their files."""
    chat = Chat(wanted.processor, wanted.max_length, wanted.system)
    chat.check()
    tiling = read_tiling(Path(wanted.processor), wanted.min_tiles, wanted.max_tiles)
    return QuestionInputs(
        chat, Pictures(tiling, wanted.frames, wanted.max_pixels, reader, wanted.share_tiles)
    )


def _positions_of(config: Mapping[str, object]) -> int | None:
    """Number of positions that a model was made for, with RoPE scaling; None if its config has no number."""
    part = config.get("text_config") or config.get("llm_config") or config
    if not isinstance(part, Mapping) or not isinstance(reach := part.get("max_position_embeddings"), int):
        return None
    scaling = part.get("rope_scaling") or part.get("rope_parameters")
    if not isinstance(scaling, Mapping) or not isinstance(factor := scaling.get("factor"), int | float):
        return reach
    original = scaling.get("original_max_position_embeddings")
    return max(reach, round(factor * (original if isinstance(original, int) else reach)))


def _piece(tokens: Tokens) -> dict[str, Tensor]:
    return {"input_ids": tokens.ids, "labels": tokens.labels}


def _read(sources: Sequence[Source]) -> tuple[PackedRows[RawRow], Tensor]:
    """Rows of all sources, and the row number [N] of each sample of an epoch."""
    counts: list[int] = []
    rows = PackedRows(_rows(sources, counts), RawRow)
    # The same part of a source in every epoch, so that all epochs have the same packed rows.
    samples = Mixture(counts, [source.weight for source in sources]).rows()
    if not len(samples):
        raise DataError(
            "no conversation remains: the weights of all sources are too small",
            where="sources",
            hint="raise `weight` of a source: 1 uses each row once per epoch",
        )
    return rows, samples


def _rows(sources: Sequence[Source], counts: list[int]) -> Iterator[RawRow]:
    """Rows of all sources, one at a time. Appends the number of rows of each source to `counts`."""
    for number, source in enumerate(sources):
        counts.append(0)
        for row in some_usable(Path(source.annotations), number):
            counts[-1] += 1
            yield row
        if source.folder is not None:
            check_folder(Path(source.folder), "the folder of the images")
