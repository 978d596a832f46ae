"""AdamW: the paper's update, whatever kernel computes it and however parameters are cut."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from mm_core.builtin.configs.training import AdamWConfig
from mm_core.train.optimizers import adamw, has_fused_adamw

SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def gradients(count: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator) * 10.0 ** (index - 3) for index in range(count)]


def trained(pieces: list[int]) -> torch.Tensor:
    """Six updates of 101 numbers held as parameters of the given sizes."""
    start = torch.linspace(-2, 2, 101)
    held = [nn.Parameter(piece.clone()) for piece in start.split(pieces)]
    optimizer = adamw(held, **SETTINGS)
    for gradient in gradients(6, 101):
        for parameter, piece in zip(held, gradient.split(pieces), strict=True):
            parameter.grad = piece.clone()
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in held])


def test_the_update_is_algorithm_2_of_the_paper():
    """Written out in float64 from arXiv 1711.05101, algorithm 2, with a schedule of 1 and alpha = lr."""
    value = torch.linspace(-2, 2, 101, dtype=torch.float64)
    first = second = torch.zeros_like(value)
    for step, gradient in enumerate(gradients(6, 101), 1):
        gradient = gradient.double()
        first = 0.8 * first + 0.2 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        update = (first / (1 - 0.8**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-6)
        value = value - 1e-2 * update - 1e-2 * 0.1 * value
    assert torch.allclose(trained([101]).double(), value, rtol=0, atol=2e-6)


@pytest.mark.parametrize("pieces", [[51, 50], [34, 34, 33], [1] * 101])
def test_how_parameters_are_cut_changes_no_bit(pieces):
    assert torch.equal(trained(pieces), trained([101]))


def test_the_fused_kernel_serves_where_the_device_has_it():
    assert has_fused_adamw("cpu")
    assert adamw([nn.Parameter(torch.ones(2))], **SETTINGS).defaults["fused"] is True
    on_meta = adamw([nn.Parameter(torch.ones(2, device="meta"))], **SETTINGS)
    assert (on_meta.defaults["fused"], on_meta.defaults["foreach"]) == (False, True)


def test_a_yaml_list_of_betas_is_taken():
    settings = dataclasses.asdict(AdamWConfig()) | {"betas": [0.9, 0.95]}
    assert adamw([nn.Parameter(torch.ones(2))], **settings).defaults["betas"] == (0.9, 0.95)
