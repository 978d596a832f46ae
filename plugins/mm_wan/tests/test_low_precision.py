"""Wan in bf16: what Diffusers keeps in float32, and what an engine that casts every parameter makes of it."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers import WanTransformer3DModel
from mm_wan.encoders.umt5 import WanUMT5
from mm_wan.encoders.vae import WanVAE
from mm_wan.predictor.transformer import WanTransformer
from mm_wan.testing import make_tiny_checkpoint

from mm_core.contracts import PredictorInputs
from mm_core.plugin.registry import build
from mm_core.tasks.text_to_video.task import TextToVideo


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_latents_have_the_dtype_of_most_parameters(tmp_path):
    """Diffusers keeps tables, norms and the timestep's layers in float32; the first parameter is a table."""
    folder = make_tiny_checkpoint(tmp_path)
    theirs = WanTransformer3DModel.from_pretrained(
        folder, subfolder="transformer", torch_dtype=torch.bfloat16
    )
    ours = WanTransformer(from_pretrained=str(folder))
    for name, tensor in theirs.named_parameters():
        ours.get_parameter(name).data = tensor.data.clone()
    assert next(ours.parameters()).dtype == torch.float32
    task = TextToVideo(
        ours, WanVAE(str(folder)), WanUMT5(str(folder)), build("scheduler", {"type": "wan/flow_match"})
    )
    latents, text = noise(1, 16, 2, 4, 4), noise(1, 512, 32, seed=2)
    timestep = torch.tensor([998.7])
    with torch.no_grad():
        found = task.predict(PredictorInputs(latents, timestep), text, torch.ones(1, 512, dtype=bool), None)
        expected = theirs(latents.bfloat16(), timestep, text.bfloat16(), return_dict=False)[0]
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


@pytest.mark.parametrize("timestep", [998.7, 500.6, 12.5])
def test_casting_every_parameter_costs_little_beside_bf16_itself(timestep, tmp_path):
    """FSDP2 has one dtype a group, so that the engine casts what Diffusers keeps in float32 as well. Against
    float32 it is off by at most 5 % more than Diffusers' mixture: activations in bf16 are what costs."""
    torch.manual_seed(0)
    exact = WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=32, num_layers=6, text_dim=32, freq_dim=256, ffn_dim=256,
        rope_max_seq_len=64,
    ).eval()  # fmt: skip
    exact.save_pretrained(tmp_path)
    mixed = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16).eval()
    cast = torch.nn.Module.to(copy.deepcopy(exact), torch.bfloat16)  # the library's own `to` warns
    latents, text = noise(4, 16, 3, 12, 12), noise(4, 512, 32, seed=2)

    @torch.no_grad()
    def computed(model: WanTransformer3DModel, dtype: torch.dtype) -> torch.Tensor:
        times = torch.full((4,), timestep)
        return model(latents.to(dtype), times, text.to(dtype), return_dict=False)[0].float()

    reference = computed(exact, torch.float32)
    errors = [(computed(model, torch.bfloat16) - reference).norm() for model in (mixed, cast)]
    assert errors[0] < 0.02 * reference.norm()
    assert errors[1] < 1.05 * errors[0]
