"""The kit's check of `module_flops` finds numbers that differ from torch's; it skips predictors without."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mm_custom_dit.model import CustomDiT
from torch import nn

from mm_core.errors import ContractError
from mm_core.testing import PREDICTOR_CHECKS, PredictorProbe
from mm_core.testing.kit import NotApplicable

TINY = {"num_layers": 1, "num_heads": 2, "head_dim": 8, "in_channels": 4, "out_channels": 4}
TINY |= {"text_dim": 8, "freq_dim": 8, "ffn_dim": 16, "rope_max_seq_len": 16}
flops = PREDICTOR_CHECKS["flops"]


class Twice(CustomDiT):
    def module_flops(self, *shapes, **named):
        return [replace(one, flops=2 * one.flops) for one in super().module_flops(*shapes, **named)]


class Apart(CustomDiT):
    """As if no input came from a layer before."""

    def module_flops(self, *shapes, **named):
        return [replace(product, after=()) for product in super().module_flops(*shapes, **named)]


@pytest.mark.parametrize(("faulty", "part"), [(Twice, "forward"), (Apart, "backward")])
def test_numbers_that_are_not_torchs_are_a_readable_error(faulty, part):
    with pytest.raises(ContractError, match=f"operations for the {part}, but torch counts") as caught:
        flops(PredictorProbe(lambda: faulty(**TINY)))
    assert caught.value.accepted == "a difference of at most 1%"


def test_a_predictor_may_leave_them_to_torch():
    class Silent(nn.Module):
        text_padding, patch_size, in_channels, out_channels, text_dim = "masked", (1, 2, 2), 4, 4, 8

        def __init__(self):
            super().__init__()
            self.inner = CustomDiT(**TINY)

        def init_weights(self):
            self.inner.init_weights()

        def forward(self, latents, timestep, text, text_mask):
            return self.inner(latents, timestep, text, text_mask)

    with pytest.raises(NotApplicable, match=r"it is no .*SupportsModuleFlops"):
        flops(PredictorProbe(Silent))
    flops(PredictorProbe(lambda: CustomDiT(**TINY)))
