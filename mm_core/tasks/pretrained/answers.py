"""What a Transformers model says of a row in words, and what would have been right."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from mm_core.builtin.configs.pretrained import PretrainedConfig
from mm_core.contracts import IGNORED_LABEL, Decoding, OnText, TextBatch
from mm_core.errors import ContractError, DataError
from mm_core.runtime.ranks import Ranks
from mm_core.tasks.pretrained.answer_tokens import SeededTokenSampler, StopWhenAsked, joined
from mm_core.tasks.pretrained.batches import limits_of
from mm_core.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers import PretrainedConfig as ModelConfig

Words = tuple[list[str], list[tuple[str, ...]]]
"""A text of each row, and its references."""


class Answers:
    """Generates from a prompt; of a batch, greedily from what stands before the last labels of each row: what
    was asked last, after all that was said before. An encoder's input is all prompt. What the folder's
    generation_config.json says beside the choice of tokens (a penalty of repetition, say) holds here too.

    Args:
        model: of Transformers. wanted: names its folder, which has a tokenizer. max_new_tokens: of an answer.
        where: the key that asks for answers.
    """

    def __init__(
        self, model: PreTrainedModel, wanted: PretrainedConfig, max_new_tokens: int, where: str
    ) -> None:
        if not model.can_generate():
            raise ContractError(
                f"{type(model).__name__} generates no text",
                where=where,
                accepted="none; or a class that does: AutoModelForCausalLM, AutoModelForSeq2SeqLM, ...",
            )
        self.model, self.max_new_tokens = model, max_new_tokens
        self.tokenizer = open_tokenizer(wanted.from_pretrained, wanted.trust_remote_code)
        self._composite = bool(getattr(model.config, "is_encoder_decoder", False))
        self._ends = sorted(_ends(model, self.tokenizer))
        self._gathers = False
        self._positions = limits_of(model).positions
        self._settings = _settings(model)
        self._settings.eos_token_id, self._settings.pad_token_id = self._ends, self.tokenizer.pad_token_id

    def of(self, batch: TextBatch) -> Words:
        """The rows' answers. Ranks generate together: each forward is one of all of them."""
        given = {name: tensor for name, tensor in batch.inputs.items() if name != "labels"}
        labels = batch.inputs["labels"]
        given = given if self._composite else prompts(given, labels, self.tokenizer.pad_token_id)
        found = self._after(given)
        answered = labels != IGNORED_LABEL if self._composite else _last_labels(labels)
        given_answers = batch.references or [()] * len(labels)
        wanted = [
            known or (self.text(row[last].tolist()),)
            for known, row, last in zip(given_answers, labels, answered, strict=True)
        ]
        return found, wanted

    def _after(self, given: Mapping[str, Tensor]) -> list[str]:
        """What follows the prompts of a batch. Where images lie beside them, no row can be taken out, so that
        all end where the longest has to."""
        ids = given["input_ids"]
        whole = self._composite or any(tensor.shape != ids.shape for tensor in given.values())
        lengths = [ids.shape[1]] * len(ids) if whole else (given["attention_mask"] > 0).sum(1).tolist()

        def taken(rows: list[int]) -> Mapping[str, Tensor]:
            width = max(lengths[row] for row in rows)
            return given if whole else {name: tensor[rows, -width:] for name, tensor in given.items()}

        return self._texts(lengths, self.max_new_tokens, taken)

    def to(
        self,
        questions: Sequence[Mapping[str, Tensor]],
        decoding: Decoding,
        numbers: Sequence[int],
        on_text: OnText | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> list[str]:
        """The answers to prompts, generated together; what is asked beside a prompt changes nothing of its
        answer. on_text: of the first one. stopped: asked after each token whether this is enough."""
        lengths = [each["input_ids"].shape[1] for each in questions]

        def taken(rows: list[int]) -> Mapping[str, Tensor]:
            chosen = [questions[row] for row in rows]
            return joined(chosen, self.tokenizer.pad_token_id, left=not self._composite)

        def listening(rows: list[int]) -> dict[str, object]:
            drawn = SeededTokenSampler(decoding, [numbers[row] for row in rows])
            return {
                "streamer": _Listener(self, on_text) if on_text is not None and rows[0] == 0 else None,
                "logits_processor": [drawn] if decoding.temperature > 0 else None,
                "stopping_criteria": [StopWhenAsked(stopped)] if stopped is not None else None,
            }

        return self._texts(lengths, decoding.max_new_tokens or self.max_new_tokens, taken, listening)

    def _texts(
        self,
        lengths: Sequence[int],
        max_new_tokens: int,
        taken: Callable[[list[int]], Mapping[str, Tensor]],
        listening: Callable[[list[int]], Mapping[str, object]] = lambda rows: {},
    ) -> list[str]:
        """The answers to prompts of these lengths. Those for which the model has positions for as many tokens
        are answered together, so that how long one is says nothing of how far another is answered.

        taken: the inputs of some of them, as one batch. listening: what else `generate` is given of these.
        """
        groups: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            groups.setdefault(min(max_new_tokens, self._room(length)), []).append(row)
        found = [""] * len(lengths)
        for room in self._rooms(groups):
            if (rows := groups.get(room)) is None:
                self._generate(_briefest(taken([lengths.index(min(lengths))])), 1)
                continue
            answers = self._generate(taken(rows), room, **listening(rows))
            for row, tokens in zip(rows, answers, strict=True):
                found[row] = self.text(tokens.tolist())
        return found

    def _rooms(self, own: Collection[int]) -> list[int]:
        """This rank's and those of others: all take part in each generation, for as many forwards. One whose
        answers end earlier goes on, so that its prompts have to leave the model as many positions."""
        if self._positions is None or self._composite or Ranks.current().count == 1:
            return list(own)
        return sorted(set().union(*Ranks.current().gather(set(own))))

    def check(self, question: Mapping[str, Tensor]) -> None:
        """DataError for a prompt that leaves the model no room for an answer."""
        self._room(question["input_ids"].shape[1])

    def _generate(self, given: Mapping[str, Tensor], max_new_tokens: int, **listening: object) -> Tensor:
        """[B, up to max_new_tokens]: what follows the prompts."""
        sharded = isinstance(self.model, FSDPModule)
        if sharded and not self._gathers:
            # FSDP2 gathers for a forward alone, and the library runs a vision tower before it.
            register_fsdp_forward_method(self.model, "generate")
            self._gathers = True
        settings = copy.deepcopy(self._settings)
        settings.max_new_tokens = max_new_tokens
        # As an argument, they would be filled from the folder's where they are the library's defaults.
        own, self.model.generation_config = self.model.generation_config, settings
        try:
            found: Tensor = self.model.generate(**given, **listening, synced_gpus=Ranks.current().count > 1)
        finally:
            self.model.generation_config = own
        # A decoder of its own begins with one token, which for some models is also the end.
        return found[:, 1 if self._composite else given["input_ids"].shape[1] :]

    def _room(self, length: int) -> int:
        """How many tokens fit behind prompts of this length. DataError where none does."""
        if self._positions is None:
            return sys.maxsize
        room = self._positions - (1 if self._composite else length)
        if room < 1 or length > self._positions:
            kind = type(self.model).__name__
            raise DataError(
                f"a prompt has {length} tokens, and {kind} has {self._positions} positions, answer included",
                where="data",
                hint="lower max_length of the dataset",
            )
        return room

    def text(self, row: Sequence[int]) -> str:
        """Tokens as words, up to the first that ends an answer."""
        tokens = list(takewhile(lambda token: token not in self._ends, row))
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


@dataclass
class _Listener:
    """What Transformers' `generate` takes for a streamer: tells an answer on, word by word."""

    answers: Answers
    on_text: OnText
    _tokens: list[int] | None = None  # until the prompt has come
    _told: str = ""

    def put(self, tokens: Tensor) -> None:
        """The prompt first, then each token, of the first row. What may still change is held back: half a
        character, and white space that may be the last."""
        if self._tokens is None:
            self._tokens = []
            return
        self._tokens += tokens.flatten()[:1].tolist()
        self._tell(self.answers.text(self._tokens).rstrip("\ufffd"))

    def end(self) -> None:
        """Nothing more comes."""
        self._tell(self.answers.text(self._tokens or []))

    def _tell(self, text: str) -> None:
        if len(text) > len(self._told) and text.startswith(self._told):
            self.on_text(text[len(self._told) :])
            self._told = text


def class_names(config: ModelConfig, predictions: Tensor, labels: Tensor, batch: TextBatch) -> Words:
    """The names of classes [B] that were found, and of those that are right."""
    names: Mapping[int, str] = config.id2label
    found, wanted = (
        [str(names.get(number, number)) for number in numbers.tolist()] for numbers in (predictions, labels)
    )
    return found, batch.references or [(name,) for name in wanted]


def prompts(inputs: Mapping[str, Tensor], labels: Tensor, pad: int) -> dict[str, Tensor]:
    """The inputs of a causal model up to each row's last run of labels, padded on the left. ContractError for
    a row that begins with it.

    What is no row of tokens (images) stays as it is, and so do all tokens then, since some stand for images:
    those behind the prompt are hidden, and moved before its last token, which generation goes on from.
    """
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    if mask.dim() != 2 or _begin_anew(inputs, mask):
        raise ContractError(
            "rows that are packed into one sequence cannot be answered one by one",
            where="task.max_new_tokens",
            hint="evaluate a dataset that does not pack: packing: false of data.validation",
        )
    asked = (_last_labels(labels).cumsum(1) == 0) & (mask > 0)
    if not bool(asked.any(1).all()):
        raise ContractError(
            "a row has nothing before its last labels, so there is no prompt to answer",
            where="task.max_new_tokens",
            accepted="labels of -100 on the prompt",
            hint="leave task.max_new_tokens out where texts are learnt as a whole",
        )
    cut = {**inputs, "attention_mask": torch.where(asked, mask, 0)}
    cut.pop("position_ids", None)  # the model counts those that the mask shows
    others = any(tensor.shape != ids.shape for tensor in cut.values())
    hidden = (ids != pad) & ~asked & others
    orders = [_order(*rows) for rows in zip(asked, hidden, strict=True)]
    tokens = {name: tensor for name, tensor in cut.items() if tensor.shape == ids.shape}
    rows = [{name: t[row, order][None] for name, t in tokens.items()} for row, order in enumerate(orders)]
    return {**cut, **joined(rows, pad)}


def _begin_anew(inputs: Mapping[str, Tensor], mask: Tensor) -> bool:
    """Whether positions say that a row holds several texts, each of which sees itself alone."""
    positions = inputs.get("position_ids")
    if positions is None or positions.shape != mask.shape:
        return False
    both = (mask[:, 1:] > 0) & (mask[:, :-1] > 0)
    return bool((both & (positions[:, 1:] <= positions[:, :-1])).any())


def _order(asked: Tensor, hidden: Tensor) -> Tensor:
    """Places of a row's tokens: the prompt, with what is hidden before its last one."""
    shown = asked.nonzero().flatten()
    return torch.cat([shown[:-1], hidden.nonzero().flatten(), shown[-1:]])


def _last_labels(labels: Tensor) -> Tensor:
    """[B,L] bool: where each row's last run of labels that count is."""
    known = (labels != IGNORED_LABEL).int()
    runs = (known.diff(dim=1, prepend=torch.zeros_like(known[:, :1])) > 0).cumsum(1)
    return (known > 0) & (runs == runs[:, -1:])


def _briefest(given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A prompt's last token, where it is of tokens alone."""
    ids = given["input_ids"]
    if any(tensor.shape != ids.shape for tensor in given.values()):
        return given
    return {name: tensor[:, -1:] for name, tensor in given.items()}


def _settings(model: PreTrainedModel) -> GenerationConfig:
    """What the model's folder says of its generation, without its choice of tokens."""
    found = copy.deepcopy(model.generation_config)
    found.do_sample, found.num_beams, found.max_length = False, 1, None
    found.temperature = found.top_p = found.top_k = None
    return found


def _ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that end an answer, wherever the folder names them."""
    return {
        int(token)
        for tokens in (tokenizer.eos_token_id, model.generation_config.eos_token_id)
        if tokens is not None
        for token in (tokens if isinstance(tokens, list | tuple) else [tokens])
    }
