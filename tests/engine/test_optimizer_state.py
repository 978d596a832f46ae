"""State that a checkpoint could not hold is refused when it is asked for, not lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mm_core.contracts import Loss, Randomness
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.errors import ContractError
from mm_core.train.run import process_group


class Counting(torch.optim.SGD):
    """SGD that counts in a Python number, as some optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["k"] = state.get("k", 0) + 1
        return super().step(closure)


class Line(nn.Linear):
    def init_weights(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)


class LineTask(nn.Module):
    trainable, frozen = ("predictor",), ()

    def __init__(self) -> None:
        super().__init__()
        self.predictor = Line(3, 2)


def test_python_numbers_in_optimizer_state_are_refused():
    with torch.device("meta"):
        task = LineTask()
    engine = FSDP2Engine()
    with process_group():
        engine.prepare(task, engine.plan(task, 1, 0), lambda p: Counting(p.values(), lr=0.1), Randomness(1))
        engine.micro_step(lambda: Loss(task.predictor(torch.ones(1, 3)).sum(), 1.0), last=True, scale=1.0)
        engine.step(engine.grad_norm(), None)
        with pytest.raises(ContractError, match="Counting keeps state that is no tensor: k"):
            engine.state_dict()
