"""Checks of a `pretrained` task's batches, mostly in data workers, which also count labels.

Most of what is refused here would otherwise crash an accelerator without a useful message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from mm_core.contracts import IGNORED_LABEL, Batch, DictBatch, TextBatch
from mm_core.errors import ContractError, plural
from mm_core.runtime.ranks import Ranks
from mm_core.tasks.pretrained.own_positions import PackedInputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_POSITIONS = {"position_embeddings", "embed_positions", "wpe"}
"""Names that Transformers' models use for their table of positions."""

_SAME_NAMES = "the same names in every batch (a blank image, for example, for rows without one)"
_TOKENS = {"ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "ForTokenClassification"}


@dataclass(frozen=True)
class Limits:
    """Limits of a Transformers model on its batches; None means no limit.

    Attributes:
        vocabulary: number of tokens in its embedding table.
        positions: maximum number of tokens in a row.
        tokens: whether it is known to need one label for each token.
        rows: whether it is known to need one label for each row.
        classes: number of classes of a row's label; 1: the label is a number.
        pad: its padding token, by which it may search for the end of a row.
    """

    vocabulary: int | None = None
    positions: int | None = None
    tokens: bool = False
    rows: bool = False
    classes: int | None = None
    pad: int | None = None

    def checked(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inputs of a batch with the model's own padding token, checked against the model's limits.

        Raises:
            ContractError: the model cannot take the batch.
        """
        if self.classes is not None and inputs["labels"].dim() == 1:
            self._check_classes(inputs["labels"], self.classes)
        if self.tokens and inputs["labels"].dim() == 1:
            raise _mismatch_error(
                "the data have one label for each row, but the model needs one for each token",
                accepted="labels [B, L] (text_rows: without `label`)",
                hint="set task.auto_class: AutoModelForSequenceClassification for one label per row",
            )
        ids = inputs.get("input_ids")
        if ids is None or ids.dim() != 2 or not ids.numel():
            return inputs
        if self.positions is not None and ids.shape[1] > self.positions:
            raise _mismatch_error(
                f"a batch is {plural(ids.shape[1], 'token')} long, but the model has only"
                f" {plural(self.positions, 'position')}",
                hint=f"cut longer rows: set max_length: {self.positions} in the dataset",
            )
        if self.vocabulary is not None and (largest := int(ids.max())) >= self.vocabulary:
            raise _mismatch_error(
                f"a row contains token {largest}, but the model's tokens are 0 to {self.vocabulary - 1}",
                hint="the tokenizer is another model's: set the dataset's `tokenizer` to this model's folder",
            )
        return self._padded(inputs, ids) if self.rows else inputs

    def _check_classes(self, labels: Tensor, classes: int) -> None:
        if classes == 1:
            if not labels.is_floating_point():
                raise _mismatch_error(
                    "the labels are classes, but the model has one output, which predicts a number",
                    accepted="a number for each row (text_rows: label_type: number)",
                    hint="set task.labels, or task.overrides: {num_labels: ...}, for a model with classes",
                )
            return
        if labels.is_floating_point():
            raise _mismatch_error(
                f"the labels are numbers, but the model has {plural(classes, 'class')}",
                accepted="a class for each row, from 0 (text_rows: label_type: class)",
                hint="set task.overrides: {num_labels: 1} for a model that predicts a number",
            )
        strange = [label for label in labels.tolist() if label != IGNORED_LABEL and not 0 <= label < classes]
        if strange:
            raise _mismatch_error(
                f"a row's class is {strange[0]}, but the model has {plural(classes, 'class')}",
                accepted=f"classes from 0 to {classes - 1}",
                hint="list all classes in task.labels, or fix the row",
            )

    def _padded(self, inputs: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
        """The inputs with the model's own padding token: decoders classify a row by the last token before
        padding."""
        mask = inputs.get("attention_mask")
        if mask is None or mask.shape != ids.shape or bool((mask > 0).all()):
            return inputs
        if self.pad is None:
            raise ContractError(
                "a batch is padded, but config.json sets no pad_token_id to mark the end of a row",
                where="task.overrides",
                hint="set the tokenizer's padding token: "
                f"task.overrides: {{pad_token_id: {int(ids[mask == 0][0])}}}",
            )
        return {**inputs, "input_ids": ids.masked_fill(mask == 0, self.pad)}


def limits_of(model: PreTrainedModel) -> Limits:
    """The limits of a Transformers model, read from its config and its tables."""
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
    """Size of the embedding table; None if a token of the config is beyond it, since the model then replaces
    that token by images."""
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
    """Maximum number of tokens in a text. RoBERTa's first position follows that of padding."""
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
    """Checks a collated batch in data workers, and counts the labels of each row that enter the loss.

    Attributes:
        shifted: a token's label is the next token, so the first label of a row does not count.
        accepted: argument names of the model's forward; None if it takes any name.
        limits: the model's limits on batches.
        packed: adds what the model needs for packed rows.
    """

    shifted: bool
    accepted: tuple[str, ...] | None
    limits: Limits
    packed: PackedInputs = field(default_factory=PackedInputs)

    def __call__(self, batch: Batch) -> Batch:
        """The batch with the number of its labels (`counts`) and of its `tokens`.

        Raises:
            ContractError: the model cannot take the batch.
        """
        if isinstance(batch, DictBatch):  # plain dicts, named like the arguments of the model's forward
            tensors = {name: value for name, value in batch.values.items() if isinstance(value, Tensor)}
            batch = TextBatch(batch.keys, batch.sample_weights, batch.ids, inputs=tensors)
        if not isinstance(batch, TextBatch):
            raise _mismatch_error(
                f"the dataset makes a {type(batch).__name__}, but the task `pretrained` takes a TextBatch",
                hint="choose a dataset of tokens (text_rows), or the task made for this dataset",
            )
        if "labels" not in batch.inputs:
            raise _mismatch_error(
                "the dataset's batches contain no `labels`, so there is nothing to train on",
                accepted=f"inputs with `labels`; the batch contains {', '.join(batch.inputs) or 'none'}",
            )
        strange = sorted(set(batch.inputs) - {*(self.accepted or batch.inputs), "labels"})
        if strange:
            raise _mismatch_error(
                f"the batches contain {', '.join(strange)}, which the model's forward does not take",
                accepted=", ".join(self.accepted or ()),
            )
        inputs = self.limits.checked(batch.inputs)
        if batch.pieces is not None:
            inputs = self.packed(inputs, batch.pieces[0])
        counts = self.counts(inputs["labels"], batch.label_weights)
        return replace(batch, inputs=inputs, counts=counts, tokens=_tokens(inputs))

    def counts(self, labels: Tensor, weights: Tensor | None = None) -> Sequence[float]:
        """The number of labels in each row that enter the loss, from labels [B], [B,K] or [B,L]; or the sum
        of their weights [B,L]."""
        if labels.is_floating_point():
            return [1] * len(labels)
        if labels.dim() == 1:
            labels = labels[:, None]
        elif self.shifted:
            labels = labels[:, 1:]
        counted = labels != IGNORED_LABEL
        if (factors := self.aligned(weights)) is not None:
            return [float(each) for each in (counted * factors).double().sum(1)]
        return [int(count) for count in counted.flatten(1).sum(1)]

    def aligned(self, weights: Tensor | None) -> Tensor | None:
        """Weights of labels [B,L] in the order of the model's losses."""
        return weights if weights is None or not self.shifted else weights[:, 1:]


def _mismatch_error(what: str, accepted: str | None = None, hint: str | None = None) -> ContractError:
    return ContractError(what, where="data", accepted=accepted, hint=hint)


def _tokens(inputs: Mapping[str, Tensor]) -> int:
    if "attention_mask" in inputs and inputs["attention_mask"].dim() == 2:
        return int((inputs["attention_mask"] > 0).sum())
    return inputs["input_ids"].numel() if "input_ids" in inputs else 0


@dataclass
class BatchSchema:
    """Checks that all batches of all ranks have the same input names.

    Batches with different inputs run different modules of a model, and ranks that run different modules
    deadlock.

    Args:
        where: the config path of the data, for error messages.
    """

    where: str
    _seen: frozenset[str] | None = None
    _agreed: bool = False

    def check(self, names: Iterable[str]) -> None:
        """Checks that a batch has the same input names as the earlier batches of this rank.

        Raises:
            ContractError: the names are different.
        """
        found = frozenset(names)
        if self._seen is None:
            self._seen = found
        elif found != self._seen:
            raise ContractError(
                "batches have different inputs: only some contain " + ", ".join(sorted(found ^ self._seen)),
                where=self.where,
                accepted=_SAME_NAMES,
            )

    def agree(self, names: Iterable[str]) -> None:
        """Compares the input names of batches across ranks, before the first forward; a collective call.

        Raises:
            ContractError: the names are different on some rank; raised on all ranks.
        """
        self.check(names)
        if self._agreed:
            return
        self._agreed = True
        everyone = Ranks.current().gather(sorted(self._seen or ()))
        other = next((rank for rank, own in enumerate(everyone) if own != everyone[0]), None)
        if other is not None:
            only = ", ".join(sorted(set(everyone[0]) ^ set(everyone[other])))
            raise ContractError(
                f"the batches of rank 0 and rank {other} have different inputs: only one rank has {only}",
                where=self.where,
                accepted=_SAME_NAMES,
            )
