"""What models need beside a packed row's restarting positions, made in data workers.

Models of pictures with a grid of positions compute these themselves, but only for rows of one conversation
each. Layers of linear attention and convolutions do not read positions: their kernels take the places where
conversations begin.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_TOKENS = ("input_ids", "mm_token_type_ids", "token_type_ids")
_BY_POSITION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers for which Transformers separates conversations by their positions."""


def _apart(row: Tensor, pieces: Sequence[int], value: int = 0) -> Tensor:
    """The pieces of a packed row [1,L] as padded rows [P,M]."""
    return pad_sequence([*row[0].split_with_sizes(list(pieces))], batch_first=True, padding_value=value)


@dataclass(frozen=True)
class PackedInputs:
    """Adds to the inputs of a packed row what a model needs to keep its conversations apart.

    Attributes:
        kind: the sub-model that computes positions of its own from tokens and pictures; None: none does.
        config: its config.
        lengths: whether the model has layers that take the places where conversations begin.
    """

    kind: type[PreTrainedModel] | None = None
    config: PretrainedConfig | None = None
    lengths: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel, others: bool) -> PackedInputs:
        """What a model needs.

        Args:
            model: the Transformers model.
            others: whether its forward takes arguments of any name.
        """
        own = next((part for part in model.modules() if hasattr(type(part), "get_rope_index")), None)
        return cls(
            None if own is None else type(own),
            None if own is None else own.config,
            others and bool(set(layer_kinds(model)) - _BY_POSITION),
        )

    def __call__(self, inputs: dict[str, Tensor], pieces: Sequence[int]) -> dict[str, Tensor]:
        """The inputs of a row [1,L] with restarting positions, and those that the model needs."""
        if self.kind is not None:
            inputs = {**inputs, "position_ids": self._positions(inputs, pieces)}
        if self.lengths:
            sizes = torch.tensor(pieces, dtype=torch.int32, device=inputs["input_ids"].device)
            begins = pad(sizes.cumsum(0, dtype=torch.int32), (1, 0))
            numbers = torch.arange(len(pieces), dtype=torch.int32, device=sizes.device)
            inputs = {**inputs, "cu_seq_lens_q": begins, "cu_seq_lens_k": begins}
            inputs["seq_idx"] = numbers.repeat_interleave(sizes)[None]
        return inputs

    def _positions(self, inputs: Mapping[str, Tensor], pieces: Sequence[int]) -> Tensor:
        """[1+n,1,L]: restarting positions, by which the mask is made, and the model's n own ones. It computes
        these for a batch of padded rows, one for each conversation, whose pictures follow each other."""
        assert self.kind is not None
        model: Any = object.__new__(self.kind)  # neither weights nor sub-modules are needed
        nn.Module.__init__(model)
        model.config = self.config
        rows = {name: _apart(inputs[name], pieces) for name in _TOKENS if name in inputs}
        mask = _apart(torch.ones_like(inputs["input_ids"]), pieces)
        given = {**inputs, **rows, "attention_mask": mask}
        asked = inspect.signature(self.kind.get_rope_index).parameters
        own = model.get_rope_index(**{name: value for name, value in given.items() if name in asked})[0]
        return torch.cat([inputs["position_ids"][None], own[:, mask.bool()][:, None]])


def layer_kinds(model: PreTrainedModel) -> list[str]:
    """The kinds of a model's layers, as its config names them."""
    return sorted(set(getattr(model.config.get_text_config(), "layer_types", None) or ()))
