"""The dataset `conversations`: chats about images, optionally packed, for any model with a chat template."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mm_core.builtin.configs.conversations import ConversationsConfig, ConversationSource
from mm_core.contracts import IGNORED_LABEL, Randomness, TextBatch, VideoReader
from mm_core.data.media.readers import PyAVReader
from mm_core.data.rows.mixture import Mixture
from mm_core.data.rows.packed_rows import PackedRows
from mm_core.data.rows.paths import check_folder
from mm_core.errors import ContractError, DataError, PartsError, RunWarning, plural
from mm_core.tasks.conversations.chat import Chat, Files
from mm_core.tasks.conversations.lengths import Lengths
from mm_core.tasks.conversations.media import MediaReader
from mm_core.tasks.conversations.opening import check_support
from mm_core.tasks.conversations.packing import Packs, positions
from mm_core.tasks.conversations.processor import ChatProcessor, Encoded
from mm_core.tasks.conversations.questions import QuestionInputs
from mm_core.tasks.conversations.rows.first_rows import some_usable
from mm_core.tasks.conversations.rows.reading import Conversation, RawRow, conversation, kinds_of, located
from mm_core.tasks.conversations.token_counts import Count
from mm_core.weights import read_mapping

_logger = logging.getLogger(__name__)

_Read = tuple[Encoded, str, tuple[str, ...]]
"""A conversation, its name, and the reference answers to its last question."""


class Conversations:
    """The dataset of conversations about images, laid out by the model's own processor and chat template.

    A sample is {"pieces": [Encoded, ...], "id"}: one piece; with `packing`, all conversations that share a
    row, without those that cannot be read ("missing": their PartsError). The inputs of a batch are
    `input_ids`, `labels` (-100 except for the assistant's words), what else the processor makes (of at least
    one picture: see `collate`), and `attention_mask`, or `position_ids` for packed rows.

    Plugins may subclass it, with a processor of their own from `make_processor`.

    Args: fields of `ConversationsConfig`.

    Raises:
        DataError: in the constructor: a file is not JSON or Parquet, or has no rows. Per sample: a row is no
            conversation; an image or video is missing, damaged, too large or outside its folder;
            placeholders do not match the files.
        CheckpointError: the folder has no processor that can be opened, or no chat template.
    """

    config: type[Any] = ConversationsConfig

    def __init__(
        self,
        sources: Sequence[ConversationSource],
        processor: str | None = None,
        *,
        reader: VideoReader | None = None,
        **others: Any,
    ) -> None:
        self.wanted = wanted = self.config(tuple(sources), processor, **others)
        self.chat = self._chat(wanted, PyAVReader() if reader is None else reader)
        folder = self.chat.processor.folder
        self.rows, self.order = _read(wanted.sources)
        facts = {name: value for name, value in asdict(wanted).items() if name not in _NO_FACTS}
        kept = None if wanted.lengths is None else Path(wanted.lengths)
        self._kept = Lengths(kept, wanted.sources, folder, [*facts.values(), *self.chat.processor.facts()])
        self.packs: Packs | None = None
        if wanted.packing:
            check_support()
            tokens, bad = self._tokens()
            self.packs = Packs(tokens, wanted.max_length, separate=bad)
        self._check_reach(folder)

    @classmethod
    def make_processor(cls, wanted: Any, media: MediaReader) -> ChatProcessor:
        """The processor of a config's model."""
        return ChatProcessor(wanted.processor, media, wanted.reasoning == "keep", wanted.trust_remote_code)

    @classmethod
    def _chat(cls, wanted: Any, reader: VideoReader) -> Chat:
        if wanted.processor is None:
            raise ContractError(
                "the dataset has no processor, and the task has no model folder",
                where="data.train.processor",
                accepted="the folder of the model, or a task with from_pretrained",
            )
        chat = Chat(
            cls.make_processor(wanted, MediaReader(wanted.frames, wanted.max_pixels, reader)),
            wanted.max_length,
            wanted.system,
            wanted.boxes,
        )
        if chat.processor.template.head_differs:
            _logger.warning(
                "the chat template of %s begins an answer otherwise in a conversation than after a prompt; "
                "`mm sample` and `mm eval` ask differently from what is trained",
                chat.processor.folder,
            )
        return chat

    def __len__(self) -> int:
        return len(self.order) if self.packs is None else len(self.packs)

    def lengths(self) -> Tensor:
        """Token counts [N] int64 of the dataset's samples. The first call measures every row, from file
        headers only."""
        return self._tokens()[0] if self.packs is None else self.packs.sizes

    def work_at(self, index: int, rng: Randomness) -> int:
        """The number of tokens of a sample's images, in proportion to their patches."""
        if self.packs is None:
            return int(self._counts[index, 1])
        members = self.packs.members(index, rng.seed, int(rng.path[-2]))
        return int(self._counts[members, 1].sum())

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The sample at an index; with packing, its row for epoch 0 and seed 0."""
        return self._sample(index, 0, 0)

    def sample_at(self, index: int, rng: Randomness) -> dict[str, Any]:
        """The sample at an index. With packing, the run's seed and the epoch decide which conversations
        share a row."""
        return self._sample(index, rng.seed, int(rng.path[-2]))  # rng is at ("data", epoch, index)

    def collate(self, samples: Sequence[dict[str, Any]]) -> TextBatch:
        """Collates samples, with `key` and `weight` from the loader, into a batch.

        Without any picture, a blank one and its tokens are appended to the shortest row. They are masked
        and not learnt, but every rank then runs the same modules.
        """
        self.check_micro_batch(len(samples), {"packing": self.packs is not None})
        processor = self.chat.processor
        rows = [list(sample["pieces"]) for sample in samples]
        lengths = [sum(map(len, row)) for row in rows]
        seen = [torch.ones(length, dtype=torch.int64) for length in lengths]
        if not any(piece.vision for row in rows for piece in row) and (blank := processor.blank) is not None:
            shortest = lengths.index(min(lengths))
            rows[shortest].append(blank)
            seen[shortest] = torch.cat([seen[shortest], torch.zeros(len(blank), dtype=torch.int64)])
        values = {"input_ids": int(processor.tokenizer.pad_token_id or 0), "labels": IGNORED_LABEL}
        names = dict.fromkeys(name for row in rows for piece in row for name in piece.tokens)
        inputs = {
            name: pad_sequence(
                [torch.cat([piece.of(name) for piece in row]) for row in rows],
                batch_first=True,
                padding_value=values.get(name, 0),
            )
            for name in names
        }
        label_weights = inputs.pop("label_weights", None)
        vision = processor.joined([[piece.vision for piece in row if piece.vision] for row in rows])
        inputs |= vision
        if self.packs is None:
            inputs["attention_mask"] = pad_sequence(seen, batch_first=True)
        else:
            inputs["position_ids"] = positions([len(piece) for piece in rows[0]])[None]
        weights = torch.tensor([sample["weight"] for sample in samples], dtype=torch.float32)
        keys, ids = [sample["key"] for sample in samples], [sample["id"] for sample in samples]
        batch = TextBatch(keys, weights, ids, inputs=inputs, label_weights=label_weights)
        if self.packs is None:
            return replace(batch, references=[sample["answers"] for sample in samples])
        (row,) = rows
        sections = {
            name: _section(value, [p.vision.get(name) for p in row]) for name, value in vision.items()
        }
        return replace(batch, pieces=[[len(piece) for piece in row]], sections=sections)

    def rendered(self, index: int) -> list[tuple[str, bool]]:
        """The text of a sample in pieces, each with whether it is learnt.

        Raises:
            DataError: the sample cannot be read.
        """
        found = []
        for piece in self[index]["pieces"]:
            pairs = zip(piece.tokens["input_ids"].tolist(), piece.tokens["labels"].tolist(), strict=True)
            for learnt, run in groupby(pairs, key=lambda pair: pair[1] != IGNORED_LABEL):
                found.append((self._shown([token for token, _ in run]), learnt))
        return found

    def contents(self, index: int) -> list[tuple[str, str]]:
        """The files of rows of a sample, and the kinds of their pictures and videos, such as `image .png`."""
        rows = map(self.rows.__getitem__, self._members(index))
        found = [
            (self.wanted.sources[row.source].annotations, kind) for row in rows for kind in kinds_of(row)
        ]
        return list(dict.fromkeys(found))

    def pictures(self, index: int) -> list[tuple[str, Tensor]]:
        """Name and frames of each image and video of a sample, uint8 [F,Y,X,3]; of a packed row, of those
        conversations that can be read.

        Raises:
            DataError: the only conversation cannot be read.
        """
        media, found = self.chat.processor.media, []
        members = self._members(index)
        for row in map(self.rows.__getitem__, members):
            with nullcontext() if len(members) == 1 else suppress(DataError):
                for kind, file in self._checked(row)[2]:
                    frames = torch.stack(media.pixels(file, media.shown(kind, file)))
                    found.append((file.name, frames.permute(0, 2, 3, 1)))
        return found

    def _members(self, index: int) -> list[int]:
        """The numbers of the rows of a sample, packed for epoch 0 and seed 0."""
        members = [index] if self.packs is None else self.packs.members(index, 0, 0)
        return self.order[members].tolist()

    def _shown(self, tokens: Sequence[int]) -> str:
        """The text of tokens; of one that repeats, as those of images do, the number."""
        decode = self.chat.processor.tokenizer.decode
        runs = [(token, len([*same])) for token, same in groupby(tokens)]
        text = ""
        for many, group in groupby(runs, key=lambda run: run[1] > _MANY):
            if many:
                text += "".join(f"{decode([token])} x {count} " for token, count in group)
            else:
                text += decode([token for token, count in group for _ in range(count)])
        return text

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
        return QuestionInputs(cls._chat(cls.config(**fields), reader))

    def _check_reach(self, folder: str) -> None:
        """Warns of conversations longer than the model's positions."""
        reach = _positions_of(read_mapping(Path(folder) / "config.json"))
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
            encoded, name, answers = self._conversation(int(self.order[index]))
            return {"pieces": [encoded], "id": name, "answers": answers}
        members = self.packs.members(index, seed, epoch)
        read, faults = self._together(members)
        if not read:
            raise PartsError(faults, len(members))
        names = ", ".join(name for _, name, _ in read)
        if (total := sum(len(encoded) for encoded, *_ in read)) > self.packs.capacity:
            raise DataError(
                f"the conversations of a packed row have {plural(total, 'token')}, more than max_length "
                f"{self.packs.capacity}: images or videos have changed since their lengths were measured",
                where=names,
                hint="start again"
                if (kept := self.wanted.lengths) is None
                else f"delete {kept}, and start again",
            )
        missing = {"missing": PartsError(faults, len(members))} if faults else {}
        return {"pieces": [encoded for encoded, *_ in read], "id": names, **missing}

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
        """A row with its pictures, its name, and the reference answers to its last question. Without
        reference answers, evaluation uses the labels."""
        row = self.rows[number]
        name, found, files = self._checked(row)
        encoded, whole = self.chat.row(found, files, name, pixels=True)
        return encoded, name, found.answers if whole and found.turns[-1].role == "assistant" else ()

    def _checked(self, row: RawRow) -> tuple[str, Conversation, Files]:
        """A row's name, its conversation, and its images and videos."""
        source = self.wanted.sources[row.source]
        name = f"{source.annotations}, {row.place}"
        found = conversation(row.value, name)
        folder = Path(source.annotations).parent if source.folder is None else Path(source.folder)
        return name, found, located(found.media, folder)

    @cached_property
    def _counts(self) -> Tensor:
        """Tokens of an epoch's conversations, and those of their images, [N,2]; 0 if one cannot be read."""
        return self._kept.of(self.rows, self._length)[self.order]

    def _tokens(self) -> tuple[Tensor, Tensor]:
        """Token counts [N] of an epoch's conversations, and [N] whether each cannot be read.

        Unreadable conversations count with the average length of the others, and are packed together. So
        their share of packed rows equals their share of conversations, and reading these rows reports the
        errors."""
        found = self._counts[:, 0]
        bad = found == 0
        usual = self.chat.max_length if bad.all() else round(float(found[~bad].double().mean()))
        return found.masked_fill(bad, usual), bad

    def _length(self, row: RawRow) -> Count:
        name, found, files = self._checked(row)
        encoded, _ = self.chat.row(found, files, name, pixels=False)
        return len(encoded), sum(end - start for start, end in encoded.blocks)


def _section(joined: Tensor, parts: Sequence[Tensor | None]) -> tuple[int, list[int]]:
    """The dimension along which the parts of a tensor were joined, and the length of each."""
    for axis, whole in enumerate(joined.shape):
        lengths = [0 if part is None else part.shape[axis] for part in parts]
        if sum(lengths) == whole:
            return axis, lengths
    raise AssertionError("a tensor of pictures is joined from those of conversations")


_MANY = 3
"""Most times that a token is shown in a row."""


_NO_FACTS = ("sources", "packing", "lengths", "reader", "trust_remote_code")
"""Options of which a row's number of tokens does not depend, or which its file holds itself."""


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


def _read(sources: Sequence[ConversationSource]) -> tuple[PackedRows[RawRow], Tensor]:
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


def _rows(sources: Sequence[ConversationSource], counts: list[int]) -> Iterator[RawRow]:
    """Rows of all sources, one at a time. Appends the number of rows of each source to `counts`."""
    for number, source in enumerate(sources):
        counts.append(0)
        for row in some_usable(Path(source.annotations), number):
            counts[-1] += 1
            yield row
        if source.folder is not None:
            check_folder(Path(source.folder), "the folder of the images")
