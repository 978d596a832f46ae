"""Attention for packed rows at the cost of their pieces: `attn_implementation: packed_sdpa`.

For a packed row (no attention mask, positions that restart at each piece) Transformers makes a dense
block-diagonal mask for `sdpa`: L*L values are stored and computed. This module replaces the mask by the
lengths of the pieces, and calls torch's scaled_dot_product_attention(is_causal=True) for each piece. In every
other case, and whenever a mask may be more than causal within pieces (sliding windows, images that attend
both ways, padding, caches), masks and attention are those of `sdpa`.

The work of a layer falls from L*L to half the sum of the squared lengths. Attention kernels are launched once
per piece instead of once (in half precision on CUDA those of FlashAttention: one forward, three backward):
some 10 microseconds each, which matters only for rows of hundreds of pieces. The lengths are copied to the
host once per forward, at a point where Transformers synchronises anyway to test whether a row is packed. The
parts of a mask are read from the functions that Transformers composes it of; versions 4.53, 4.57 and 5.23 do
this in the same way. With a version that does not, the dense mask is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


_MaskFunction = Any
"""Transformers' mask functions: of batch, head, query and key, whether the query sees the key."""


@dataclass(frozen=True)
class CausalPieces:
    """Replaces the attention mask of one packed row: the lengths of its pieces, each causal in itself."""

    lengths: tuple[int, ...]


def register() -> None:
    """Registers `packed_sdpa` with Transformers, so that a task's model can use it for attention."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, packed_mask)


def check(model: nn.Module) -> None:
    """Checks that the attention of a task's model can be replaced by `packed_sdpa`, if the config selects it.

    Raises:
        ContractError: the model computes some of its attention in code of its own.
    """
    own = _own_attention(model)
    if own is not None and own.config._attn_implementation == NAME:
        raise ContractError(
            f"{type(own).__name__} computes attention in its own code, which {NAME} cannot replace",
            where="task.attn_implementation",
            accepted=f"{NAME} for models that use Transformers' AttentionInterface",
            hint="remove task.attn_implementation",
        )


def _own_attention(model: nn.Module) -> PreTrainedModel | None:
    """The first sub-model whose attention cannot be selected; None if there is none."""
    from transformers import PreTrainedModel

    within = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return next((m for m in within if not (m._supports_sdpa and m._supports_attention_backend)), None)


def packed_mask(*sizes: object, **asked: object) -> Tensor | CausalPieces | None:
    """The attention mask in a forward of a task's Transformers model: `CausalPieces` for a packed row.

    Its signature is that of `AttentionMaskInterface`; for all other rows it returns the mask for `sdpa`.
    """
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
    """Attention for packed rows in a layer of a task's Transformers model.

    Its signature is that of Transformers' `AttentionInterface`.

    Args:
        module: the layer.
        query: [B,H,L,D].
        key: [B,K,L,D]; each of its heads serves H/K heads of the query.
        value: [B,K,L,D].
        attention_mask: made by `packed_mask`.
        options: dropout, scaling and other arguments of `sdpa`.

    Returns:
        [B,L,H,D], and None for the attention weights, which are never computed.
    """
    from transformers import AttentionInterface

    sdpa = AttentionInterface()["sdpa"]
    if not isinstance(attention_mask, CausalPieces):
        found: tuple[Tensor, None] = sdpa(module, query, key, value, attention_mask, **options)
        return found
    options["is_causal"] = True
    # split instead of slices: the backward of each slice would fill a complete row with zeros.
    lengths = attention_mask.lengths
    parts = zip(*(whole.split_with_sizes(lengths, dim=2) for whole in (query, key, value)), strict=True)
    with attention_of_any_length(query.device):
        rows = [sdpa(module, *part, None, **options)[0] for part in parts]
    return torch.cat(rows, dim=1), None


def warn_of_dense(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> None:
    """Warns once if a batch's rows are packed and the model computes attention over complete rows."""
    positions = inputs.get("position_ids")
    if positions is None or "attention_mask" in inputs:
        return
    positions = positions[0] if positions.dim() == 3 else positions
    chosen = model.config.get_text_config()._attn_implementation
    packed = chosen in _DENSE and bool((positions[:, 1:] != positions[:, :-1] + 1).any())
    if packed and _own_attention(model) is None:
        length = positions.shape[1]
        warnings.warn(
            f"rows are packed, but {chosen} computes attention over complete rows ({length} x {length}); "
            f"set task.attn_implementation: {NAME} for the same result with less work",
            RunWarning,
            stacklevel=2,
        )


# -- blocks of tokens that attend to each other both ways -------------------------------------------


@contextmanager
def blocks_in_pieces(model: PreTrainedModel) -> Iterator[None]:
    """Corrects a model's masks of packed rows with blocks, such as images, whose tokens attend both ways.

    Transformers looks up such blocks by places in a conversation where their table has places in the row, and
    lets blocks of the same number in several conversations see each other. Other masks stay as they are.
    """
    from transformers import masking_utils

    name = model.config.get_text_config()._attn_implementation
    known = getattr(masking_utils, "ALL_MASK_ATTENTION_FUNCTIONS", {})
    if name not in known:
        yield
        return
    make = known[name]

    def corrected(*sizes: object, mask_function: _MaskFunction, **asked: object) -> object:
        return make(*sizes, mask_function=_by_row(mask_function), **asked)

    known[name] = corrected  # an override of this one instance, which all models use
    try:
        yield
    finally:
        del known[name]


def _by_row(mask_function: _MaskFunction) -> _MaskFunction:
    """A mask function whose blocks, if it has any, are those of the row, each within its piece."""
    from transformers import masking_utils

    parts = [*_parts(mask_function)]
    pieces = [part for part in parts if _held(part, "packed_sequence_mask_function")]
    if not pieces or not any(_held(part, "blockwise_overlay") for part in parts):
        return mask_function

    def changed(part: _MaskFunction, positions: Tensor | None) -> _MaskFunction:
        if found := _held(part, "remap_positions_for_packed_sequence"):
            return changed(found["mask_function"], found["position_ids"])
        for factory in ("and_masks", "or_masks"):
            if found := _held(part, factory):
                joined = [changed(each, positions) for each in found["mask_functions"]]
                return getattr(masking_utils, factory)(*joined)
        if positions is None or _held(part, "blockwise_overlay"):
            return part
        return masking_utils.remap_positions_for_packed_sequence(part, positions)

    return masking_utils.and_masks(pieces[0], changed(mask_function, None))


def _parts(mask_function: object) -> Iterator[object]:
    """A mask function, and those that it is made of."""
    yield mask_function
    for factory in ("and_masks", "or_masks"):
        for part in _held(mask_function, factory).get("mask_functions", ()):
            yield from _parts(part)
    if found := _held(mask_function, "remap_positions_for_packed_sequence"):
        yield from _parts(found["mask_function"])


# -- the parts of a Transformers mask function -----------------------------------------------------


def _pieces(mask_function: object) -> Tensor | None:
    """[B,L] int: the piece number of each token, if a mask is only causal within pieces; None for any other
    mask, and if its parts are unknown."""
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
    """The closure variables of a mask function made by the named Transformers function; {} for any other."""
    from transformers import masking_utils

    made = getattr(getattr(masking_utils, factory, None), "__code__", None)
    if not isinstance(mask_function, FunctionType) or made is None:
        return {}
    code, cells = mask_function.__code__, mask_function.__closure__ or ()
    if code not in made.co_consts:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
