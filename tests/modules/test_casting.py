"""Inputs are cast, timesteps are not, with and without recomputation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mm_core.errors import ContractError, PlanError
from mm_core.modules import casting
from mm_core.modules.casting import (
    cast_inputs,
    check_dtypes,
    main_dtype,
    quantise_frozen_values,
    uncast_inputs,
)
from mm_core.parallel.activation_checkpointing import recompute


class Block(nn.Module):
    def forward(self, x, timestep, rotary=None):
        self.seen = (x, timestep, rotary)
        return x * 1.0


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_timestep_keeps_its_precision_in_a_block(recomputed, by_name):
    block = Block()
    if recomputed:
        recompute(block, use_reentrant=False)
    cast_inputs(block, torch.bfloat16)
    x, timestep, rotary = torch.ones(2, 3), torch.tensor([998.7]), (torch.ones(3),)
    block(x, timestep=timestep, rotary=rotary) if by_name else block(x, timestep, rotary)
    seen = block.seen
    assert seen[0].dtype == torch.bfloat16
    assert torch.equal(seen[1], timestep) and seen[1].dtype == torch.float32
    assert seen[2][0].dtype == torch.float32


def test_integer_parameters_are_a_readable_error_where_torch_cannot_shard_them(monkeypatch):
    task = nn.Module()
    task.model = nn.Module()
    task.model.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    monkeypatch.setattr(casting, "shards_mixed", lambda: False)
    with pytest.raises(PlanError) as caught:
        check_dtypes(task, ["model"])
    refused = f"model has parameters in int8, which torch {torch.__version__} cannot shard"
    assert str(caught.value) == f"{refused}\n  hint: install torch 2.8 or newer"
    monkeypatch.setattr(casting, "shards_mixed", lambda: True)
    check_dtypes(task, ["model"])


def test_frozen_weights_are_rounded_where_they_lie_and_trained_ones_are_left():
    class Task(nn.Module):
        trainable = ("predictor",)

        def __init__(self) -> None:
            super().__init__()
            self.predictor = nn.Linear(4, 4)
            self.predictor.weight.requires_grad_(False)

    task = Task()
    before = {name: tensor.clone() for name, tensor in task.predictor.state_dict().items()}
    state = {f"predictor.{name}": tensor for name, tensor in task.predictor.state_dict().items()}
    quantise_frozen_values(task, state, torch.bfloat16)
    assert torch.equal(task.predictor.weight, before["weight"].bfloat16().float())
    assert not torch.equal(task.predictor.weight, before["weight"])
    assert torch.equal(task.predictor.bias, before["bias"])


ONES = torch.ones(1, 2, 2)
LOW = ONES.bfloat16()


@pytest.mark.parametrize(
    "product",
    (
        lambda: ONES @ LOW,
        lambda: nn.functional.linear(ONES, LOW[0]),
        lambda: nn.functional.conv1d(ONES, LOW.view(1, 2, 2)),
        lambda: nn.functional.scaled_dot_product_attention(ONES, LOW, LOW),
        lambda: torch.baddbmm(ONES, LOW, ONES),
    ),
)
def test_two_floating_dtypes_are_a_matter_of_casting(product):
    with pytest.raises(ContractError, match="got inputs of a different dtype"), uncast_inputs("bf16"):
        product()


@pytest.mark.parametrize(
    "product",
    (
        lambda: ONES @ ONES.long(),
        lambda: nn.functional.linear(ONES.int(), LOW[0]),
        lambda: nn.functional.cross_entropy(ONES[0], torch.zeros(2, dtype=torch.int32)),
        lambda: torch.zeros(2).scatter_(0, torch.zeros(2), 1.0),
        lambda: nn.functional.conv1d(ONES.long(), LOW.view(1, 2, 2)),
    ),
)
def test_integers_are_none(product):
    with pytest.raises(RuntimeError), uncast_inputs("bf16"):
        product()


def test_adapters_do_not_decide_in_which_dtype_a_model_takes_its_inputs():
    model = nn.Module()
    model.to_q = nn.Module()
    model.to_q.base_layer = nn.Linear(4, 4).bfloat16()
    model.to_q.lora_A = nn.ModuleDict({"default": nn.Linear(4, 64)})
    assert main_dtype(model, {}) == torch.bfloat16
