"""The task `pretrained`: any model of Transformers, trained with its own loss."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isclose
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from mm_core.builtin.configs.pretrained import PretrainedConfig
from mm_core.contracts import (
    Batch,
    Decoding,
    Evaluation,
    Loss,
    OnText,
    Randomness,
    TaskModule,
    TextBatch,
)
from mm_core.errors import ContractError, MMError, first_line
from mm_core.tasks.pretrained.answers import Answers, Words, class_names
from mm_core.tasks.pretrained.batches import BatchSchema, CountLabels, limits_of
from mm_core.tasks.pretrained.chunk_probe import obstacle
from mm_core.tasks.pretrained.chunked_loss import defer_logits
from mm_core.tasks.pretrained.loss import RowLosses, check_returned, follow
from mm_core.tasks.pretrained.model import build_model, forward_names
from mm_core.tasks.pretrained.own_positions import PackedInputs
from mm_core.tasks.pretrained.packed_attention import blocks_in_pieces, warn_of_dense
from mm_core.tasks.pretrained.packing_check import check_packing

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

_NEW_TOKENS = 512  # maximum length of an answer if neither the request nor `max_new_tokens` sets it
_SHIFTED = {"ForCausalLM", "ForConditionalGeneration", None}
"""Transformers losses in which a token's label is the next token; None: classes without a named loss."""


@dataclass
class PretrainedInputs:
    """Inputs of one forward of a Transformers model in training.

    Attributes:
        inputs: arguments of the model's forward.
        weights: [B] float32 on the device, the weight of each row.
        counts: number of labels in each row, or the sum of their weights.
        weight: total weight of the batch.
        tokens: number of tokens in the batch.
        label_weights: [B,...] float32 on the device, those of labels in the order of their losses; None: 1.
    """

    inputs: dict[str, Tensor]
    weights: Tensor
    counts: Sequence[float]
    weight: float
    tokens: int
    label_weights: Tensor | None = None


class PretrainedTask(TaskModule):
    """Trains any Transformers model with its own loss, passing inputs by name. Satisfies `Task`.

    The loss is the one that the model computes from `labels`, as a sum: over tokens whose label is not -100,
    or over rows; rows of weight 0 do not count. The arguments are the fields of `PretrainedConfig`.
    """

    trainable = ("model",)
    frozen: tuple[str, ...] = ()

    def __init__(self, from_pretrained: str, auto_class: str, **others: Any) -> None:
        super().__init__()
        self._wanted = wanted = PretrainedConfig(from_pretrained, auto_class, **others)
        self.model: PreTrainedModel = build_model(wanted, "model")
        names, others_too = forward_names(self.model)
        if "labels" not in names:
            raise ContractError(
                f"{type(self.model).__name__} computes no loss: its forward has no argument `labels`",
                where="task.auto_class",
                accepted="a class with a head: AutoModelForCausalLM, AutoModelForSequenceClassification, ...",
            )
        # Decoders would cache keys and values, and recomputed blocks add to them.
        text = self.model.config.get_text_config()
        caches = "use_cache" in names or (others_too and hasattr(text, "use_cache"))
        self._options = {"use_cache": False} if caches else {}
        composite = getattr(self.model.config, "is_encoder_decoder", False)
        self._labels = CountLabels(
            shifted=not composite and getattr(self.model, "loss_type", None) in _SHIFTED,
            accepted=None if others_too else tuple(names),
            limits=limits_of(self.model),
            packed=PackedInputs.of(self.model, others_too),
        )
        self._notes: list[str] = list(_memory_notes(self.model, wanted))
        # A tuple: as an attribute it would be a second sub-module, and its weights would have two names.
        self._head = _head_of_chunks(self.model, wanted)
        if self._head and wanted.loss == "auto" and (why := obstacle(self.model, self._options)):
            self._without_chunks(why)
        self._holding: Callable[[], AbstractContextManager[None]] = nullcontext
        if self._head:
            self._holding = defer_logits(self._head[0], wanted.chunk_tokens)
        self._answers: Answers | None = None
        if wanted.max_new_tokens is not None:
            self._answers = Answers(self.model, wanted, wanted.max_new_tokens, "task.max_new_tokens")
        self._asked = self._answers
        # Keyed by model.training.
        self._schemas = {True: BatchSchema("data.train"), False: BatchSchema("data.validation")}
        self._checked: set[bool] = set()  # values of model.training whose first forward was checked
        self._record: RowLosses | None = None
        # Registered before the engine's hooks, which may cast the model's outputs.
        self.model.register_forward_hook(self._look)

    def class_names(self) -> tuple[str, ...]:
        """Names of the classes that the model predicts, from `labels` or config.json; () if only numbered."""
        named: Mapping[int, str] = self.model.config.id2label or {}
        numbered = all(name == f"LABEL_{number}" for number, name in named.items())
        return () if numbered else tuple(named[number] for number in sorted(named, key=int))

    @property
    def defers_logits(self) -> bool:
        """Whether the loss computes the logits: it needs the output embedding's weight after its forward."""
        return bool(self._head)

    def notes(self) -> Sequence[str]:
        """Notes for the user on the loss chosen by `task.loss: auto`, if it is not the chunked one.

        Raises:
            ContractError: `task.loss: chunked` is set but not possible.
        """
        if self._head and self.model.get_output_embeddings() is not self._head[0]:
            why = "the output embedding has an adapter, which a chunked loss does not support"
            if self._wanted.loss == "chunked":
                raise ContractError(
                    why,
                    where="task.loss",
                    accepted="auto, plain",
                    hint="or remove the output embedding from the adapter's targets",
                )
            self._without_chunks(why)
        return self._notes

    def _without_chunks(self, why: str) -> None:
        self._head, self._holding = (), nullcontext
        self._notes.append(f"task.loss: auto computes the logits of all tokens at once: {why}")

    # -- training ------------------------------------------------------------------------------

    def weight(self, batch: Batch) -> float:
        """The weight of a batch in the loss: the number of its labels, each times the weight of its row."""
        batch = cast(TextBatch, batch)  # `CountLabels` has checked it
        self._schemas[True].check(batch.inputs)
        return _weight(batch, self._counts(batch))

    def _counts(self, batch: TextBatch) -> Sequence[float]:
        """Labels of each row that enter the loss, as counted by data workers, or counted now."""
        own = batch.counts
        return self._labels.counts(batch.inputs["labels"], batch.label_weights) if own is None else own

    def batch_transform(self) -> Callable[[Batch], Batch]:
        """The transform that data workers apply to a batch: checking it and counting its labels."""
        return self._labels

    def prepare(self, batch: Batch, rng: Randomness) -> PretrainedInputs:
        """The inputs of a training step: those of the batch, unchanged, since nothing is drawn or encoded.

        Raises:
            ContractError: its input names are different from those of earlier batches or other ranks.
        """
        batch = cast(TextBatch, batch)  # `CountLabels` has checked it
        self._schemas[self.model.training].agree(batch.inputs)
        if self.model.training and True not in self._checked:
            warn_of_dense(self.model, batch.inputs)
            if batch.pieces is not None:
                check_packing(self.model, batch, self._labels.packed, self._run)
        counts = self._counts(batch)
        weights = batch.sample_weights.to(next(iter(batch.inputs.values())).device, non_blocking=True)
        weight, factors = _weight(batch, counts), self._labels.aligned(batch.label_weights)
        return PretrainedInputs(batch.inputs, weights, counts, weight, batch.tokens, factors)

    def loss(self, inputs: PretrainedInputs) -> Loss:
        """The Transformers model's own loss, in float32, as a weighted sum over labels."""
        returned = self._forward(inputs, RowLosses(inputs.weights, inputs.label_weights))
        return Loss(returned.loss, inputs.weight, tokens=inputs.tokens)

    def _forward(self, inputs: PretrainedInputs, record: RowLosses) -> ModelOutput:
        returned = self._run(inputs.inputs, record)
        if self.model.training not in self._checked:
            _check_counts(record, inputs.counts)
            self._checked.add(self.model.training)
        return returned

    def _run(self, inputs: Mapping[str, Tensor], record: RowLosses) -> ModelOutput:
        given = {**inputs, "labels": follow(inputs["labels"], record)}
        self._record = record
        self.notes()  # again: adapters were added after the model was built
        try:
            with self._holding(), blocks_in_pieces(self.model):
                return self.model(**given, **self._options)
        except MMError:
            raise
        except (ValueError, IndexError) as fault:
            shapes = ", ".join(f"{name} {[*tensor.shape]}" for name, tensor in inputs.items())
            raise ContractError(
                f"{type(self.model).__name__} cannot take the batch: {first_line(fault)}",
                where="data",
                accepted="inputs and labels that fit the model and each other",
                hint=f"check the dataset; this batch contains {shapes}",
            ) from fault
        finally:
            self._record = None

    def _look(self, model: nn.Module, args: object, returned: object) -> ModelOutput | None:
        """Checks that the first forward returns the recorded sum as its loss. Keeps only loss and logits of
        the output: FSDP2 warns about views among the rest, such as InternVL's image features."""
        if self._record is None:
            return None
        if model.training not in self._checked:
            check_returned(self._record, getattr(returned, "loss", None))
        if not isinstance(returned, OrderedDict):
            return None
        return type(returned)(**{key: returned[key] for key in ("loss", "logits") if key in returned})

    # -- evaluation ----------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: Batch, rng: Randomness, quantiles: Sequence[float]) -> Evaluation:
        """Validation loss of each row, summed over its labels; the row's weight is the number of labels.

        Returns:
            `outputs` contains `predictions` and `labels` for labels that are classes or tokens, [B], or [B,L]
            with -100 at ignored labels; `logits` [B,K] if rows have one label or several numbers. `texts`
            contains names of classes, or generated answers if `max_new_tokens` is set.
        """
        batch = cast(TextBatch, batch)  # `CountLabels` has checked it
        inputs = self.prepare(batch, rng)
        ones = torch.ones_like(inputs.weights)
        record = RowLosses(ones, inputs.label_weights, keep_predictions=True)
        returned = self._forward(inputs, record)
        assert record.rows is not None
        outputs: dict[str, Tensor] = {}
        words: Words | None = None
        labels = inputs.inputs["labels"]
        one = labels.dim() == 1
        if record.predictions is not None and record.labels is not None:
            found = {"predictions": record.predictions, "labels": record.labels}
            outputs = {name: tensor[:, 0] if one else tensor for name, tensor in found.items()}
            if one:
                words = class_names(self.model.config, outputs["predictions"], labels, batch)
            elif self._answers is not None:
                words = self._answers.of(batch)
        if one or labels.is_floating_point():
            outputs |= {"logits": returned.logits.float(), "labels": labels}
        weights = torch.tensor(inputs.counts, dtype=torch.float32, device=record.rows.device)
        return Evaluation({"loss": record.rows.float()}, weights, outputs, *(words or ()))

    # -- answers -------------------------------------------------------------------------------

    def check_answers(self) -> Answers:
        """The generator of answers to prompts.

        Raises:
            ContractError: the model generates no text.
        """
        if self._asked is None:
            self._asked = Answers(self.model, self._wanted, _NEW_TOKENS, "task.auto_class")
        return self._asked

    def check_question(self, question: Mapping[str, Tensor]) -> None:
        """Checks that a prompt leaves the model room for an answer.

        Raises:
            DataError: the prompt is too long.
        """
        self.check_answers().check(question)

    def answer(
        self,
        questions: Sequence[Mapping[str, Tensor]],
        decoding: Decoding,
        numbers: Sequence[int],
        on_text: OnText | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> list[str]:
        """Answers prompts by the model's own `generate`; arguments as in `Answers.to`."""
        return self.check_answers().to(questions, decoding, numbers, on_text, stopped)


def _memory_notes(model: PreTrainedModel, wanted: PretrainedConfig) -> Iterator[str]:
    """A note on the host memory of rank 0 that a start with random weights needs, from 1 GiB on."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    if wanted.weights == "random" and size >= 2**30:
        first = "task.weights: random: rank 0 of a new run first builds the complete model in host memory"
        yield f"{first}, {size / 2**30:,.1f} GiB"


def _head_of_chunks(model: PreTrainedModel, wanted: PretrainedConfig) -> tuple[nn.Linear, ...]:
    """The model's output embedding in a tuple if its logits are to be deferred, else ()."""
    head = model.get_output_embeddings() if wanted.loss != "plain" else None
    if type(head) is nn.Linear:
        return (head,)
    if wanted.loss == "chunked":
        found = "none" if head is None else f"a {type(head).__name__}"
        raise ContractError(
            f"a chunked loss needs an output embedding, and {type(model).__name__} has {found}",
            where="task.loss",
            accepted="auto, plain (chunked needs a model whose get_output_embeddings is a linear layer)",
        )
    return ()


def _check_counts(record: RowLosses, counts: Sequence[float]) -> None:
    """ContractError if the model's loss covers a different number of labels from what `weight` counted."""
    assert record.counted is not None
    found, rounding = record.counted.tolist(), 0 if record.label_weights is None else 1e-5
    if not all(isclose(*pair, rel_tol=rounding) for pair in zip(found, counts, strict=True)):
        raise ContractError(
            f"the model's loss covers {found} labels in the rows of a batch, but {list(counts)} were counted",
            where="task.auto_class",
            accepted="models that shift labels by one (causal models), or not at all",
        )


def _weight(batch: TextBatch, counts: Sequence[float]) -> float:
    """The sum over rows of the number of labels times the row's weight."""
    return float(sum(w * n for w, n in zip(batch.sample_weights.tolist(), counts, strict=True)))
