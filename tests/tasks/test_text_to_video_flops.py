"""What text_to_video's training costs: of each micro-batch, and of a step in the plan."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mm_core.config.load import load_config
from mm_core.contracts import Randomness, SampleKey, StepFlops, VideoTextBatch, linear_flops
from mm_core.diffusion.encoders.text import ByteTextEncoder
from mm_core.plan import RunPlan, build_task, make_plan
from mm_core.tasks.text_to_video.task import TextToVideo

LORA = 'train.adapters=[{"targets":["to_q","to_v","ffn.net.2"],"rank":4}]'


def batch(rows: int, frames: int) -> VideoTextBatch:
    return VideoTextBatch(
        keys=[SampleKey(0, index) for index in range(rows)],
        sample_weights=torch.ones(rows),
        ids=[str(index) for index in range(rows)],
        pixels=torch.zeros(rows, 3, frames, 16, 16),
        captions=["a red circle moves left"] * rows,
    )


def ready(task: nn.Module) -> TextToVideo:
    """On the CPU, with weights of any values: no operation depends on them."""
    assert isinstance(task, TextToVideo)
    task.to_empty(device="cpu")
    for name in task.frozen:
        getattr(task, name).load(torch.device("cpu"))
    return task


def counted(task: TextToVideo, samples: VideoTextBatch) -> tuple[float, int]:
    """The loss's own count, and what torch counts of its forward and backward."""
    inputs = task.prepare(samples, Randomness(1))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = task.loss(inputs)
        loss.total.backward()
    return loss.flops, counter.get_total_flops()


@pytest.mark.parametrize("adapters", [[], [LORA]], ids=["full", "lora"])
def test_a_loss_reports_the_operations_of_its_own_micro_batch(tiny, adapters):
    task = ready(build_task(load_config(tiny, adapters)))
    for rows, frames in ((1, 8), (3, 8), (2, 4)):
        said, found = counted(task, batch(rows, frames))
        assert said == pytest.approx(found, rel=1e-12) and said > 0


def test_a_predictor_that_does_not_declare_them_leaves_them_to_torchs_count(tiny):
    class Silent(nn.Linear):
        text_padding, patch_size, in_channels, out_channels, text_dim = "masked", (2, 2, 2), 12, 12, 32

        def forward(self, latents, timestep, text, text_mask):
            return super().forward(latents.movedim(1, -1)).movedim(-1, 1).clone()

    given = ready(build_task(load_config(tiny)))
    task = TextToVideo(Silent(12, 12), given.autoencoder, given.text_encoder, given.scheduler)
    assert task.loss(task.prepare(batch(1, 8), Randomness(1))).flops == 0
    sample = {"num_frames": 8, "height": 16, "width": 16}
    once = 2 * 8**3 * 12**2  # a linear layer of 12 channels at each place of the latents
    assert task.sample_flops(sample, ["predictor"]) == StepFlops(once, once, once)


def test_the_plan_shows_those_of_a_step(tiny):
    """8 samples of 32 tokens; the text as long as the encoder lets it be."""
    config = load_config(tiny, ["engine.recompute_modules=[predictor.blocks.0]"])
    plan = make_plan(config, 2)
    task = ready(build_task(config))
    samples = replace(batch(8, 8), captions=["x" * 500] * 8)
    loss = task.loss(task.prepare(samples, Randomness(1)))
    assert plan.flops is not None and plan.flops.useful == loss.flops
    assert 0 < plan.flops.recomputed < plan.flops.forward / 2
    assert make_plan(load_config(tiny), 2).flops == replace(plan.flops, recomputed=0.0)
    assert plan.to_mapping()["flops"]["forward"] == plan.flops.forward


def test_the_plan_prints_them(tiny):
    plan = make_plan(load_config(tiny), 1)
    shown = replace(plan, flops=StepFlops(2.5e12, 5.125e12, 1.5e6)).render().splitlines()
    begin = shown.index("FLOPs per step, all ranks")
    assert shown[begin : begin + 4] == [
        "FLOPs per step, all ranks",
        "  forward                    2.5 TFLOP",
        "  backward                 5.125 TFLOP",
        "  recomputed                 1.5 MFLOP",
    ]
    assert isinstance(plan, RunPlan)
    assert "FLOPs" not in replace(plan, flops=None).render()


def test_shapes_of_text_conditions_reach_module_flops_in_the_plan_and_in_training(tiny):
    class Pooled(ByteTextEncoder):
        condition_shapes = MappingProxyType({"pooled": (32,)})

        def encode(self, ids, mask):
            hidden, mask = super().encode(ids, mask)
            return hidden, mask, {"pooled": hidden.sum(1)}

    class Counting(nn.Linear):
        text_padding, patch_size, in_channels, out_channels, text_dim = "masked", (2, 2, 2), 12, 12, 32
        shapes = ()

        def forward(self, latents, timestep, text, text_mask, pooled, fps=24.0, size=None):
            return super().forward(latents.movedim(1, -1)).movedim(-1, 1) + pooled.sum()

        def module_flops(self, latents, timestep, text, pooled):
            self.shapes = (*self.shapes, (latents, pooled))
            return [linear_flops("", latents[0], 12, 12)]

    given = ready(build_task(load_config(tiny)))
    encoder = Pooled(32)
    encoder.load(torch.device("cpu"))
    task = TextToVideo(Counting(12, 12), given.autoencoder, encoder, given.scheduler)
    assert task.sample_flops({"num_frames": 8, "height": 16, "width": 16}, ()) is not None
    task.loss(task.prepare(batch(3, 8), Randomness(1)))
    assert [shapes[1] for shapes in task.predictor.shapes] == [(1, 32), (3, 32)]
