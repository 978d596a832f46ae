"""Whether a model keeps the conversations of a packed row apart: tried before the first step.

The loss of every token of two conversations in one row is compared to that in rows of their own, and to what
other padding of these rows and the last bits of embeddings change: kernels and routers round differently for
other shapes. It is losses that are compared, since the logits of a large vocabulary may never be stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from mm_core.contracts import IGNORED_LABEL, TextBatch
from mm_core.device.torch_private import FakeTensor
from mm_core.errors import ContractError, MMError
from mm_core.modules.torch_calls import Kwargs
from mm_core.runtime.ranks import Ranks
from mm_core.tasks.pretrained.loss import RowLosses
from mm_core.tasks.pretrained.own_positions import PackedInputs, layer_kinds

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Inputs = Mapping[str, Tensor]
_ABOVE = 2
"""Allowed change of a token's loss on average, in changes by last bits of embeddings and other padding. In
bfloat16, rows that are apart changed by 0.3 of these at most, in 2 to 12 layers."""
_OTHER = 7
"""Tokens of other padding: odd, so that kernels divide the rows differently."""


@dataclass
class _TokenLosses(RowLosses):
    """Also keeps the loss of each token."""

    each: Tensor | None = None

    def _cross_entropy(self, found: Tensor, target: Tensor, options: Kwargs) -> tuple[Tensor, Tensor | None]:
        losses, total = super()._cross_entropy(found, target, options)
        self.each = losses[target != IGNORED_LABEL].float()
        return losses, total


def check_packing(
    model: PreTrainedModel,
    batch: TextBatch,
    packed: PackedInputs,
    run: Callable[[Inputs, RowLosses], object],
) -> None:
    """Checks that a model keeps the conversations of a packed row apart; called by all ranks together.

    Args:
        model: the Transformers model.
        batch: one packed row; its shortest conversations are tried, those with pictures first.
        packed: adds to a packed row what the model needs.
        run: the task's forward, from the inputs and what records their loss.

    Raises:
        ContractError: on all ranks: the model cannot take packed rows, or conversations change each other.
    """
    if isinstance(next(model.parameters()), FakeTensor):
        return  # `--ops` has no values
    tried = _Tried.of(batch, model.config.get_text_config().vocab_size)

    def losses(inputs: Inputs) -> Tensor:
        ids = inputs["input_ids"]
        record = _TokenLosses(torch.ones(len(ids), device=ids.device))
        run(inputs, record)
        assert record.each is not None
        return record.each.detach()

    refused, change = None, 0.0
    with _trying(model):
        alone = losses(tried.alone())  # its errors are not those of packing
        with _last_bits(model):
            allowed = _ABOVE * tried.change(losses(tried.alone(_OTHER)), alone)
        allowed = max(allowed, torch.finfo(alone.dtype).eps * float(alone.mean()))  # the last bit of a loss
        try:
            change = tried.change(losses(packed(tried.together(), tried.lengths)), alone)
        except MMError as fault:
            refused = fault.what
    if refused is None and not change <= allowed and bool(alone.isfinite().all()):
        refused = (
            "conversations in one row change each other: the loss of a token by "
            f"{change:.1e} on average, and rounding by at most {allowed:.1e}"
        )
    refused = next(filter(None, Ranks.current().gather(refused)), None)
    if refused is not None:
        kinds = ", ".join(layer_kinds(model))
        raise ContractError(
            f"{type(model).__name__} cannot train on packed rows: {refused}"
            + (kinds and f" (its kinds of layers: {kinds})"),
            where="data.train.packing",
            accepted="false",
            hint="set packing: false",
        )


@contextmanager
def _trying(model: PreTrainedModel) -> Iterator[None]:
    """Forwards in evaluation mode that leave nothing behind."""
    modes = {module: module.training for module in model.modules()}
    device = next(model.parameters()).device
    drawn = [] if device.type == "cpu" else [device]
    try:
        model.eval()
        # Compiling for these shapes would take minutes.
        with torch.random.fork_rng(drawn, device_type=device.type), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
            if isinstance(module, FSDPModule):
                module.reshard()  # without a backward it would stay gathered


@contextmanager
def _last_bits(model: PreTrainedModel) -> Iterator[None]:
    """Changes the last bit of tokens' embeddings, as rounding may."""

    def changed(table: object, given: object, found: Tensor) -> Tensor:
        odd = torch.arange(found.shape[-1], device=found.device) % 2
        return found * (1 + torch.finfo(found.dtype).eps * odd).to(found.dtype)

    hook = model.get_input_embeddings().register_forward_hook(changed)
    try:
        yield
    finally:
        hook.remove()


@dataclass(frozen=True)
class _Tried:
    """Conversations of a packed row, with a label for every token.

    Attributes:
        tokens: [L] of each conversation, by name.
        pictures: by name, the dimension along which the parts of conversations follow each other, and these.
        filler: a token that stands for no picture.
    """

    tokens: dict[str, list[Tensor]]
    pictures: dict[str, tuple[int, list[Tensor]]]
    filler: int

    @classmethod
    def of(cls, batch: TextBatch, vocabulary: int) -> _Tried:
        """Two conversations of a packed row; of a row with one, this one twice."""
        assert batch.pieces is not None
        lengths, inputs = batch.pieces[0], batch.inputs
        sections = batch.sections.values()
        shown = [any(sizes[n] for _, sizes in sections) for n in range(len(lengths))]
        order = sorted(range(len(lengths)), key=lambda n: (not shown[n], lengths[n]))
        chosen = order[:2]
        for _, sizes in sections:  # all ranks must run the same modules
            if not any(sizes[n] for n in chosen):
                chosen.append(next(n for n in order if sizes[n]))
        chosen = sorted(chosen) if len(chosen) > 1 else chosen * 2
        ids, labels = inputs["input_ids"], inputs["labels"]
        filler = int(labels[labels != IGNORED_LABEL][0])
        tokens = {
            name: [value[0].split_with_sizes(lengths)[n] for n in chosen]
            for name, value in inputs.items()
            if value.shape == ids.shape and name not in (*_MADE, *batch.sections)
        }
        if chosen[0] == chosen[1]:  # at other places than in the first, or a fault of places would not show
            tokens = {
                name: [one, pad(other, (1, 0), value=filler if name == "input_ids" else 0)]
                for name, (one, other) in tokens.items()
            }
        tokens["labels"] = [
            torch.where(each < vocabulary, each, IGNORED_LABEL).index_fill(0, ids.new_zeros(1), IGNORED_LABEL)
            for each in tokens["input_ids"]
        ]
        pictures = {
            name: (axis, [inputs[name].split_with_sizes(sizes, axis)[n] for n in chosen])
            for name, (axis, sizes) in batch.sections.items()
        }
        return cls(tokens, pictures, filler)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each conversation."""
        return [len(ids) for ids in self.tokens["input_ids"]]

    def together(self) -> dict[str, Tensor]:
        """The conversations in one row."""
        tokens = {name: torch.cat(parts)[None] for name, parts in self.tokens.items()}
        places = torch.cat([torch.arange(length) for length in self.lengths])[None]
        pictures = {name: torch.cat(parts, axis) for name, (axis, parts) in self.pictures.items()}
        return {**tokens, "position_ids": places.to(tokens["input_ids"].device), **pictures}

    def alone(self, more: int = 0) -> dict[str, Tensor]:
        """The conversations in rows of their own, with `more` tokens of padding."""
        values = {"input_ids": self.filler, "labels": IGNORED_LABEL}
        given = {**self.tokens, "attention_mask": [torch.ones_like(ids) for ids in self.tokens["input_ids"]]}
        rows = {
            name: pad(pad_sequence(parts, True, value := values.get(name, 0)), (0, more), value=value)
            for name, parts in given.items()
        }
        pictures = {
            name: torch.cat(parts) if axis == 0 else pad_sequence([part[0] for part in parts], True)
            for name, (axis, parts) in self.pictures.items()
        }
        return {**rows, **pictures}

    def change(self, found: Tensor, wanted: Tensor) -> float:
        """The largest of the conversations' changes of a token's loss, on average."""
        counts = [int((labels != IGNORED_LABEL).sum()) for labels in self.tokens["labels"]]
        return max(
            float(each.mean()) for each in (found - wanted).abs().split_with_sizes(counts) if len(each)
        )


_MADE = ("position_ids", "seq_idx")
"""Tensors of tokens that are made for each row."""
