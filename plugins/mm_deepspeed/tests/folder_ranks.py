"""Run by each rank: a plain DeepSpeed script that trains small modules two steps and saves a folder of each.

usage: folder_ranks.py OUT [CASE ...]
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from mm_custom_dit.model import CustomDiT
from torch import nn

from support.rank_program import run_as_rank
from support.runs import DIT

CASES = {"0_fp32": {}, "1_fp32": {}, "2_fp32": {}, "3_fp32": {}, "1_bf16": {}, "2_bf16": {}, "3_bf16": {}}
CASES |= {"1_bf16_sums_fp32": {"data_types": {"grad_accum_dtype": "fp32"}}}
CASES |= {
    "3_fp32_small_groups": {"sub_group_size": 20},
    "2_fp32_round_robin": {"round_robin_gradients": True},
}


class Net(nn.Module):
    """Sizes that two ranks do not divide, a frozen parameter, a buffer, and a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 5)
        self.frozen = nn.Parameter(torch.randn(3, 3), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("table", torch.arange(7.0))
        self.third = nn.Linear(5, 3)
        self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (self.first(x) @ self.frozen).relu() * self.scale + self.third(x)
        return (self.second(hidden) * self.table[1]).square().mean()


class DiT(CustomDiT):
    """The real model, on inputs that are always the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        latents, text = x.mean().expand(2, 12, 2, 4, 4), torch.ones(2, 3, DIT["text_dim"])
        out = super().forward(latents, torch.tensor([20.0, 500.0]), text, torch.ones(2, 3, dtype=torch.bool))
        return (out - 1).square().mean()


def train(out: Path, name: str, module: nn.Module) -> None:
    """Trains a module as a case does; saves its folder, and the masters beside it as `whole.pt`."""
    stage, _, rest = name.partition("_")
    more, half = CASES[name], rest.startswith("bf16")
    zero = {"stage": int(stage), "stage3_param_persistence_threshold": 0, "memory_efficient_linear": False}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": half},
        "zero_optimization": zero | {key: more[key] for key in more if key != "data_types"},
        **{key: more[key] for key in more if key == "data_types"},
    }
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() < 2]},
    ]
    still = {n: p.detach().clone() for n, p in module.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    torch.manual_seed(7 + engine.global_rank)
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 5, dtype=torch.bfloat16 if half else torch.float32)))
        engine.step()
        engine.save_checkpoint(out / name)
    masters = {n: safe_get_full_fp32_param(p) for n, p in module.named_parameters() if n not in still}
    if name in ("0_fp32", "2_fp32_round_robin"):  # of the latter, DeepSpeed's function mixes up parameters
        masters = {n: p.detach().clone() for n, p in module.named_parameters() if n not in still}
    kind = torch.bfloat16 if half else torch.float32
    whole = masters | {n: t.to(kind) for n, t in still.items()}
    whole |= {n: t.clone() for n, t in module.named_buffers() if n in module.state_dict()}
    if engine.global_rank == 0:
        torch.save(whole, out / name / "whole.pt")
    engine.destroy()


def main(out: str, *cases: str) -> None:
    deepspeed.comm.init_distributed(dist_backend="gloo")
    for name in cases or CASES:
        torch.manual_seed(3)
        train(Path(out), name, Net())
    if cases:
        return
    for name in ("2_fp32", "3_fp32"):
        torch.manual_seed(4)
        model = DiT(**DIT)
        model.init_weights()
        train(Path(out) / "dit", name, model)


if __name__ == "__main__":
    with mock.patch("deepspeed.comm.torch.build_shm_op", lambda: None):  # nothing is compiled
        run_as_rank(main)
