"""FLOPs of a step: by hand, over ranks, with recomputation; counting does not change results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mm_custom_dit.model import CustomDiT

from mm_core.device import peak_flops, published_peak
from mm_core.telemetry.flop_counter import ForwardFlops
from support.ranks import run_ranks

SCRIPT = Path(__file__).with_name("flops_ranks.py")
TINY = {
    "num_layers": 2,
    "num_heads": 2,
    "head_dim": 8,
    "patch_size": (1, 2, 2),
    "in_channels": 3,
    "out_channels": 3,
    "text_dim": 10,
    "freq_dim": 12,
    "ffn_dim": 20,
    "rope_max_seq_len": 16,
}


def by_hand(rows: int, model: dict = TINY, latents: tuple[int, int, int] = (2, 4, 6), text: int = 5) -> int:
    """Operations of a forward of CustomDiT, from its architecture: two a weight and token, and attention."""
    width = model["num_heads"] * model["head_dim"]
    t, h, w = (size // patch for size, patch in zip(latents, model["patch_size"], strict=True))
    tokens, patch = t * h * w, 4
    embed = tokens * model["in_channels"] * patch * width
    time = model["freq_dim"] * width + width * width + width * 6 * width
    caption = text * (model["text_dim"] * width + width * width)
    itself = 4 * tokens * width * width + 2 * tokens * tokens * width
    across = 2 * tokens * width * width + 2 * text * width * width + 2 * tokens * text * width
    feed_forward = 2 * tokens * width * model["ffn_dim"]
    head = tokens * width * model["out_channels"] * patch
    blocks = model["num_layers"] * (itself + across + feed_forward)
    return 2 * rows * (embed + time + caption + blocks + head)


def forward(model: torch.nn.Module, rows: int = 3) -> torch.Tensor:
    torch.manual_seed(1)
    latents, text = torch.randn(rows, 3, 2, 4, 6), torch.randn(rows, 5, 10)
    mask = torch.ones(rows, 5, dtype=torch.bool)
    mask[0, 3:] = False  # padding is computed with, and counts
    return model(latents=latents, timestep=torch.rand(rows) * 1000, text=text, text_mask=mask)


def test_the_forward_of_the_dit_follows_from_its_architecture():
    flops = ForwardFlops()
    with flops.counting():
        forward(CustomDiT(**TINY))
    assert flops.of_step(4) == 3 * 4 * by_hand(3)


def test_the_1_3b_dit_at_49x480x832_takes_386_tflop_a_step():
    """On meta, where nothing is computed: latents of a 4 x 8 x 8 autoencoder, 512 tokens of text."""
    model = {"num_layers": 30, "num_heads": 12, "head_dim": 128, "patch_size": (1, 2, 2), "in_channels": 16}
    model |= {"out_channels": 16, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 8960}
    flops = ForwardFlops()
    with torch.device("meta"):
        predictor, text = CustomDiT(**model), torch.empty(1, 512, 4096)
        mask = torch.ones(1, 512, dtype=torch.bool)
        with flops.counting():
            predictor(
                latents=torch.empty(1, 16, 13, 60, 104), timestep=torch.empty(1), text=text, text_mask=mask
            )
    assert flops.of_step(1) == 3 * by_hand(1, model, (13, 60, 104), 512) == 385_799_494_828_032


def test_only_the_first_micro_batch_is_counted():
    flops = ForwardFlops()
    for rows in (2, 3):
        with flops.counting():
            forward(CustomDiT(**TINY), rows)
    assert flops.of_step(1) == 3 * by_hand(2)


def test_counting_changes_no_bit_of_loss_and_gradients():
    results = []
    for counted in (True, False):
        torch.manual_seed(0)
        model, flops = CustomDiT(**TINY), ForwardFlops()
        if counted:
            with flops.counting():
                loss = (forward(model) - 1).square().sum()
        else:
            loss = (forward(model) - 1).square().sum()
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


def test_a_forward_that_fails_is_counted_when_it_runs_again():
    flops = ForwardFlops()
    with pytest.raises(ZeroDivisionError), flops.counting():
        raise ZeroDivisionError
    assert flops.of_step(1) is None
    with flops.counting():
        torch.randn(2, 3) @ torch.randn(3, 4)
    assert flops.of_step(1) == 3 * 2 * 2 * 3 * 4


def test_a_formula_that_fails_leaves_the_forward_alone_and_the_number_unknown(monkeypatch):
    from torch.utils import flop_counter

    def broken(*args, **kwargs) -> int:
        raise AssertionError("shapes of another world")

    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.aten.mm, broken)
    flops = ForwardFlops()
    with flops.counting():
        assert torch.equal(torch.ones(2, 3) @ torch.ones(3, 4), torch.full((2, 4), 3.0))
    assert flops.of_step(1) is None


def test_what_one_rank_cannot_count_is_unknown_on_all():
    flops = ForwardFlops()
    with flops.counting():
        pass
    assert flops.of_step(1, lambda row: [row, torch.tensor([0.0, 0.0], dtype=torch.float64)]) is None
    assert flops.of_step(2, lambda row: [row, torch.tensor([5.0, 1.0], dtype=torch.float64)]) == 30.0


@pytest.mark.slow
def test_a_sharded_step_counts_the_same_on_one_and_two_ranks_and_with_recompute():
    expected = f"STEP {3 * by_hand(4)}"
    for world, accumulation, rows, recompute in ((1, 2, 2, "plain"), (2, 1, 2, "recompute")):
        outputs = run_ranks(SCRIPT, world, json.dumps(TINY), accumulation, rows, recompute)
        assert [line for out in outputs for line in out.splitlines() if line.startswith("STEP")] == (
            [expected] * world
        )


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.4),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla V100-PCIE-16GB", 112),
        ("Tesla V100-SXM2-32GB", 125),
        ("Ascend910B3", 313),
        ("Ascend910B2", 354),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_the_peak_is_that_of_the_variant(name, tera):
    assert published_peak(name) == (tera and tera * 1e12)


def test_a_cpu_has_no_published_peak(monkeypatch):
    monkeypatch.setattr("mm_core.device.peaks.device_type", lambda: "cpu")
    assert peak_flops() is None


def test_a_counted_step_has_the_kernels_of_an_uncounted_one() -> None:
    """On CUDA, RMSNorm has a kernel that rounds otherwise than what it decomposes into. A resumed run counts
    another step than the run that was not stopped, and must take the same kernel."""
    library = torch.library.Library("mm_flops_test", "FRAGMENT")
    library.define("halved(Tensor x) -> Tensor")
    library.impl("halved", lambda x: x * 0.5, "CompositeImplicitAutograd")
    library.impl("halved", lambda x: x / 2 + 1e-7, "CPU")
    x, w = torch.ones(4, 4), torch.ones(4, 4)
    with torch.no_grad():
        plain = torch.ops.mm_flops_test.halved(x)
        flops = ForwardFlops()
        with flops.counting():
            counted = torch.ops.mm_flops_test.halved(x)
            x @ w
    assert torch.equal(counted, plain) and not torch.equal(plain, x * 0.5)
    assert flops.of_step(1, gather=lambda row: [row]) == 3 * 2 * 4**3


def test_products_are_counted_in_inference_mode_too() -> None:
    """There `linear` arrives as one operator, for which torch has no formula."""
    with torch.inference_mode():
        flops = ForwardFlops()
        with flops.counting():
            torch.nn.functional.linear(torch.ones(2, 4), torch.ones(8, 4))
    assert flops.of_step(1, gather=lambda row: [row]) == 3 * 2 * 2 * 4 * 8
