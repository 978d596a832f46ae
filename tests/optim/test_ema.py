"""The average equals torch's own, returns the weights bit for bit, and is the same on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mm_core.config.sections import EMASection
from mm_core.optim.ema import EMA
from support import parts_ranks
from support.ranks import run_ranks
from support.tensors import shards_of


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def move(net: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))


def average(net: nn.Module, **fields) -> EMA:
    return EMA(shards_of(dict(net.named_parameters())), EMASection(**fields))


@pytest.mark.parametrize("device", ["same", "cpu"])
def test_it_is_torchs_average(device):
    net = model()
    # torch's copies the weights at its first update; ours has them from the start.
    theirs = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(net)
    ours = average(net, decay=0.9, ramp=False, device=device)
    for step in range(1, 8):
        move(net, step)
        theirs.update_parameters(net)
        ours.update(step)
    for name, parameter in theirs.module.named_parameters():
        assert torch.equal(ours.state_dict()[name], parameter), name
    assert ours.updates == 7


def test_the_ramp_lets_an_early_average_follow():
    net = model()
    ema = average(net, decay=0.9)
    kept = []
    for step in range(1, 100):
        kept.append(ema.decay)
        ema.update(step)
    assert kept[:3] == [1 / 10, 2 / 11, 3 / 12]
    assert kept[79] == 80 / 89 and kept[80] == kept[98] == 0.9, "(1 + n) / (10 + n) passes 0.9 at n = 80"


def test_updates_that_are_seldom_decay_as_much():
    """Constant weights w after a start of 0: after k steps the average is w (1 - decay^k)."""
    value = nn.Parameter(torch.zeros(3))
    every = EMA(shards_of({"w": value}), EMASection(decay=0.97, ramp=False, every=5))
    each = EMA(shards_of({"w": value}), EMASection(decay=0.97, ramp=False))
    with torch.no_grad():
        value.fill_(2.0)
    for step in range(1, 24):
        every.update(step)
        each.update(step)
    assert (every.updates, each.updates) == (4, 23)
    assert torch.allclose(every.state_dict()["w"], torch.full((3,), 2 * (1 - 0.97**20)))
    assert torch.allclose(each.state_dict()["w"], torch.full((3,), 2 * (1 - 0.97**23)))


def test_small_steps_are_not_lost_in_half_precision():
    """In bfloat16 an average of 1 would never leave 1 for weights of 1.125 and a decay of 0.999."""
    value = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    ema = EMA(shards_of({"w": value}), EMASection(decay=0.999, ramp=False))
    with torch.no_grad():
        value.fill_(1.125)
    for step in range(1, 501):
        ema.update(step)
    shadow = ema.state_dict()["w"]
    assert shadow.dtype == torch.float32
    assert torch.allclose(shadow, torch.full((4,), 1 + 0.125 * (1 - 0.999**500)), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["same", "cpu"])
def test_the_weights_come_back_bit_for_bit(dtype, device):
    net = model(dtype)
    ema = average(net, decay=0.5, ramp=False, device=device)
    move(net, 1)
    ema.update(1)
    weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    pointers = [p.data_ptr() for p in net.parameters()]
    with pytest.raises(KeyError), ema.applied():
        for name, parameter in net.named_parameters():
            assert torch.equal(parameter, ema.state_dict()[name].to(dtype))
            assert not torch.equal(parameter, weights[name])
        raise KeyError
    assert all(torch.equal(parameter, weights[name]) for name, parameter in net.named_parameters())
    assert pointers == [p.data_ptr() for p in net.parameters()], "the engine's views still hold"
    assert all(p.requires_grad and p.is_leaf for p in net.parameters())


def test_it_is_loaded_in_place_and_begun_anew():
    net, other = model(), model()
    ema = average(net, decay=0.9)
    move(net, 1)
    ema.update(1)
    into = average(other, decay=0.9)
    for name, tensor in into.state_dict().items():
        tensor.copy_(ema.state_dict()[name])
    with into.applied():
        assert all(torch.equal(p, ema.state_dict()[name]) for name, p in other.named_parameters())
    ema.reset()
    assert ema.updates == 0
    assert all(torch.equal(p, ema.state_dict()[name]) for name, p in net.named_parameters())


def test_what_is_frozen_has_no_average():
    net = model()
    net[1].requires_grad_(False)
    ema = average(net, decay=0.9)
    assert set(ema.state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.slow
def test_sharded_over_two_ranks_it_is_that_of_one(tmp_path):
    """The script also checks that weights come back and that training then sees them (see parts_ranks.py)."""
    script = parts_ranks.__file__
    for world in (1, 2):
        run_ranks(script, world, tmp_path / f"{world}.pt", "ema")
    one, two = (torch.load(tmp_path / f"{world}.pt") for world in (1, 2))
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], rtol=0, atol=1e-6), name
    loaded = {name.removeprefix("loaded."): t for name, t in two.items() if name.startswith("loaded.")}
    assert len(loaded) == 6, "two ranks loaded what one saved"
    assert all(torch.equal(one[name], tensor) for name, tensor in loaded.items())
