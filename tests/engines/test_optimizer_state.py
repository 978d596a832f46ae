"""Optimizer state that a checkpoint cannot contain is refused, not lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from mm_core.builtin.configs.training import MuonConfig
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.store import CheckpointStore
from mm_core.config.sections import TrainSection
from mm_core.contracts import Loss, Randomness
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.errors import ContractError
from mm_core.optim.muon import muon
from mm_core.optim.parameter_groups import groups_of
from mm_core.runtime.process_group import process_group
from support import tensors
from support.marks import needs_muon
from support.tiny_models import Task


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


def test_python_numbers_in_optimizer_state_are_refused():
    with torch.device("meta"):
        task = Task(predictor=Line(3, 2))
    engine = FSDP2Engine()
    with process_group():
        engine.prepare(task, engine.plan(task, 1, 0), lambda p: Counting(p.values(), lr=0.1), Randomness(1))
        engine.micro_step(lambda: Loss(task.predictor(torch.ones(1, 3)).sum(), 1.0), last=True, scale=1.0)
        engine.step(engine.grad_norm(), None)
        with pytest.raises(
            ContractError,
            match=r"\.py, line \d+: Counting has state that is not a tensor, .*: k",
        ):
            engine.state_dict()


class Pair(nn.Module):
    """Its second part has no gradient while `late` is False."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, late: bool) -> torch.Tensor:
        return self.second(self.first(x)) if late else self.first(x)

    def init_weights(self) -> None:
        for layer in (self.first, self.second):
            layer.reset_parameters()


def use_adamw(parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters.values(), lr=0.1)


def use_muon(parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    return muon(groups_of(parameters, TrainSection(steps=9)), **asdict(MuonConfig(lr=0.1)))


Make = Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]


def late_engine(make: Make, seed: int) -> tuple[Task, FSDP2Engine]:
    with torch.device("meta"):
        task = Task(predictor=Pair())
    engine = FSDP2Engine()
    engine.prepare(task, engine.plan(task, 1, 0), make, Randomness(seed))
    return task, engine


def take_step(task: Task, engine: FSDP2Engine, late: bool) -> None:
    engine.micro_step(
        lambda: Loss(task.predictor(torch.ones(1, 3), late).square().sum(), 1.0), last=True, scale=1.0
    )
    engine.step(engine.grad_norm(), None)


def whole(engine: FSDP2Engine) -> dict[str, torch.Tensor]:
    state = engine.state_dict()
    return {f"{part}.{name}": tensors.whole(t) for part, named in state.items() for name, t in named.items()}


@pytest.mark.parametrize("make", [use_adamw, pytest.param(use_muon, marks=needs_muon)])
def test_parameters_that_no_gradient_has_reached_have_no_state_after_a_resume_either(
    make: Make, tmp_path: Path
):
    """Invented state would count steps that they never made, at their first gradient."""
    with process_group():
        task, engine = late_engine(make, seed=1)
        for _ in range(2):
            take_step(task, engine, late=False)
        store = CheckpointStore(tmp_path, keep=1)
        path = store.save(2, engine.state_dict(), {}, "x: 1\n")
        stepped = {"predictor.first.weight", "predictor.first.bias"}
        found = {name.rpartition(".")[0] for name in OpenedCheckpoint(path).names("optimizer")}
        assert found == stepped

        other_task, other = late_engine(make, seed=2)
        store.load(path, other.state_template(found))
        before = whole(engine)
        assert not any(name.startswith("optimizer.predictor.second") for name in before)
        compare(whole(other), before)

        for late in (False, True, True):
            take_step(task, engine, late)
            take_step(other_task, other, late)
        assert any(name.startswith("optimizer.predictor.second") for name in whole(engine))
        compare(whole(other), whole(engine))


def compare(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
