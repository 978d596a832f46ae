"""A one-file plugin with a predictor that declares where its tokens are; tests replace a line of it."""

from mm_custom_dit.model import CustomDiT

from mm_core import Component, hookimpl
from mm_core.contracts import ContextPlan

SIZES = {"num_layers": 2, "num_heads": 2, "head_dim": 6, "patch_size": [1, 2, 2], "in_channels": 4}
SIZES |= {"out_channels": 4, "text_dim": 8, "freq_dim": 8, "ffn_dim": 16, "rope_max_seq_len": 16}


class Good(CustomDiT):
    def context_plan(self) -> ContextPlan:
        return ContextPlan(
            heads=self.sizes.num_heads,
            attention=("blocks.{*}.attn1",),
            split={"rope": {0: 1, 1: 1}, "blocks.0": {"x": 1}},
            gather={"proj_out": 1},
        )


@hookimpl
def mm_predictors():
    config = "mm_custom_dit.config:CustomDiTConfig"
    return [Component(name="good", target="context_predictor:Good", config=config, tiny=SIZES)]
