"""Attention of packed rows that costs what their conversations cost: `attn_implementation: packed_sdpa`.

Of a packed row (no attention mask, positions that begin anew with each of its pieces) Transformers makes a
dense block-diagonal mask for `sdpa`: L*L of it is stored and computed. Here the lengths of the pieces stand
for the mask, and torch's scaled_dot_product_attention(is_causal=True) is called for each piece. In every
other case, and wherever it is not certain that a mask is causal within pieces and nothing else (sliding
windows, images that see both ways, padding, caches), masks and attention are those of `sdpa`.

Work of a layer falls from L*L to half the sum of the squares of the lengths. It launches the kernels of
attention once a piece instead of once (in half precision on CUDA FlashAttention's: one forward, three
backward): some 10 microseconds each, which shows only where a row is of hundreds of pieces. The lengths are
brought to the host once a forward, where Transformers waits for the device anyway to see whether a row is
packed. What a mask consists of is read from the functions that Transformers composes it of, which 4.53, 4.57
and 5.23 do alike; where another version does not, the mask is the dense one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mm_core.device import attention_of_any_length
from mm_core.errors import ContractError, RunWarning

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "packed_sdpa"
_DENSE = {"sdpa", "eager"}


@dataclass(frozen=True)
class CausalPieces:
    """What stands for the mask of one packed row: the lengths of its pieces, each causal in itself."""

    lengths: tuple[int, ...]


def register() -> None:
    """Makes `packed_sdpa` known to Transformers, for attention and for its mask."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, packed_mask)


def check(model: nn.Module) -> None:
    """ContractError for a model that computes some of its attention otherwise than through `sdpa`."""
    own = _own_attention(model)
    if own is not None and own.config._attn_implementation == NAME:
        raise ContractError(
            f"{type(own).__name__} computes attention in a way of its own, which {NAME} cannot replace",
            where="task.attn_implementation",
            accepted="models that leave their attention to Transformers' AttentionInterface",
            hint="leave attn_implementation out",
        )


def _own_attention(model: nn.Module) -> PreTrainedModel | None:
    """The first model within a model whose attention cannot be chosen; None where there is none."""
    from transformers import PreTrainedModel

    within = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return next((m for m in within if not (m._supports_sdpa and m._supports_attention_backend)), None)


def packed_mask(*sizes: object, **asked: object) -> Tensor | CausalPieces | None:
    """The mask of a forward, as `AttentionMaskInterface` asks for it: `CausalPieces` for a packed row, else
    what `sdpa` takes."""
    from transformers import AttentionMaskInterface

    pieces = _pieces(asked.get("mask_function")) if asked.get("attention_mask") is None else None
    if pieces is None or pieces.shape != (1, asked.get("kv_length")):
        mask: Tensor | None = AttentionMaskInterface()["sdpa"](*sizes, **asked)
        return mask
    return CausalPieces(tuple(pieces[0].cpu().bincount().tolist()))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | CausalPieces | None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention of a layer, as `AttentionInterface` asks for it.

    Args:
        module: the layer.
        query: [B,H,L,D]; key, value: [B,K,L,D], of which each serves H/K heads.
        attention_mask: what `packed_mask` made.
        options: dropout, scaling and whatever else `sdpa` takes.

    Returns:
        [B,L,H,D], and None for the weights, which are never held.
    """
    from transformers import AttentionInterface

    sdpa = AttentionInterface()["sdpa"]
    if not isinstance(attention_mask, CausalPieces):
        found: tuple[Tensor, None] = sdpa(module, query, key, value, attention_mask, **options)
        return found
    options["is_causal"] = True
    # Not slices: the backward of each would fill a whole row of zeros.
    lengths = attention_mask.lengths
    parts = zip(*(whole.split_with_sizes(lengths, dim=2) for whole in (query, key, value)), strict=True)
    with attention_of_any_length(query.device):
        rows = [sdpa(module, *part, None, **options)[0] for part in parts]
    return torch.cat(rows, dim=1), None


def warn_of_dense(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> None:
    """RunWarning where a batch's rows are packed and the model computes all of a row's L*L."""
    positions = inputs.get("position_ids")
    if positions is None or positions.dim() != 2 or "attention_mask" in inputs:
        return
    chosen = model.config.get_text_config()._attn_implementation
    packed = chosen in _DENSE and bool((positions[:, 1:] != positions[:, :-1] + 1).any())
    if packed and _own_attention(model) is None:
        length = positions.shape[1]
        warnings.warn(
            f"rows are packed, and {chosen} computes attention over all of a row: {length} x {length}; "
            f"task.attn_implementation: {NAME} computes each piece alone, which comes to the same",
            RunWarning,
            stacklevel=2,
        )


# -- what a mask function of Transformers consists of ----------------------------------------------


def _pieces(mask_function: object) -> Tensor | None:
    """[B,L] int: the number of the piece that a token is in, where a mask is causal within pieces and
    nothing else; None where it is another, or cannot be told."""
    from transformers import masking_utils

    conditions = _conditions(mask_function)
    others = [part for part in conditions if part is not masking_utils.causal_mask_function]
    if len(conditions) != 2 or len(others) != 1:
        return None
    found = _held(others[0], "packed_sequence_mask_function").get("packed_sequence_mask")
    return found if isinstance(found, Tensor) else None


def _conditions(mask_function: object) -> list[object]:
    """The conditions that must all hold."""
    from transformers import masking_utils

    causal = masking_utils.causal_mask_function
    if _held(mask_function, "remap_positions_for_packed_sequence").get("mask_function") is causal:
        return [causal]  # positions of a piece rise by one: their order is that of its tokens
    parts = _held(mask_function, "and_masks").get("mask_functions", ())
    return [condition for part in parts for condition in _conditions(part)] or [mask_function]


def _held(mask_function: object, factory: str) -> dict[str, Any]:
    """The variables that a mask function holds, where this function of Transformers made it; {} elsewhere."""
    from transformers import masking_utils

    made = getattr(getattr(masking_utils, factory, None), "__code__", None)
    if not isinstance(mask_function, FunctionType) or made is None:
        return {}
    code, cells = mask_function.__code__, mask_function.__closure__ or ()
    if code not in made.co_consts:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
