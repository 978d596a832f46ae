"""What is asked of batches of task `pretrained`, mostly by data workers, who also count labels.

An accelerator would stop at most of what is refused here without a word of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from mm_core.contracts import IGNORED_LABEL, Batch, TextBatch
from mm_core.errors import ContractError
from mm_core.runtime.ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_POSITIONS = {"position_embeddings", "embed_positions", "wpe"}
"""What Transformers' models call a table of as many rows as a text may have tokens."""

_SAME_NAMES = "the same names in every batch: a blank image, say, where a row has none"
_TOKENS = {"ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "ForTokenClassification"}


@dataclass(frozen=True)
class Limits:
    """What a model takes; None is no limit.

    vocabulary, positions: rows of its tables. tokens, rows: whether its labels are known to be one a token,
    or one a row. classes: how many those have; 1: a row's label is a number. pad: the token by which it may
    look for the end of a row.
    """

    vocabulary: int | None = None
    positions: int | None = None
    tokens: bool = False
    rows: bool = False
    classes: int | None = None
    pad: int | None = None

    def checked(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inputs, with the model's own padding token. ContractError for those that it cannot take."""
        if self.classes is not None and inputs["labels"].dim() == 1:
            self._check_classes(inputs["labels"], self.classes)
        if self.tokens and inputs["labels"].dim() == 1:
            raise _mismatch_error(
                "a row has one label, and the model learns a label for each token",
                accepted="labels [B, L] (text_rows: without `label`)",
                hint="task.auto_class: AutoModelForSequenceClassification learns one a row",
            )
        ids = inputs.get("input_ids")
        if ids is None or ids.dim() != 2 or not ids.numel():
            return inputs
        if self.positions is not None and ids.shape[1] > self.positions:
            raise _mismatch_error(
                f"a batch is {ids.shape[1]} tokens long, and the model has positions for {self.positions}",
                hint=f"cut longer rows: max_length: {self.positions} of text_rows",
            )
        if self.vocabulary is not None and (largest := int(ids.max())) >= self.vocabulary:
            raise _mismatch_error(
                f"a row has the token {largest}, and the model has {self.vocabulary} tokens, from 0",
                hint="the tokenizer is another model's: point `tokenizer` at the folder of this one",
            )
        return self._padded(inputs, ids) if self.rows else inputs

    def _check_classes(self, labels: Tensor, classes: int) -> None:
        if classes == 1:
            if not labels.is_floating_point():
                raise _mismatch_error(
                    "a row's label is a class, and the model's one output would estimate the class's number",
                    accepted="a number a row (text_rows: label_type: number)",
                    hint="task.labels, or task.overrides: {num_labels: ...}, makes a model of classes",
                )
            return
        if labels.is_floating_point():
            raise _mismatch_error(
                f"the labels are numbers, and the model has {classes} classes",
                accepted="a class a row, from 0 (text_rows: label_type: class)",
                hint="task.overrides: {num_labels: 1} makes a model that estimates a number",
            )
        strange = [label for label in labels.tolist() if label != IGNORED_LABEL and not 0 <= label < classes]
        if strange:
            raise _mismatch_error(
                f"a row's class is {strange[0]}, and the model has {classes} classes",
                accepted=f"classes from 0 to {classes - 1}",
                hint="task.labels names the classes of the model, and so how many it has",
            )

    def _padded(self, inputs: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
        """Decoders classify a row by the last token that is not their own padding."""
        mask = inputs.get("attention_mask")
        if mask is None or mask.shape != ids.shape or bool((mask > 0).all()):
            return inputs
        if self.pad is None:
            raise ContractError(
                "a batch is padded, and config.json names no pad_token_id: the model finds no end of a row",
                where="task.overrides",
                hint=f"task.overrides: {{pad_token_id: {int(ids[mask == 0][0])}}} takes the tokenizer's",
            )
        return {**inputs, "input_ids": ids.masked_fill(mask == 0, self.pad)}


def limits_of(model: PreTrainedModel) -> Limits:
    """Those of a model of Transformers."""
    config = model.config.get_text_config()
    kind = getattr(model, "loss_type", None)
    rows = kind == "ForSequenceClassification"
    return Limits(
        vocabulary=_vocabulary(model),
        positions=_positions(model, getattr(config, "max_position_embeddings", None)),
        tokens=kind in _TOKENS,
        rows=rows,
        classes=model.config.num_labels if rows else None,
        pad=getattr(config, "pad_token_id", None),
    )


def _vocabulary(model: PreTrainedModel) -> int | None:
    """None where a token of the config's has no row of the table: the model puts images in its place."""
    try:
        table = model.get_input_embeddings()
    except NotImplementedError:
        return None
    if not isinstance(table, nn.Embedding):
        return None
    named = [value for key, value in model.config.to_dict().items() if key.endswith(("_token_id", "_index"))]
    beyond = any(isinstance(value, int) and value >= table.num_embeddings for value in named)
    return None if beyond else table.num_embeddings


def _positions(model: nn.Module, longest: object) -> int | None:
    """How many tokens a text may have. RoBERTa's first position comes after that of padding."""
    if not isinstance(longest, int):
        return None
    for path, table in model.named_modules():
        named = path.rpartition(".")[2] in _POSITIONS and isinstance(table, nn.Embedding)
        if named and longest <= table.num_embeddings <= longest + 2:
            taken = table.padding_idx + 1 if table.padding_idx is not None else 0
            return longest - (taken if table.num_embeddings == longest else 0)
    return None


@dataclass(frozen=True)
class CountLabels:
    """What data workers do with a collated batch: count the labels of each row that its loss is over.

    shifted: a token's label is the next one, so that the first of a row counts for nothing.
    accepted: names that the model's forward takes; None where it takes any. limits: what else it takes.
    """

    shifted: bool
    accepted: tuple[str, ...] | None
    limits: Limits

    def __call__(self, batch: Batch) -> Batch:
        """The batch with `counts` and `tokens`. ContractError for one that the model cannot take."""
        if not isinstance(batch, TextBatch):
            raise _mismatch_error(
                f"the dataset makes a {type(batch).__name__}, and the task pretrained takes a TextBatch",
                hint="choose a dataset of tokens (text_rows), or the task that the dataset is for",
            )
        if "labels" not in batch.inputs:
            raise _mismatch_error(
                "the dataset gives no `labels`, so there is nothing to learn",
                accepted=f"inputs with labels; these are {', '.join(batch.inputs) or 'none'}",
            )
        strange = sorted(set(batch.inputs) - {*(self.accepted or batch.inputs), "labels"})
        if strange:
            raise _mismatch_error(
                f"the model's forward takes no {', '.join(strange)}",
                accepted=", ".join(self.accepted or ()),
            )
        inputs = self.limits.checked(batch.inputs)
        return replace(batch, inputs=inputs, counts=self.counts(inputs["labels"]), tokens=_tokens(inputs))

    def counts(self, labels: Tensor) -> list[int]:
        """Of each row of labels [B], [B,K] or [B,L]."""
        if labels.is_floating_point():
            return [1] * len(labels)
        if labels.dim() == 1:
            labels = labels[:, None]
        elif self.shifted:
            labels = labels[:, 1:]
        return [int(count) for count in (labels != IGNORED_LABEL).flatten(1).sum(1)]


def _mismatch_error(what: str, accepted: str | None = None, hint: str | None = None) -> ContractError:
    return ContractError(what, where="data", accepted=accepted, hint=hint)


def _tokens(inputs: Mapping[str, Tensor]) -> int:
    if "attention_mask" in inputs and inputs["attention_mask"].dim() == 2:
        return int((inputs["attention_mask"] > 0).sum())
    return inputs["input_ids"].numel() if "input_ids" in inputs else 0


@dataclass
class BatchSchema:
    """Batches with other inputs run other modules of a model, and ranks that run other modules wait for one
    another for ever. where: the data's place in the config."""

    where: str
    _seen: frozenset[str] | None = None
    _agreed: bool = False

    def check(self, names: Iterable[str]) -> None:
        """ContractError for a batch with other inputs than those before it on this rank."""
        found = frozenset(names)
        if self._seen is None:
            self._seen = found
        elif found != self._seen:
            raise ContractError(
                f"a batch has other inputs than those before it: {', '.join(sorted(found ^ self._seen))} "
                "only in some",
                where=self.where,
                accepted=_SAME_NAMES,
            )

    def agree(self, names: Iterable[str]) -> None:
        """Before the first forward the ranks compare theirs: ContractError, on all of them, where they
        differ. Called by all ranks, at the same place of their work."""
        self.check(names)
        if self._agreed:
            return
        self._agreed = True
        everyone = Ranks.current().gather(sorted(self._seen or ()))
        other = next((rank for rank, own in enumerate(everyone) if own != everyone[0]), None)
        if other is not None:
            only = ", ".join(sorted(set(everyone[0]) ^ set(everyone[other])))
            raise ContractError(
                f"the batches of rank 0 and rank {other} have other inputs: {only} only in one",
                where=self.where,
                accepted=_SAME_NAMES,
            )
