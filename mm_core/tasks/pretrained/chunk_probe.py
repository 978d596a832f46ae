"""Whether a model's loss can be computed in chunks: tried on the meta device, before weights exist."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mm_core.errors import ContractError, first_line
from mm_core.modules.torch_calls import Args, Function, Kwargs
from mm_core.tasks.pretrained.chunked_loss import defer_logits
from mm_core.tasks.pretrained.loss import RowLosses, follow
from mm_core.tasks.pretrained.model import forward_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Reached(Exception):
    """The deferred logits reached a loss of the labels."""


@dataclass
class _Reaching(RowLosses):
    def of_model(self, function: Function, args: Args, given: Kwargs) -> Tensor:
        raise _Reached


def obstacle(model: PreTrainedModel, options: Mapping[str, object]) -> str | None:
    """The reason why a model's loss cannot be computed in chunks; None if no reason is known.

    Runs a copy of the model on four tokens. A model that cannot run this way (parameters outside the meta
    device, inputs other than tokens, control flow that depends on values) is tested by the first step
    instead, except text encoder-decoders: many of them add a bias to their logits.

    Args:
        model: the Transformers model, on the meta device.
        options: further arguments of its forward.
    """
    if any(tensor.device.type != "meta" for tensor in model.parameters()):
        return None
    trial = copy.deepcopy(model).eval()  # layers dropped at random read a value, which meta tensors lack
    head = trial.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    ids = torch.ones(1, 4, dtype=torch.int64, device="meta")
    labels = follow(ids.clone(), _Reaching(torch.ones(1, device="meta")))
    try:
        _attend_plainly(trial)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), defer_logits(head, 4)():
            trial(input_ids=ids, labels=labels, **options)
    except ContractError as fault:
        return fault.what if fault.where == "task.loss" else None
    except Exception as fault:
        suspect = (
            getattr(model.config, "is_encoder_decoder", False) and "input_ids" in forward_names(model)[0]
        )
        if suspect or hasattr(model, "final_logits_bias"):
            kind = type(fault).__name__
            return f"{type(model).__name__} cannot run on the meta device ({kind}: {first_line(fault)})"
    return None


def _attend_plainly(model: PreTrainedModel) -> None:
    """Selects eager attention: other kinds read values of masks, which the meta device does not have."""
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
        return
    for module in model.modules():  # Transformers before 4.54
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = "eager"
