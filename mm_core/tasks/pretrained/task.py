"""The task `pretrained`: any model of Transformers, trained with its own loss."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from mm_core.builtin.configs.pretrained import PretrainedConfig
from mm_core.contracts import (
    Batch,
    Clip,
    Decoding,
    Evaluation,
    Loss,
    OnText,
    Randomness,
    SampleRequest,
    TextBatch,
)
from mm_core.errors import ContractError, MMError, first_line
from mm_core.tasks.pretrained.answers import Answers, Words, class_names
from mm_core.tasks.pretrained.batches import BatchSchema, CountLabels, limits_of
from mm_core.tasks.pretrained.chunk_probe import obstacle
from mm_core.tasks.pretrained.chunked_loss import defer_logits
from mm_core.tasks.pretrained.loss import RowLosses, check_returned, follow
from mm_core.tasks.pretrained.model import build_model, forward_names
from mm_core.tasks.pretrained.packed_attention import warn_of_dense

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

_NEW_TOKENS = 512  # of an answer at most, where neither the request nor `max_new_tokens` says
_SHIFTED = {"ForCausalLM", "ForConditionalGeneration", None}
"""Transformers' losses in which a token's label is the next one; None: of classes without a name for it."""


@dataclass
class PretrainedInputs:
    """What a forward takes. weights: [B] float32 on the device. weight: of the batch. counts: of each row."""

    inputs: dict[str, Tensor]
    weights: Tensor
    counts: list[int]
    weight: float
    tokens: int


class PretrainedTask(nn.Module):
    """Trains a model on batches that its `forward` takes by name. Satisfies `Task`.

    The loss is the one that the model computes from `labels`, as a sum: over tokens whose label is not -100,
    or over rows; rows of weight 0 count for nothing. Fields are those of `PretrainedConfig`.
    """

    trainable = ("model",)
    frozen: tuple[str, ...] = ()
    bins = None

    def __init__(self, from_pretrained: str, auto_class: str, **others: Any) -> None:
        super().__init__()
        self._wanted = wanted = PretrainedConfig(from_pretrained, auto_class, **others)
        self.model: PreTrainedModel = build_model(wanted, "model")
        names, others_too = forward_names(self.model)
        if "labels" not in names:
            raise ContractError(
                f"{type(self.model).__name__} computes no loss: its forward takes no `labels`",
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
        )
        self._notes: list[str] = []
        # In a tuple: as an attribute, it would be a module of the task and its weights would have two names.
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
        # In training, and in evaluations.
        self._schemas = {True: BatchSchema("data.train"), False: BatchSchema("data.validation")}
        self._checked: set[bool] = set()  # in training, in evaluation
        self._record: RowLosses | None = None
        # Before the engine's own hooks, which may cast what the model returns.
        self.model.register_forward_hook(self._look)

    def class_names(self) -> tuple[str, ...]:
        """Those of the model: `labels`, or what config.json has; () where that only numbers them."""
        named: Mapping[int, str] = self.model.config.id2label or {}
        numbered = all(name == f"LABEL_{number}" for number, name in named.items())
        return () if numbered else tuple(named[number] for number in sorted(named, key=int))

    def notes(self) -> Sequence[str]:
        """What `auto` has chosen that is not the best. ContractError where `chunked` cannot be."""
        if self._head and self.model.get_output_embeddings() is not self._head[0]:
            why = "the output embedding has an adapter, and a chunked loss is of its weight alone"
            if self._wanted.loss == "chunked":
                raise ContractError(
                    why,
                    where="task.loss",
                    accepted="auto, plain",
                    hint="or leave the output embedding out of the adapter's targets",
                )
            self._without_chunks(why)
        return self._notes

    def _without_chunks(self, why: str) -> None:
        self._head, self._holding = (), nullcontext
        self._notes.append(f"task.loss: auto computes the logits of all tokens at once: {why}")

    # -- training ------------------------------------------------------------------------------

    def weight(self, batch: Batch) -> float:
        """The number of labels that the loss is over, each times the weight of its row."""
        assert isinstance(batch, TextBatch)
        self._schemas[True].check(batch.inputs)
        return _weight(batch, self._counts(batch))

    def _counts(self, batch: TextBatch) -> list[int]:
        """Labels of each row that the loss is over: as data workers have counted them, where they have."""
        return batch.counts if batch.counts is not None else self._labels.counts(batch.inputs["labels"])

    def batch_transform(self) -> Callable[[Batch], Batch]:
        """Counting labels, for data workers."""
        return self._labels

    def prepare(self, batch: Batch, rng: Randomness) -> PretrainedInputs:
        """The batch as it is: nothing is drawn and nothing encoded. ContractError for one whose inputs have
        other names than the others, those of other ranks among them."""
        assert isinstance(batch, TextBatch)
        self._schemas[self.model.training].agree(batch.inputs)
        if self.model.training and True not in self._checked:
            warn_of_dense(self.model, batch.inputs)
        counts = self._counts(batch)
        weights = batch.sample_weights.to(next(iter(batch.inputs.values())).device, non_blocking=True)
        return PretrainedInputs(batch.inputs, weights, counts, _weight(batch, counts), batch.tokens)

    def loss(self, inputs: PretrainedInputs) -> Loss:
        """The model's own loss, in float32, as a weighted sum over labels."""
        returned = self._forward(inputs, RowLosses(inputs.weights))
        return Loss(returned.loss, inputs.weight, tokens=inputs.tokens)

    def _forward(self, inputs: PretrainedInputs, record: RowLosses) -> ModelOutput:
        given = dict(inputs.inputs)
        given["labels"] = follow(given["labels"], record)
        self._record = record
        self.notes()  # adapters came after the model
        try:
            with self._holding():
                returned = self.model(**given, **self._options)
        except MMError:
            raise
        except (ValueError, IndexError) as fault:
            raise _unfit(self.model, inputs.inputs, fault) from fault
        finally:
            self._record = None
        if self.model.training not in self._checked:
            _check_counts(record, inputs.counts)
            self._checked.add(self.model.training)
        return returned

    def _look(self, model: nn.Module, args: object, returned: object) -> ModelOutput | None:
        """Checks what the first forward returns: the loss is the sum that was asked for, and nothing else.
        Of a loss's forward, no more is handed on: FSDP2 warns of views, such as InternVL's image features."""
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
        """Each row's loss, summed over its labels; its weight is their number.

        outputs: for labels that are classes or tokens `predictions` and `labels`, [B], or [B,L] with -100
        where nothing counts; where rows have one label, or several numbers, also `logits` [B,K]. texts: the
        names of classes; of tokens the answers that are generated where `max_new_tokens` is set.
        """
        assert isinstance(batch, TextBatch)
        inputs = self.prepare(batch, rng)
        record = RowLosses(torch.ones_like(inputs.weights), keep_predictions=True)
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
        """What answers prompts. ContractError for a model that generates no text."""
        if self._asked is None:
            self._asked = Answers(self.model, self._wanted, _NEW_TOKENS, "task.auto_class")
        return self._asked

    def check_question(self, question: Mapping[str, Tensor]) -> None:
        """DataError for a prompt that leaves no room for an answer."""
        self.check_answers().check(question)

    def answer(
        self,
        questions: Sequence[Mapping[str, Tensor]],
        decoding: Decoding,
        numbers: Sequence[int],
        on_text: OnText | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> list[str]:
        """What the model says to prompts, by its own `generate`."""
        return self.check_answers().to(questions, decoding, numbers, on_text, stopped)

    # -- the rest of the contract --------------------------------------------------------------

    def sample(self, request: SampleRequest) -> list[Clip]:
        """ContractError: these models make no clips."""
        self.check_request(request)

    def check_request(self, request: SampleRequest) -> NoReturn:
        """ContractError, before any training."""
        raise ContractError(
            "a Transformers model generates no clips",
            where="task.type",
            hint="leave validation.samples out; `mm sample --run DIR --prompt ..` answers in words",
        )

    def check(self, batch_spec: Mapping[str, Any]) -> None:
        """What fits is seen in the first batch: datasets name their inputs only there."""


def _head_of_chunks(model: PreTrainedModel, wanted: PretrainedConfig) -> tuple[nn.Linear, ...]:
    """The model's output embedding, if it is to hold its logits back."""
    head = model.get_output_embeddings() if wanted.loss != "plain" else None
    if type(head) is nn.Linear:
        return (head,)
    if wanted.loss == "chunked":
        found = "none" if head is None else f"a {type(head).__name__}"
        raise ContractError(
            f"a chunked loss needs an output embedding, and {type(model).__name__} has {found}",
            where="task.loss",
            accepted="auto, plain; chunked for models whose get_output_embeddings is a linear layer",
        )
    return ()


def _check_counts(record: RowLosses, counts: Sequence[int]) -> None:
    """ContractError where the model's loss is over other labels than `weight` has counted."""
    assert record.counted is not None
    found = [int(count) for count in record.counted.tolist()]
    if found != list(counts):
        raise ContractError(
            f"the model's loss is over {found} labels of a batch's rows, where {list(counts)} were counted",
            where="task.auto_class",
            accepted="labels that are shifted by one (causal models), or not at all",
        )


def _unfit(model: nn.Module, inputs: Mapping[str, Tensor], fault: Exception) -> ContractError:
    """What the model's authors say of a batch."""
    shapes = ", ".join(f"{name} {[*tensor.shape]}" for name, tensor in inputs.items())
    return ContractError(
        f"{type(model).__name__} cannot take the batch: {first_line(fault)}",
        where="data",
        accepted="inputs and labels that fit the model, and each other",
        hint=f"this one has {shapes}",
    )


def _weight(batch: TextBatch, counts: Sequence[int]) -> float:
    """The rows' numbers of labels, each times the row's weight."""
    return float(sum(w * n for w, n in zip(batch.sample_weights.tolist(), counts, strict=True)))
