"""Modules without an `init_weights` of their own are initialised by their layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mm_core.contracts import PredictorModule, Randomness
from mm_core.errors import ContractError
from mm_core.modules.initialise import initialise
from mm_core.testing import check_predictor


class Block(nn.Module):
    """A layer with an `init_weights`, which the default of its parent calls."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(4))

    def init_weights(self) -> None:
        nn.init.constant_(self.gain, 0.25)


class Small(PredictorModule):
    """A predictor that writes only a constructor and a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.in_channels, self.text_dim = 4, 6
        self.conv, self.norm, self.block = nn.Conv3d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), Block()
        self.words, self.time = nn.Linear(6, 4), nn.Linear(1, 4)

    def forward(self, latents: Tensor, timestep: Tensor, text: Tensor, text_mask: Tensor) -> Tensor:
        dtype = self.words.weight.dtype
        words = self.words(text.masked_fill(~text_mask[..., None], 0)) * text_mask[..., None]
        time = self.time((timestep[:, None] / 10).cos().to(dtype))
        given = (words.sum(1) + time) * self.block.gain
        return (self.norm(self.conv(latents.to(dtype))) + given[:, :, None, None, None]).to(latents.dtype)


def test_a_predictor_of_layers_needs_no_init_weights() -> None:
    with torch.device("meta"):
        model = Small()
    model.to_empty(device="cpu")
    initialise(model, "predictor", Randomness(0))
    assert model.block.gain.tolist() == [0.25] * 4
    assert float(model.conv.weight.detach().abs().max()) <= (4 * 27) ** -0.5, "as Conv3d draws it"


def test_it_keeps_the_contract() -> None:
    check_predictor(Small)


class Table(Small):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(3))
        self.register_buffer("order", torch.arange(3))


def test_what_no_layer_fills_is_named() -> None:
    with pytest.raises(ContractError) as caught:
        initialise(Table(), "predictor", Randomness(0))
    assert caught.value.what == (
        "reset_parameters of the layers of Table left 2 tensors unset: predictor.places, predictor.order"
    )
    assert str(caught.value.hint).startswith("fill them completely in an init_weights of Table: ")


class Part(nn.Module):
    """A module of an author who has forgotten `init_weights`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


def test_a_module_of_a_library_needs_no_init_weights() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.MultiheadAttention(4, 2))
    initialise(net, "net", Randomness(0))
    assert net[1].running_var.tolist() == [1.0] * 4
    with pytest.raises(ContractError, match=r"layers of Part left 1 tensor unset: net\.scale"):
        initialise(Part(), "net", Randomness(0))
