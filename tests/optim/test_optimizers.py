"""Optimizers: the papers' updates, for any kernel and any sharding of the parameters."""

from __future__ import annotations

import dataclasses
import math
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from mm_core.builtin.configs.training import AdamWConfig, MuonConfig
from mm_core.errors import PlanError, PluginError
from mm_core.optim.adamw import adam, adamw, has_fused_adamw
from mm_core.optim.adamw_8bit import adamw_8bit
from mm_core.optim.muon import muon
from support import parts_ranks
from support.marks import needs_muon
from support.ranks import run_ranks

SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def one_group(parameters, **settings):
    return [{"params": parameters, "names": [str(i) for i in range(len(parameters))], **settings}]


def gradients(count: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator) * 10.0 ** (index - 3) for index in range(count)]


def trained(pieces: list[int]) -> torch.Tensor:
    """Six updates of 101 numbers held as parameters of the given sizes."""
    start = torch.linspace(-2, 2, 101)
    held = [nn.Parameter(piece.clone()) for piece in start.split(pieces)]
    optimizer = adamw(one_group(held), **SETTINGS)
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
    assert adamw(one_group([nn.Parameter(torch.ones(2))]), **SETTINGS).defaults["fused"] is True
    on_meta = adamw(one_group([nn.Parameter(torch.ones(2, device="meta"))]), **SETTINGS)
    assert (on_meta.defaults["fused"], on_meta.defaults["foreach"]) == (False, True)


def test_a_yaml_list_of_betas_is_taken():
    settings = dataclasses.asdict(AdamWConfig()) | {"betas": [0.9, 0.95]}
    assert adamw(one_group([nn.Parameter(torch.ones(2))]), **settings).defaults["betas"] == (0.9, 0.95)


def test_a_group_keeps_its_names_and_its_own_decay():
    first, second = (nn.Parameter(torch.ones(2)) for _ in "ab")
    groups = [*one_group([first]), *one_group([second], weight_decay=0.0, lr_scale=0.5)]
    optimizer = adamw(groups, **SETTINGS)
    assert [(g["names"], g["weight_decay"]) for g in optimizer.param_groups] == [(["0"], 0.1), (["0"], 0.0)]
    for parameter in (first, second):
        parameter.grad = torch.zeros(2)
    optimizer.step()
    assert torch.equal(second, torch.ones(2)), "no gradient and no decay move nothing"
    assert torch.allclose(first, torch.full((2,), 1 - 1e-2 * 0.1))


# -- Muon --------------------------------------------------------------------------------------


def layers() -> tuple[list[nn.Parameter], list[str]]:
    generator = torch.Generator().manual_seed(2)
    shapes = {"embed.weight": (9, 6), "block.weight": (6, 8), "conv.weight": (8, 2, 3), "block.bias": (6,)}
    return [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes.values()], list(shapes)


def give_gradients(parameters, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def muon_of(parameters, names, **fields):
    settings = dataclasses.asdict(MuonConfig()) | {"adamw_for": ("embed",), **fields}
    return muon([{"params": parameters, "names": names}], **settings)


@needs_muon
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_matrices_move_as_by_torchs_muon_and_the_rest_as_by_adamw(adjust):
    ours, names = layers()
    theirs, _ = layers()
    both = muon_of(ours, names, adjust_lr=adjust, lr=0.02, adamw_lr=1e-3)
    flat = [theirs[1], nn.Parameter(theirs[2].detach().flatten(1).clone())]
    matrix = torch.optim.Muon(flat, lr=0.02, weight_decay=0.1, adjust_lr_fn=adjust)
    rest = torch.optim.AdamW([theirs[0], theirs[3]], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        flat[1].grad = theirs[2].grad.flatten(1)
        for optimizer in (both, matrix, rest):
            optimizer.step()
    for ours_now, theirs_now in zip(
        ours, [theirs[0], flat[0], flat[1].view(8, 2, 3), theirs[3]], strict=True
    ):
        assert torch.allclose(ours_now, theirs_now, rtol=1e-6, atol=1e-7)


@needs_muon
def test_muons_step_has_the_size_of_the_rate():
    """0.2 x rate in root mean square (arXiv 2502.16982, section 2.2), within the iteration's singular
    values of 0.7 to 1.2."""
    weight = nn.Parameter(torch.zeros(64, 32))
    optimizer = muon([{"params": [weight], "names": ["w"]}], **dataclasses.asdict(MuonConfig(lr=0.1)))
    weight.grad = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    assert 0.7 < float(weight.detach().square().mean().sqrt()) / (0.2 * 0.1) < 1.2


@needs_muon
def test_muon_is_one_optimizer():
    parameters, names = layers()
    optimizer = muon_of(parameters, names, adamw_lr=3e-4)
    assert [(g["names"], g["lr"]) for g in optimizer.param_groups] == [
        (["block.weight", "conv.weight"], 1e-3),
        (["embed.weight", "block.bias"], 3e-4),
    ]
    give_gradients(parameters, 0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True)), "rates reach both parts"
    held = {name: set(optimizer.state[p]) for name, p in zip(names, parameters, strict=True)}
    assert held["block.weight"] == {"momentum_buffer"}
    assert held["embed.weight"] == {"step", "exp_avg", "exp_avg_sq"}
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in parameters)


@needs_muon
def test_muon_goes_on_from_torchs_state_dict():
    parameters, names = layers()
    optimizer = muon_of(parameters, names)
    give_gradients(parameters, 0)
    optimizer.step()
    others = [nn.Parameter(p.detach().clone()) for p in parameters]
    copy = muon_of(others, names)
    copy.load_state_dict(deepcopy(optimizer.state_dict()))
    for held, which in ((parameters, optimizer), (others, copy)):
        give_gradients(held, 1)
        which.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))


@needs_muon
def test_muon_without_a_matrix_or_with_a_pattern_of_nothing_is_refused():
    bias = [{"params": [nn.Parameter(torch.ones(3))], "names": ["bias"]}]
    with pytest.raises(PlanError) as caught:
        muon(bias, **dataclasses.asdict(MuonConfig()))
    assert str(caught.value) == (
        "optimizer: muon has no matrix to train\n"
        "  accepted: parameters with two or more dimensions that optimizer.adamw_for does not match\n"
        "  hint: narrow optimizer.adamw_for, or set optimizer.type to adamw"
    )
    with pytest.raises(PlanError, match=r"optimizer.adamw_for: pattern 'embedding' matches no module"):
        muon_of(*layers(), adamw_for=("embedding",))


def test_a_torch_without_muon_is_a_readable_error(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(PluginError) as caught:
        muon_of(*layers())
    assert str(caught.value) == (
        f"optimizer: muon needs torch.optim.Muon, which torch {torch.__version__} does not have\n"
        "  accepted: torch >= 2.9\n"
        "  hint: install a newer torch, or set optimizer.type to adamw"
    )


# -- 8 bits ------------------------------------------------------------------------------------


def test_without_torchao_the_extra_is_named(monkeypatch):
    from mm_core.optim import adamw_8bit as module

    module._optimizer_class.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "torchao.optim", None)
    with pytest.raises(PluginError) as caught:
        adamw_8bit(one_group([nn.Parameter(torch.ones(2))]), **SETTINGS)
    assert "adamw_8bit needs torchao, which cannot be imported" in str(caught.value)
    assert "hint: pip install 'mm-core[low-bit]', or set optimizer.type to adamw" in str(caught.value)


def test_a_device_that_torchao_does_not_serve_is_a_readable_error():
    from mm_core.optim import adamw_8bit as module

    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("No working C++ compiler found\nand more")

    module._check_runs.cache_clear()
    with pytest.raises(PluginError) as caught:
        module._check_runs(Broken, torch.device("cpu"))
    assert str(caught.value) == (
        "optimizer: torchao's 8-bit AdamW does not run on cpu: No working C++ compiler found\n"
        "  accepted: a device that torch.compile supports (on CPU it needs a C++ compiler)\n"
        "  hint: set optimizer.type to adamw"
    )


@pytest.mark.slow
def test_moments_of_8_bits_follow_adamw_and_survive_a_checkpoint(tmp_path):
    pytest.importorskip("torchao.optim")
    from torch.distributed import checkpoint as dcp

    start = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    settings = SETTINGS | {"lr": 1e-3, "weight_decay": 0.0}
    ours, theirs, resumed = (nn.Parameter(start.clone()) for _ in range(3))
    eight, full, again = (
        adamw_8bit(one_group([ours]), **settings),
        adamw(one_group([theirs]), **settings),
        None,
    )
    for step in range(6):
        for parameter, optimizer in ((ours, eight), (theirs, full)):
            give_gradients([parameter], step)
            optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step)  # a number, as the engine sets it
            optimizer.step()
    moved = (theirs - start).norm()
    assert ((ours - theirs).norm() / moved).item() < 0.02
    assert math.prod(eight.state[ours]["exp_avg"].codes.shape) == 64 * 128
    copies = {f"w.{k}": v.clone() for k, v in eight.state[ours].items()}
    dcp.save(copies, checkpoint_id=tmp_path, no_dist=True)
    again = adamw_8bit(one_group([resumed]), **settings)
    with torch.no_grad():
        resumed.copy_(ours)
    resumed.grad = torch.zeros_like(resumed)
    again.param_groups[0]["lr"] = 0.0
    again.step()
    dcp.load({f"w.{k}": v for k, v in again.state[resumed].items()}, checkpoint_id=tmp_path, no_dist=True)
    for parameter, optimizer in ((ours, eight), (resumed, again)):
        give_gradients([parameter], 7)
        optimizer.param_groups[0]["lr"] = 1e-3
        optimizer.step()
    assert torch.equal(ours, resumed)


@pytest.mark.slow
def test_moments_of_8_bits_saved_in_the_background_resume_bit_for_bit(tmp_path, monkeypatch):
    """On two ranks, one of which has no row of a tensor and must not run what was compiled for the other."""
    pytest.importorskip("torchao.optim")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # both ranks compile
    run_ranks(Path(__file__).with_name("adamw_8bit_ranks.py"), 2, tmp_path / "run")


# -- over ranks --------------------------------------------------------------------------------


@pytest.mark.slow
@needs_muon
def test_muon_on_two_ranks_moves_as_on_one(tmp_path):
    script = parts_ranks.__file__
    for world in (1, 2):
        run_ranks(script, world, tmp_path / f"{world}.pt", "muon")
    one, two = (torch.load(tmp_path / f"{world}.pt") for world in (1, 2))
    assert one.keys() == two.keys()
    matrices = ("predictor.first.weight", "predictor.first.weight.momentum_buffer")
    assert all(torch.equal(one[name], two[name]) for name in matrices), "Muon's part, bit for bit"
    for name in one:
        # AdamW's fused kernel rounds the last numbers of an odd shard differently.
        assert torch.allclose(one[name], two[name], rtol=1e-6, atol=1e-9), name


def test_adam_is_torchs_with_l2_decay():
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
    group = {"params": [ours], "names": ["w"]}
    pair = (
        adam([group], lr=0.1, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.3),
        torch.optim.Adam([theirs], lr=0.1, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.3, foreach=False),
    )
    for _ in range(5):
        for parameter, optimizer in zip((ours, theirs), pair, strict=True):
            parameter.grad = parameter.detach() ** 2 - 0.5
            optimizer.step()
    torch.testing.assert_close(ours, theirs)
