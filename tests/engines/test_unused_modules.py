"""A sharded module that has not run yet does not break gradient accumulation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mm_core.contracts import Loss, Randomness
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.runtime.process_group import process_group
from support.tensors import whole
from support.tiny_models import Task


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.get_submodule(name)(x) + 0

    def init_weights(self) -> None:
        for layer in (self.first, self.second):
            layer.reset_parameters()


STEPS = ("first", "first", "second", "first")


@pytest.mark.parametrize("wrap", [("predictor.{*}",), ()])
@pytest.mark.parametrize("reduce_dtype", ["fp32", None])
def test_branches_accumulate_as_without_an_engine(wrap, reduce_dtype):
    batches = [torch.randn(2, 3, generator=torch.Generator().manual_seed(i)) for i in range(12)]
    with torch.device("meta"):
        task = Task(predictor=Branches())
    with process_group():
        engine = FSDP2Engine(sub_modules_to_wrap=wrap, reduce_dtype=reduce_dtype)
        adamw = {"lr": 0.1, "weight_decay": 0.5}
        engine.prepare(
            task,
            engine.plan(task, 1, 2),
            lambda p: torch.optim.AdamW(p.values(), **adamw),
            Randomness(0),
        )
        plain = Branches()
        plain.load_state_dict({n.removeprefix("predictor."): whole(p) for n, p in engine.named_parameters()})
        optimizers = {n: torch.optim.AdamW(plain.get_submodule(n).parameters(), **adamw) for n in set(STEPS)}
        for step, name in enumerate(STEPS):
            for micro in range(3):
                x = batches[3 * step + micro]
                engine.micro_step(
                    lambda x=x, name=name: Loss(task.predictor(x, name).square().sum(), 1.0),
                    last=micro == 2,
                    scale=1.0,
                )
                plain(x, name).square().sum().backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in plain.get_submodule(name).parameters()])
            assert engine.grad_norm() == pytest.approx(float(norm), rel=1e-6)
            engine.step(engine.grad_norm(), None)
            optimizers[name].step()
            optimizers[name].zero_grad()
            for path, parameter in engine.named_parameters():
                expected = plain.get_parameter(path.removeprefix("predictor."))
                torch.testing.assert_close(whole(parameter), expected.data, rtol=1e-6, atol=1e-7)
