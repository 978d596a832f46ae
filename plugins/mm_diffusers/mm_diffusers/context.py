"""Where a transformer of Diffusers has its tokens, by its own `_cp_plan`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mm_core.contracts import ContextPlan

PART = "transformer"


def context_plan(model: Any, text: Collection[str | int]) -> ContextPlan:
    """The plan of the predictor whose part `transformer` the model is, for context parallelism.

    Args:
        model: with a `_cp_plan`.
        text: what of it belongs to the tokens of text, which attend in one sequence with the picture's; ():
            cross-attention (`attn2`) reads the text, all of it on each rank.
    """
    split: dict[str, dict[str | int, int]] = {}
    gather: dict[str, int] = {}
    for pattern, what in model._cp_plan.items():
        own = pattern.removesuffix(".*")
        each = [f"{own}.{name}" for name, _ in model.get_submodule(own).named_children()]
        for path in each if own != pattern else [own]:
            place = f"{PART}.{path}".removesuffix(".")
            if isinstance(what, dict):
                own_text = () if text else [key for key in what if str(key).startswith("encoder_")]
                dims = {key: one.split_dim for key, one in what.items() if key not in own_text}
                split[place] = {**split.get(place, {}), **dims}
            else:
                gather[place] = what.gather_dim
    attention = [
        f"{PART}.{path}"
        for path, module in model.named_modules()
        if hasattr(module, "processor") and (text or not path.endswith(".attn2"))
    ]
    masked = any("mask" in str(key) for dims in split.values() for key in dims)
    heads = int(model.config.num_attention_heads)
    return ContextPlan(heads, tuple(attention), split, gather, text, ring=not masked)
