"""Scalar parameters train: as a plain PyTorch loop does, on any number of ranks, and from a checkpoint on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from support.ranks import run_ranks
from support.scripts import script

SCRIPT = Path(__file__).with_name("scalar_ranks.py")


def outcome(folder: Path, world: int, begin: Path | None = None, **fields: object) -> dict:
    out = folder / f"{len(list(folder.iterdir()))}.pt"
    run_ranks(SCRIPT, world, out, json.dumps({"param_dtype": None, **fields}), *filter(None, [begin]))
    return torch.load(out) | {"file": out}


State = dict[str, torch.Tensor]


def reference(first: State, steps: int, average: State | None = None) -> tuple[list[float], State]:
    """The norms and weights of a plain loop over the whole batch.

    Args:
        first: the first weights.
        steps: number of steps.
        average: average of the weights; changed in place.
    """
    parts = script(SCRIPT)
    net = parts.Contrast()
    net.load_state_dict({name.removeprefix("net."): tensor for name, tensor in first.items()})
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], **parts.OPTIONS)
    x, y = parts.rows()
    norms = []
    for _ in range(steps):
        ((net(x) - y).square().sum() / parts.ROWS).backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), parts.CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in net.named_parameters():
            if average is not None and parameter.requires_grad:
                average[f"net.{name}"].lerp_(parameter.detach(), 0.5)
    return norms, net.state_dict()


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> dict:
    return outcome(tmp_path_factory.mktemp("one"), 1)


def test_one_rank_is_a_plain_loop(one):
    norms, weights = reference(one["first"], 4)
    assert one["norms"] == pytest.approx(norms, rel=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(one["state"]["model"][f"net.{name}"], tensor, rtol=1e-5, atol=1e-6)
    assert float(one["first"]["net.logit_scale"]) == pytest.approx(0.7)
    assert float(one["state"]["model"]["net.logit_scale"]) < 0.5, "it has been trained"
    assert float(one["state"]["model"]["net.bias"]) == pytest.approx(0.1), "it is frozen"
    assert one["state"]["optimizer"]["net.logit_scale.exp_avg"].shape == ()


def test_the_average_has_scalars_as_well(one):
    """It is that of a plain loop; where it is applied, the module computes with it."""
    average = {name: one["first"][name].clone() for name in one["state"]["ema"]}
    reference(one["first"], 4, average)
    assert average["net.logit_scale"].shape == () and "net.bias" not in average
    for name, tensor in one["state"]["model"].items():
        torch.testing.assert_close(
            one["state"]["average"][name], average.get(name, tensor), rtol=1e-5, atol=1e-6
        )
    assert one["state"]["ema"]["net.logit_scale"] != one["state"]["model"]["net.logit_scale"]


def equal(one: dict, two: dict) -> None:
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert one["state"].keys() == two["state"].keys()
    for part, named in one["state"].items():
        assert named.keys() == two["state"][part].keys()
        for name, tensor in named.items():
            torch.testing.assert_close(two["state"][part][name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{}, {"sharding_size": 1}, {"offload_to_cpu": True}, {"reshard_after_forward": False}]
)
def test_two_ranks_are_one(one, tmp_path, fields):
    if "sharding_size" in fields and not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        with pytest.raises(AssertionError, match="cannot keep replicas on CPU"):
            outcome(tmp_path, 2, **fields)
        return
    equal(one, outcome(tmp_path, 2, **fields))


@pytest.mark.slow
def test_with_muon_two_ranks_are_one(one, tmp_path):
    """Scalars belong to its part that is AdamW."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has Muon since 2.9")
    alone = outcome(tmp_path, 1, optimizer="muon")
    assert {"net.logit_scale.exp_avg", "net.first.weight.momentum_buffer"} < alone["state"][
        "optimizer"
    ].keys()
    assert float(alone["state"]["model"]["net.logit_scale"]) < 0.5
    assert alone["norms"][0] == one["norms"][0] and alone["norms"][1] != one["norms"][1]
    for fields in ({}, {"offload_to_cpu": True}):
        equal(alone, outcome(tmp_path, 2, optimizer="muon", **fields))


def test_with_moments_of_8_bits_two_ranks_are_one(one, tmp_path):
    pytest.importorskip("torchao.optim")
    alone = outcome(tmp_path, 1, optimizer="adamw_8bit")
    assert alone["norms"] == pytest.approx(one["norms"], rel=1e-3)
    for fields in ({}, {"offload_to_cpu": True}):
        equal(alone, outcome(tmp_path, 2, optimizer="adamw_8bit", **fields))


@pytest.mark.slow
def test_what_two_ranks_have_saved_one_rank_trains_on(one, tmp_path):
    """As one rank does that has trained all steps itself."""
    two = outcome(tmp_path, 2)
    norms, weights = reference(one["first"], 8)
    on = outcome(tmp_path, 1, two["file"])
    assert two["norms"] + on["norms"] == pytest.approx(norms, rel=1e-4)
    for name, tensor in weights.items():
        torch.testing.assert_close(on["state"]["model"][f"net.{name}"], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_scalar_keeps_its_dtype_where_the_rest_computes_in_bf16(tmp_path):
    two = outcome(tmp_path, 2, param_dtype="bf16")
    scale = two["state"]["model"]["net.logit_scale"]
    assert scale.dtype == torch.float32 and float(scale) < 0.5
