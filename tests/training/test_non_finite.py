"""The first module that is not finite is found again, by its path, and nothing is left behind."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mm_core.contracts import Loss
from mm_core.engines import EngineBase
from mm_core.runtime.process_group import process_group
from mm_core.training.non_finite import first_non_finite
from support import parts_ranks
from support.ranks import run_ranks


class Plain(EngineBase):
    """An engine of one process without shards and without an optimizer."""

    def __init__(self, task: nn.Module) -> None:
        super().__init__()
        self._parameters = dict(task.named_parameters())

    def micro_step(self, compute, *, last, scale):
        return self._backward(compute(), scale)

    def discard(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None


@pytest.fixture(autouse=True)
def group():
    with process_group(None):
        yield


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * float("inf")


class Block(nn.Module):
    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.inner, self.fault = nn.Linear(4, 4), fault

    def forward(self, x: Tensor) -> dict[str, tuple[Tensor, None]]:
        x = self.inner(x)
        if self.fault == "output":
            x = x / torch.zeros(())
        if self.fault == "gradient":
            x = BadGradient.apply(x)
        return {"hidden": (x, None)}


class Model(nn.Module):
    def __init__(self, faults: tuple[str, ...], recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(map(Block, faults))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))["hidden"][0]
        return x


class Task(nn.Module):
    def __init__(self, *faults: str, recompute: bool = False) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.model = Model(faults, recompute)


def search(task: Task, bad_sample: bool = False, micros: int = 2) -> str | None:
    """The error; the samples of the second micro-batch may not be finite."""
    seen: list[int] = []

    def forward(index: int) -> Loss:
        x = torch.ones(2, 4)
        if bad_sample and index == 1:
            x = x * float("nan")
        seen.append(index)
        return Loss(task.model(task.frozen(x)).square().sum(), 1.0)

    forwards = [partial(forward, index) for index in range(micros)]
    said = first_non_finite(task, ["model"], forwards, Plain(task))
    assert all(parameter.grad is None for parameter in task.parameters())
    assert not any(module._forward_hooks for module in task.modules()), "the hooks are gone"
    assert seen in ([], list(range(micros))), "all micro-batches or none: FSDP's ranks must agree"
    return said


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("faults", "said"),
    [
        (("", "output", ""), "the first module whose output is not finite is model.blocks.1"),
        (("", "", "output"), "the first module whose output is not finite is model.blocks.2"),
        (
            ("", "gradient", ""),
            "the first gradient that is not finite is that of the output of model.blocks.1.inner",
        ),
        (("", "", ""), None),
    ],
)
def test_the_module_is_named_also_where_it_is_recomputed(faults, said, recompute):
    assert search(Task(*faults, recompute=recompute)) == said


def test_of_a_bad_output_and_a_bad_gradient_the_output_is_first():
    assert "output is not finite is model.blocks.2" in (search(Task("gradient", "", "output")) or "")


def test_a_bad_input_is_reported_with_the_module_that_got_it():
    assert search(Task("", ""), bad_sample=True) == (
        "the first module whose output is not finite is model.blocks.0.inner (its inputs were not finite"
        " either)"
    )


def test_a_parameter_that_is_bad_before_the_step_is_named_and_nothing_is_computed():
    task = Task("", "")
    with torch.no_grad():
        task.model.blocks[1].inner.bias[2] = float("nan")
    assert search(task) == "the parameter model.blocks.1.inner.bias was not finite before this step"


def test_a_rerun_that_fails_leaves_no_hooks():
    task = Task("")
    for parameter in task.parameters():
        parameter.grad = torch.ones_like(parameter)

    def fails() -> Loss:
        raise KeyError("gone")

    with pytest.raises(KeyError):
        first_non_finite(task, ["model"], [fails], Plain(task))
    assert all(parameter.grad is None for parameter in task.parameters())
    assert not any(module._forward_hooks for module in task.modules())


@pytest.mark.slow
def test_a_parameter_that_is_bad_in_one_ranks_shard_is_named_and_no_rank_waits_for_another(tmp_path):
    """The loss is bad on both ranks: the one with the reason reports it."""
    script = parts_ranks.__file__
    run_ranks(script, 2, tmp_path / "said.pt", "parameter", timeout=60)
    assert [[kind, said.partition("\n")[0]] for kind, said in torch.load(tmp_path / "said.pt")] == [
        ["PeerError", "the loss or a gradient of rank 1 is not finite"],
        [
            "TrainingError",
            "step 1, samples ['clip_1.mp4']: the loss is not finite; the parameter"
            " predictor.last.weight was not finite before this step; no parameter was changed",
        ],
    ]
