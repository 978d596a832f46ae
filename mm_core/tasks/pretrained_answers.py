"""What a Transformers model says of a row in words, and what would have been right."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mm_core.contracts import TextBatch
from mm_core.errors import ContractError
from mm_core.tasks.pretrained_loss import IGNORED
from mm_core.tokenizer import open_tokenizer
from mm_core.weights.formats import read_mapping

Words = tuple[list[str], list[tuple[str, ...]]]
"""A text of each row, and its references."""


class Answers:
    """Generates greedily from what stands before the first label of a row; an encoder's input is all prompt.

    Args:
        model: of Transformers. folder: its own, with a tokenizer. max_new_tokens: of an answer.
        trust_remote_code: Python files of the folder may run.
    """

    def __init__(self, model: Any, folder: str, max_new_tokens: int, trust_remote_code: bool = False) -> None:
        if not model.can_generate():
            raise ContractError(
                f"{type(model).__name__} generates no text",
                where="task.max_new_tokens",
                accepted="none; or a class that does: AutoModelForCausalLM, AutoModelForSeq2SeqLM, ...",
            )
        self.model, self.max_new_tokens = model, max_new_tokens
        self.tokenizer = open_tokenizer(folder, trust_remote_code)
        self._composite = bool(getattr(model.config, "is_encoder_decoder", False))
        self._ends = sorted(_ends(model, self.tokenizer, Path(folder)))

    def of(self, batch: TextBatch) -> Words:
        """The rows' answers. Ranks generate together: each forward is one of all of them."""
        given = {name: tensor for name, tensor in batch.inputs.items() if name != "labels"}
        labels = batch.inputs["labels"]
        given = given if self._composite else prompts(given, labels, self.tokenizer.pad_token_id)
        found = self.model.generate(
            **given,
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            num_beams=1,
            eos_token_id=self._ends,
            pad_token_id=self.tokenizer.pad_token_id,
            synced_gpus=dist.is_initialized() and dist.get_world_size() > 1,
        )
        # A decoder of its own begins with one token, which for some models is also the end.
        new = found[:, 1 if self._composite else given["input_ids"].shape[1] :]
        wanted = batch.references or [(self._text(_first(row)),) for row in labels]
        return [self._text(row) for row in new], wanted

    def _text(self, row: Tensor) -> str:
        """Up to the first token that ends an answer."""
        tokens = list(takewhile(lambda token: token not in self._ends, row.tolist()))
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def class_names(config: Any, predictions: Tensor, labels: Tensor, batch: TextBatch) -> Words:
    """The names of classes [B] that were found, and of those that are right."""
    names: Mapping[int, str] = config.id2label
    found, wanted = (
        [str(names.get(number, number)) for number in numbers.tolist()] for numbers in (predictions, labels)
    )
    return found, batch.references or [(name,) for name in wanted]


def prompts(inputs: Mapping[str, Tensor], labels: Tensor, pad: int) -> dict[str, Tensor]:
    """The inputs of a causal model up to each row's first label, padded on the left; what is no row of tokens
    (images) stays as it is. ContractError for a row that begins with a label."""
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    if mask.dim() != 2:
        raise ContractError(
            "rows that are packed into one sequence can not be answered one by one",
            where="task.max_new_tokens",
            hint="evaluate a dataset that does not pack",
        )
    known = labels != IGNORED
    places = torch.arange(ids.shape[1], device=ids.device)
    first = torch.where(known.any(1), known.int().argmax(1), ids.shape[1])
    kept = (places < first[:, None]) & (mask > 0)
    lengths = kept.sum(1).tolist()
    if not all(lengths):
        raise ContractError(
            "a row has nothing before its first label, so there is no prompt to answer",
            where="task.max_new_tokens",
            accepted="labels of -100 on the prompt",
            hint="leave task.max_new_tokens out where texts are learnt as a whole",
        )
    cut = {**inputs, "attention_mask": mask}
    cut.pop("position_ids", None)  # the model counts those that the mask shows
    for name, tensor in cut.items():
        if tensor.shape == ids.shape:
            padded = tensor.new_full((len(ids), max(lengths)), pad if name == "input_ids" else 0)
            for row, length in enumerate(lengths):
                padded[row, padded.shape[1] - length :] = tensor[row, kept[row]]
            cut[name] = padded
    return cut


def _first(labels: Tensor) -> Tensor:
    """The first run of labels that count, of one row."""
    known = (labels != IGNORED).int()
    runs = torch.cumsum((torch.diff(known, prepend=known.new_zeros(1)) > 0).int(), 0)
    return labels[(known > 0) & (runs == 1)]


def _ends(model: Any, tokenizer: Any, folder: Path) -> set[int]:
    """The tokens that end an answer, wherever the folder names them."""
    found = [tokenizer.eos_token_id, model.generation_config.eos_token_id]
    path = folder / "generation_config.json"
    if path.is_file():
        found.append(read_mapping(path).get("eos_token_id"))
    return {
        int(token)
        for tokens in found
        if tokens is not None
        for token in (tokens if isinstance(tokens, list | tuple) else [tokens])
    }
