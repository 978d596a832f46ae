"""Answers that a Transformers model generates, with their references; names of classes."""

from __future__ import annotations

import copy
import re
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
from mm_core.errors import ContractError, DataError, plural
from mm_core.runtime.ranks import Ranks
from mm_core.tasks.pretrained.answer_tokens import SeededTokenSampler, StopWhenAsked, joined
from mm_core.tasks.pretrained.batches import limits_of
from mm_core.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers import PretrainedConfig as ModelConfig

Words = tuple[list[str], list[tuple[str, ...]]]
"""(the model's text for each row, the reference texts of each row)."""


_MEDIA = re.compile("^(image|video|audio).*(_token_id|_token_index)$")
"""Keys of config.json with the tokens that a model replaces by features."""


class Answers:
    """Generates answers to prompts, and to the last question of each row of a batch.

    The prompt of a batch's row is everything before its last run of labels (for an encoder-decoder model, the
    whole encoder input); such prompts are answered greedily. Settings of the folder's generation_config.json
    that do not choose tokens (a repetition penalty, for example) apply as well.

    Args:
        model: a Transformers model.
        wanted: the task's config; its folder must contain a tokenizer.
        max_new_tokens: maximum length of an answer.
        where: the config key that requests answers, for error messages.

    Raises:
        ContractError: the model generates no text.
    """

    def __init__(
        self, model: PreTrainedModel, wanted: PretrainedConfig, max_new_tokens: int, where: str
    ) -> None:
        if not model.can_generate():
            raise ContractError(
                f"{type(model).__name__} generates no text",
                where=where,
                accepted="a class that generates text: AutoModelForCausalLM, AutoModelForSeq2SeqLM, ...",
                hint="set task.auto_class to such a class, or remove task.max_new_tokens",
            )
        self.model, self.max_new_tokens = model, max_new_tokens
        self.tokenizer = open_tokenizer(wanted.from_pretrained, wanted.trust_remote_code)
        self._composite = bool(getattr(model.config, "is_encoder_decoder", False))
        self._ends = sorted(_ends(model, self.tokenizer))
        self._gathers = False
        self._positions = limits_of(model).positions
        named = [(key, value) for key, value in model.config.to_dict().items() if isinstance(value, int)]
        self._media = {v for key, v in named if _MEDIA.search(key)}
        self._settings = _settings(model)
        self._settings.eos_token_id, self._settings.pad_token_id = self._ends, self.tokenizer.pad_token_id

    def of(self, batch: TextBatch) -> Words:
        """The model's answers to the rows of a batch, with their references; called by all ranks together."""
        given = {name: tensor for name, tensor in batch.inputs.items() if name != "labels"}
        labels = batch.inputs["labels"]
        if not self._composite:
            given = prompts(given, labels, self.tokenizer.pad_token_id, self._media)
        found = self._after(given)
        answered = labels != IGNORED_LABEL if self._composite else _last_labels(labels)
        given_answers = batch.references or [()] * len(labels)
        wanted = [
            known or (self.text(row[last].tolist()),)
            for known, row, last in zip(given_answers, labels, answered, strict=True)
        ]
        return found, wanted

    def _after(self, given: Mapping[str, Tensor]) -> list[str]:
        """The answers to the prompts of a batch. A batch with images cannot be split by rows: there the
        longest prompt limits the length of all answers."""
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
        """Answers prompts in one batch; an answer does not depend on the other prompts.

        Args:
            questions: the model inputs of each prompt.
            decoding: temperature, top_p, seed and length.
            numbers: the number of each answer, which seeds its draws.
            on_text: called with new text of the first answer.
            stopped: called after each token; True ends all answers.
        """
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
        """The answers to prompts of the given lengths.

        Prompts with the same room for an answer are generated together, so that the length of one prompt does
        not shorten the answer to another.

        Args:
            lengths: tokens of each prompt.
            max_new_tokens: maximum length of an answer.
            taken: returns the inputs of the given rows as one batch.
            listening: returns further arguments of `generate` for the given rows.
        """
        groups: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            groups.setdefault(min(max_new_tokens, self._room(length)), []).append(row)
        found, ranks = [""] * len(lengths), Ranks.current()
        for room in self._rooms(groups, ranks):
            if (rows := groups.get(room)) is None:
                self._generate(_briefest(taken([lengths.index(min(lengths))])), 1, ranks.count > 1)
                continue
            answers = self._generate(taken(rows), room, ranks.count > 1, **listening(rows))
            for row, tokens in zip(rows, answers, strict=True):
                found[row] = self.text(tokens.tolist())
        return found

    def _rooms(self, own: Collection[int], ranks: Ranks) -> list[int]:
        """The answer lengths of all ranks. Every rank takes part in every generation, with the same number of
        forwards: a rank whose answers end earlier continues, so its prompts need as much room."""
        if self._positions is None or self._composite or ranks.count == 1:
            return list(own)
        return sorted(set().union(*ranks.gather(set(own))))

    def check(self, question: Mapping[str, Tensor]) -> None:
        """Checks that a prompt leaves the model room for an answer.

        Raises:
            DataError: the prompt is too long.
        """
        self._room(question["input_ids"].shape[1])

    def _generate(self, given: Mapping[str, Tensor], room: int, several: bool, **listening: object) -> Tensor:
        """Generated tokens [B, up to `room`], without the prompts; `several` ranks generate together."""
        sharded = isinstance(self.model, FSDPModule)
        if sharded and not self._gathers:
            # FSDP2 gathers parameters for `forward` alone, and `generate` runs a vision tower before it.
            register_fsdp_forward_method(self.model, "generate")
            self._gathers = True
        settings = copy.deepcopy(self._settings)
        settings.max_new_tokens = room
        # As an argument, settings equal to the library's defaults would be replaced by the folder's.
        own, self.model.generation_config = self.model.generation_config, settings
        try:
            found: Tensor = self.model.generate(**given, **listening, synced_gpus=several)
        finally:
            self.model.generation_config = own
        # A separate decoder begins with one token, which some models also use as the end.
        return found[:, 1 if self._composite else given["input_ids"].shape[1] :]

    def _room(self, length: int) -> int:
        """How many tokens fit after prompts of this length. DataError if none does."""
        if self._positions is None:
            return sys.maxsize
        room = self._positions - (1 if self._composite else length)
        if room < 1 or length > self._positions:
            kind = type(self.model).__name__
            raise DataError(
                f"a prompt has {plural(length, 'token')}, but {kind} has only {self._positions} positions "
                "for prompt and answer together",
                where="data",
                hint="lower max_length of the dataset",
            )
        return room

    def text(self, row: Sequence[int]) -> str:
        """Text of an answer's tokens, up to the first end token."""
        tokens = list(takewhile(lambda token: token not in self._ends, row))
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


@dataclass
class _Listener:
    """A streamer for Transformers' `generate`: passes the text of the first answer on as it grows."""

    answers: Answers
    on_text: OnText
    _tokens: list[int] | None = None  # None until the prompt has arrived
    _passed: str = ""

    def put(self, tokens: Tensor) -> None:
        """Receives the prompt, then each new token of the answer. Text that may still change is kept back:
        half a character, and trailing white space."""
        if self._tokens is None:
            self._tokens = []
            return
        self._tokens += tokens.flatten()[:1].tolist()
        self._pass_on(self.answers.text(self._tokens).rstrip("\ufffd"))

    def end(self) -> None:
        """Ends the answer: passes on the text that was kept back."""
        self._pass_on(self.answers.text(self._tokens or []))

    def _pass_on(self, text: str) -> None:
        if len(text) > len(self._passed) and text.startswith(self._passed):
            self.on_text(text[len(self._passed) :])
            self._passed = text


def class_names(config: ModelConfig, predictions: Tensor, labels: Tensor, batch: TextBatch) -> Words:
    """The names of predicted classes and of the correct ones, for a batch of a classifier.

    Args:
        config: the model's config, which names the classes.
        predictions: [B].
        labels: [B].
        batch: its references, if any, replace the names of the labels.
    """
    names: Mapping[int, str] = config.id2label
    found, wanted = (
        [str(names.get(number, number)) for number in numbers.tolist()] for numbers in (predictions, labels)
    )
    return found, batch.references or [(name,) for name in wanted]


def prompts(
    inputs: Mapping[str, Tensor], labels: Tensor, pad: int, media: Collection[int] = ()
) -> dict[str, Tensor]:
    """The prompts of a causal model's batch: its inputs up to each row's last run of labels, padded left.

    In a batch with images their placeholders stay: those after the prompt are masked, and moved before the
    prompt's last token, from which generation continues, or to the front of a prompt without images.

    Args:
        inputs: of the batch.
        labels: [B,L].
        pad: the padding token.
        media: tokens that are placeholders; (): not known, so that all tokens stay.

    Raises:
        ContractError: rows are packed, or a row has nothing before its last labels.
    """
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    if mask.dim() != 2 or _begin_anew(inputs, mask):
        raise ContractError(
            "rows packed into one sequence cannot be answered one by one",
            where="task.max_new_tokens",
            hint="set packing: false in data.validation",
        )
    asked = (_last_labels(labels).cumsum(1) == 0) & (mask > 0)
    if not bool(asked.any(1).all()):
        raise ContractError(
            "a row has nothing before its last labels, so there is no prompt to answer",
            where="task.max_new_tokens",
            accepted="label -100 on every token of the prompt",
            hint="remove task.max_new_tokens if the data have no prompts",
        )
    cut = {**inputs, "attention_mask": torch.where(asked, mask, 0)}
    cut.pop("position_ids", None)  # the model counts those that the mask shows
    others = any(tensor.shape != ids.shape for tensor in cut.values())
    places = torch.isin(ids, ids.new_tensor(sorted(media))) if media else ids != pad
    orders = [_order(*rows) for rows in zip(asked, places & ~asked & others, places, strict=True)]
    tokens = {name: tensor for name, tensor in cut.items() if tensor.shape == ids.shape}
    rows = [{name: t[row, order][None] for name, t in tokens.items()} for row, order in enumerate(orders)]
    return {**cut, **joined(rows, pad)}


def _begin_anew(inputs: Mapping[str, Tensor], mask: Tensor) -> bool:
    """Whether positions begin again within a row: it then packs several texts that do not see each other."""
    positions = inputs.get("position_ids")
    if positions is None or positions.shape != mask.shape:
        return False
    both = (mask[:, 1:] > 0) & (mask[:, :-1] > 0)
    return bool((both & (positions[:, 1:] <= positions[:, :-1])).any())


def _order(asked: Tensor, hidden: Tensor, places: Tensor) -> Tensor:
    """Order of a row's tokens: the prompt, with the hidden ones before its last, or in front of a prompt
    without placeholders, where they take no room of a sliding window."""
    shown, masked = asked.nonzero().flatten(), hidden.nonzero().flatten()
    if not bool((asked & places).any()):
        return torch.cat([masked, shown])
    return torch.cat([shown[:-1], masked, shown[-1:]])


def _last_labels(labels: Tensor) -> Tensor:
    """[B,L] bool: each row's last run of labels that are not ignored."""
    known = (labels != IGNORED_LABEL).int()
    runs = (known.diff(dim=1, prepend=torch.zeros_like(known[:, :1])) > 0).cumsum(1)
    return (known > 0) & (runs == runs[:, -1:])


def _briefest(given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The last token of a prompt; the whole prompt if it has other inputs than tokens."""
    ids = given["input_ids"]
    if any(tensor.shape != ids.shape for tensor in given.values()):
        return given
    return {name: tensor[:, -1:] for name, tensor in given.items()}


def _settings(model: PreTrainedModel) -> GenerationConfig:
    """The generation settings of the model's folder, without those that choose tokens."""
    found = copy.deepcopy(model.generation_config)
    found.do_sample, found.num_beams, found.max_length = False, 1, None
    found.temperature = found.top_p = found.top_k = None
    return found


def _ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that end an answer, from the tokenizer and from generation_config.json."""
    return {
        int(token)
        for tokens in (tokenizer.eos_token_id, model.generation_config.eos_token_id)
        if tokens is not None
        for token in (tokens if isinstance(tokens, list | tuple) else [tokens])
    }
