"""The streamed base in one process: what is on the device, equal gradients, and what cannot be streamed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mm_core.builtin.configs.engines import BaseConfig
from mm_core.contracts import FrozenPlan
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.errors import PlanError
from mm_core.parallel.activation_checkpointing import recompute
from mm_core.parallel.streamed_base import StreamedBase, staying
from support.tiny_models import Task

CPU = torch.device("cpu")
PATHS = tuple(f"predictor.blocks.{index}" for index in range(4))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.small = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + scale * torch.tanh(self.base(x) + self.small(x))


class Net(nn.Module):
    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        if shared:
            self.blocks[2].base.weight = self.blocks[0].base.weight

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale)
        return x


def task_of(**options: bool) -> Task:
    torch.manual_seed(1)
    return Task(predictor=Net(**options))


def gradients(task: Task, needs: bool = False, base: StreamedBase | None = None) -> list[torch.Tensor]:
    for path in PATHS:
        recompute(task.get_submodule(path), use_reentrant=False)
    x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_(needs)
    for _ in range(2):  # accumulated
        task.predictor(x, torch.tensor(0.5)).square().sum().backward()
        if base is not None:
            base.sweep()
    return [p.grad for p in task.parameters() if p.grad is not None]


@pytest.mark.parametrize("keep", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("needs", [False, True])
def test_gradients_are_equal_and_blocks_come_and_go(keep, needs):
    resident, task = gradients(task_of(), needs), task_of()
    base = StreamedBase(task, FrozenPlan("base", "streamed", PATHS, 0, 0, 0, keep), CPU, None)
    base.begin()
    away = [task.get_submodule(path).base.weight.untyped_storage().nbytes() < 8 * 8 * 4 for path in PATHS]
    assert away == [index >= staying(keep, 4) for index in range(4)]
    streamed = gradients(task, needs, base)
    assert len(streamed) == 4 and all(torch.equal(a, b) for a, b in zip(streamed, resident, strict=True))
    assert [task.get_submodule(path).base.weight.shape for path in PATHS] == [(8, 8)] * 4
    assert len(base.host) == 2 * sum(away), "the kept weights and biases, for checkpoints"


@pytest.mark.parametrize("keep", [0, 2, 9])
def test_weights_compute_in_another_dtype_and_are_kept_in_their_own(keep):
    resident, task = task_of().bfloat16(), task_of()
    base = StreamedBase(task, FrozenPlan("base", "streamed", PATHS, 0, 0, 0, keep), CPU, torch.bfloat16)
    for block in task.predictor.blocks:
        block.small.bfloat16()
    before = {name: tensor.clone() for name, tensor in task.state_dict().items() if "base" in name}
    base.begin()
    assert base.host.keys() == before.keys() and all(torch.equal(base.host[n], before[n]) for n in before)
    x = torch.linspace(-1, 1, 24).view(3, 8).bfloat16()
    for one in (resident, task):
        for path in PATHS:
            recompute(one.get_submodule(path), use_reentrant=False)
        one.predictor(x, x[0, 0]).float().square().sum().backward()
        base.sweep()
    for one, other in zip(resident.predictor.blocks, task.predictor.blocks, strict=True):
        assert torch.equal(one.small.weight.grad, other.small.weight.grad)


def test_a_forward_without_gradients_leaves_nothing_on_the_device():
    plain, task = task_of(), task_of()
    base = StreamedBase(task, FrozenPlan("base", "streamed", PATHS, 0, 0, 0, 1), CPU, None)
    base.begin()
    x = torch.ones(3, 8)
    with torch.no_grad():
        assert torch.equal(task.predictor(x, x[0]), plain.predictor(x, x[0]))
    base.sweep()
    assert all(task.get_submodule(path).base.weight.untyped_storage().nbytes() == 4 for path in PATHS)


def plan(task: Task, **fields: object):
    return FSDP2Engine(base=BaseConfig(stream=True, keep=2), **fields).plan(task, 1, 2)


def test_the_plan_counts_three_blocks_at_keep_2():
    found = plan(task_of(), recompute_modules="auto").base
    block = 4 * (64 + 8)
    assert (found.device_bytes, found.call_bytes, found.host_bytes) == (block, 2 * block, 3 * block)


def test_what_cannot_be_streamed_is_one_sentence():
    with pytest.raises(PlanError, match=r"only recomputed modules can be streamed, and .* is empty") as fault:
        plan(task_of())
    assert "hint: set engine.recompute_modules: auto" in str(fault.value)
    trained = task_of()
    trained.requires_grad_(True)
    with pytest.raises(PlanError, match="contains no frozen weight"):
        plan(trained, recompute_modules="auto")
    with pytest.raises(PlanError, match=r"shares predictor\.blocks\.0\.base\.weight with predictor\.blocks"):
        plan(task_of(shared=True), recompute_modules="auto")


@pytest.mark.parametrize("keep", [0, 2, 9])
def test_what_a_resume_loads_after_the_beginning_computes_in_blocks_that_stay_too(keep):
    """Blocks that stay and compute in another dtype have a copy of their own on the device."""
    task = task_of()
    base = StreamedBase(task, FrozenPlan("base", "streamed", PATHS, 0, 0, 0, keep), CPU, torch.bfloat16)
    base.begin()
    for tensor in base.host.values():
        tensor.fill_(0.25)
    seen: list[float] = []
    for path in PATHS:
        layer = task.get_submodule(path).base
        layer.register_forward_pre_hook(lambda module, _: seen.append(float(module.weight.float().mean())))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gradients(task, base=base)
    assert seen and set(seen) == {0.25}
