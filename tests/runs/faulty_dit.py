"""A one-file plugin for tests: the custom DiT whose second block breaks on one rank."""

from dataclasses import dataclass
from typing import Literal

from mm_custom_dit.config import CustomDiTConfig

from mm_core import Component, hookimpl


@dataclass(frozen=True)
class FaultyDiTConfig(CustomDiTConfig):
    fault: Literal["output", "gradient"] = "output"
    rank: int = 1
    calls: tuple[int, int] = (4, 8)  # forwards in training that break: those of step 3, and their repetition


@hookimpl
def mm_predictors():
    return [Component(name="faulty_dit", target="faulty_dit:build", config="faulty_dit:FaultyDiTConfig")]


def build(fault, rank, calls, **fields):
    import torch
    import torch.distributed as dist
    from mm_custom_dit.model import CustomDiT

    class BreakGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("nan")

    class FaultyDiT(CustomDiT):
        count = 0

        def forward(self, latents, timestep, text, text_mask):
            breaks = self.training and dist.get_rank() == rank and calls[0] <= self.count < calls[1]
            self.count += self.training
            hook = None
            if breaks:
                change = BreakGradient.apply if fault == "gradient" else (lambda x: x * float("nan"))
                hook = self.blocks[1].attn2.register_forward_hook(lambda m, i, output: change(output))
            try:
                return super().forward(latents, timestep, text, text_mask)
            finally:
                if hook is not None:
                    hook.remove()

    return FaultyDiT(**fields)
